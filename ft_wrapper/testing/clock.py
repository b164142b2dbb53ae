"""Virtual time, and who waits by it: threads until a test turns the clock, or the tasks of a scheduler."""

import bisect
import dataclasses
import datetime
import heapq
import math
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

_ROOT = "ft_wrapper/1/"
_LONGEST = 100


@dataclasses.dataclass(eq=False)
class Waiter:
    """Somebody who waits for keys.

    Args:
        missing: keys that must still come.
        woken: whether all have come. Stays true, even where a key is deleted again meanwhile.
        task: whose it is, if a scheduler runs it.
        patience: real seconds without a turn of the clock after which the wait is given up; None: for ever.
    """

    missing: set[str]
    woken: bool = False
    task: Any = None
    patience: float | None = None


class Clock:
    """Virtual time for threads. It stands still until `advance` turns it.

    Args:
        start: the first time that it shows, in seconds.
        lock: held while a store carries out an operation; its own when None.

    Attributes:
        aside: whether the present look at a store is no part of the simulation: no step, no hook, no fault.
    """

    def __init__(self, start: float = 0.0, lock: Any = None) -> None:
        self._now = start
        self._sleepers = 0
        self._turned = threading.Condition()
        self.lock = lock or self._turned
        self.aside = False

    def now(self) -> float:
        """The time that it shows, in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Turns the clock forward; whose deadline has passed then wakes up.

        Args:
            seconds: by how much.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"seconds={seconds} must not be negative: time only goes forward")
        with self._turned:
            self._now += seconds
            self._turned.notify_all()

    def wait_for_sleepers(self, count: int, timeout: float = 30.0) -> None:
        """Waits until so many threads wait by this clock: before that, turning it would not reach them.

        Args:
            count: how many threads at least.
            timeout: real seconds to wait at the longest.

        Raises:
            TimeoutError: fewer threads came to wait.
        """
        with self._turned:
            if not self._turned.wait_for(lambda: self._sleepers >= count, timeout):
                raise TimeoutError(f"{self._sleepers} of {count} threads wait after {timeout:g} s")

    def sleep(self, seconds: float) -> None:
        """Sleeps until the clock has been turned by so many seconds."""
        self.block(Waiter(set()), self.now() + seconds)

    def step(self, client: str, operation: str, args: Sequence[Any]) -> None:
        """Comes before each operation of a store. Does nothing here; a scheduler lets others go first."""

    def observe(self, result: Any) -> None:
        """Comes after each operation of a store. Does nothing here; a scheduler notes it in the trace."""

    def block(self, waiter: Waiter, deadline: float) -> bool:
        """Blocks until the waiter is woken; False if its deadline passed first.

        Raises:
            RuntimeError: the waiter's patience came to its end.
        """
        with self._turned:
            self._sleepers += 1
            self._turned.notify_all()
            try:
                now = self._now
                while not self._turned.wait_for(
                    lambda: waiter.woken or self._now >= deadline, waiter.patience
                ):
                    if self._now == now:
                        raise RuntimeError(
                            f"would block for ever: in {waiter.patience:g} s no one has written "
                            f"{sorted(waiter.missing)} nor turned the clock; its time is virtual: let "
                            "another thread write the keys, or call clock.advance()"
                        )
                    now = self._now
            finally:
                self._sleepers -= 1
            return waiter.woken

    def woke(self, waiter: Waiter) -> None:
        """A waiter was woken; called with `lock` held."""
        self._turned.notify_all()


# What runs on a scheduler ----------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False, slots=True)
class Step:
    """One step of a task, or something that happened to one.

    Args:
        time: virtual seconds since the start.
        task: name of the task; empty for what happens to no task.
        what: the store operation, or what happened.
        args: the operation's arguments.
        result: what the operation returned; None until it has.
    """

    time: float
    task: str
    what: str
    args: Sequence[Any] = ()
    result: Any = None


class Killed(BaseException):
    """Ends a crashed task. Never raised where anything it does could still be seen by others."""


@dataclasses.dataclass(eq=False)
class Task:
    """One simulated process. Made by `Scheduler.spawn`.

    Args:
        name: shown in the trace.
        daemon: whether a run ends without waiting for it.
        number: how many were spawned before it.
        steps: steps taken so far: store operations and sleeps.
        upcoming: operation and arguments of the step that it is about to take, if it has come to one.
        ready: whether it can run.
        done: whether it has returned, failed or crashed.
        crashed: whether it was killed.
        result: what its function returned.
        delay: virtual seconds that each of its steps takes.
    """

    name: str
    daemon: bool
    number: int
    steps: int = 0
    upcoming: tuple[str, Sequence[Any]] | None = None
    ready: bool = True
    done: bool = False
    crashed: bool = False
    result: Any = None
    delay: float = 0.0
    _greenlet: Any = None
    _waiter: Waiter | None = None
    _deadline: float = math.inf
    _paused_until: float = 0.0
    _plan: dict[int, list[Callable[[], None]]] = dataclasses.field(default_factory=dict)
    _step: Step | None = None

    def wakes_at(self, now: float) -> float:
        """The time from which it can run, as things stand."""
        ready = now if self._waiter is None or self._waiter.woken else self._deadline
        return max(ready, self._paused_until)

    def is_paused(self, now: float) -> bool:
        """Whether it stands still at a time, or has not gone on since."""
        return self._paused_until > now


class Turns:
    """Whose turn it may be: the tasks that can run, in the order of spawning, and when others wake.

    Attributes:
        ready: those that can run.
        required: how many are left that are no daemons.
    """

    def __init__(self) -> None:
        self.ready: list[Task] = []
        self.required = 0
        self._wakes: list[tuple[float, int, Task]] = []

    def add(self, task: Task) -> None:
        """A task can run."""
        task.ready = True
        bisect.insort(self.ready, task, key=operator.attrgetter("number"))

    def wait(self, task: Task, now: float) -> None:
        """A task has to wait."""
        self._remove(task)
        time = task.wakes_at(now)
        if time < math.inf:
            heapq.heappush(self._wakes, (time, task.number, task))

    def end(self, task: Task) -> None:
        """A task has ended."""
        if not task.done:
            task.done = True
            self.required -= not task.daemon
            self._remove(task)

    def _remove(self, task: Task) -> None:
        if task.ready:
            task.ready = False
            self.ready.remove(task)

    def next_time(self) -> float | None:
        """When somebody may wake; None if no one will."""
        return self._wakes[0][0] if self._wakes else None

    def wake(self, time: float) -> None:
        """Those can run that wake at a time."""
        while self._wakes and self._wakes[0][0] <= time:
            task = heapq.heappop(self._wakes)[2]
            # Those that were woken or paused meanwhile have another entry, or none.
            if not task.ready and not task.done and task.wakes_at(time) <= time:
                self.add(task)


# For people ------------------------------------------------------------------------------------------------


def show(steps: Sequence[Step]) -> str:
    """The steps, one a line: when, who, what, and what came of it."""
    return "\n".join(
        f"{step.time:10.3f}  {step.task:<12} {describe(step.what, step.args)}{_result(step)}".rstrip()
        for step in steps
    )


def describe(what: str, args: Sequence[Any]) -> str:
    """An operation with its arguments, without the common part of all keys."""
    if what == "compare_set" and len(args) == 3 and args[1] == args[2]:
        return f"read {_short(args[0])}"  # how a TCPStore reads in one step
    return " ".join([what, *map(_short, args)]).rstrip()


def shorter(operation: str) -> str:
    """A described operation without the records that it writes."""
    return operation.partition(" {")[0]


def _result(step: Step) -> str:
    if step.result is None:
        return ""
    result = _short(step.result)
    # Of an absent key a read by compare_set returns what was expected.
    is_read = step.what == "compare_set" and step.args[1] == step.args[2]
    return " -> nothing" if is_read and result == _short(step.args[1]) else f" -> {result}"


def _short(value: Any) -> str:
    text = _text(value).strip().replace("\n", "; ").replace(_ROOT, "") or "''"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, datetime.timedelta):
        return f"{value.total_seconds():g} s"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return repr(value)
