"""A deterministic scheduler: the real store code of many processes, step by step, in one thread.

Each simulated process is a task. A task runs until its next store operation, then the scheduler chooses,
from a seed, who goes on; so a seed is an interleaving, and the same seed is the same interleaving. Time is
virtual: it passes when nobody can run, and then it jumps to the earliest deadline::

    scheduler = Scheduler(seed=7)
    store = FakeStore(scheduler)
    scheduler.spawn("rank 0", train, store.clone("rank 0"))
    scheduler.spawn("rank 1", train, store.clone("rank 1"))
    scheduler.run()

The code that runs so must not wait on anything but the store and `Scheduler.sleep`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from .clock import Clock, Waiter

try:
    import greenlet
except ImportError:  # said when a scheduler is made: the rest of this package needs no greenlet
    greenlet = None

_TRACE_LINES = 200
_NO_LOCK = contextlib.nullcontext()


class SchedulerError(AssertionError):
    """A run went wrong. The message tells the seed, who did what, and how to replay it."""


class Deadlock(SchedulerError):
    """Tasks are left, none can run, and none has a deadline."""


class TooLong(SchedulerError):
    """The run took more steps or more virtual time than allowed."""


class Killed(BaseException):
    """Ends a crashed task. Never raised where anything it does could still be seen by others."""


@dataclasses.dataclass(eq=False)
class Task:
    """One simulated process. Made by `Scheduler.spawn`.

    Args:
        name: shown in the trace.
        daemon: whether a run ends without waiting for it.
        steps: steps taken so far: store operations and sleeps.
        done: whether it has returned, failed or crashed.
        crashed: whether it was killed.
        result: what its function returned.
    """

    name: str
    daemon: bool
    steps: int = 0
    done: bool = False
    crashed: bool = False
    result: Any = None
    _greenlet: Any = None
    _waiter: Waiter | None = None
    _deadline: float = math.inf
    _paused_until: float = 0.0
    _plan: dict[int, list[Callable[[], None]]] = dataclasses.field(default_factory=dict)

    def wakes_at(self, now: float) -> float:
        """The time from which it can run, as things stand."""
        ready = now if self._waiter is None or self._waiter.woken else self._deadline
        return max(ready, self._paused_until)


class Scheduler(Clock):
    """Runs tasks in an order chosen from a seed, in virtual time.

    Args:
        seed: what the order is chosen from.
        choices: the first choices, as `choices` of an earlier run told them; then the seed goes on. A choice
            is the index among the tasks that can run, in the order of spawning.
        max_steps: more steps than this are an error.
        max_time: more virtual seconds than this are an error.

    Attributes:
        choices: the choices made so far.
        options: among how many tasks each of them was made, for tests that try all of them.
        tasks: all tasks, in the order of spawning.
        current: the task that runs, or ran last.

    Raises:
        ImportError: greenlet is not installed.
    """

    def __init__(
        self, seed: int = 0, choices: Sequence[int] = (), *, max_steps: int = 50_000, max_time: float = 3600.0
    ) -> None:
        if greenlet is None:
            raise ImportError("Scheduler needs greenlet: pip install 'ft-wrapper[testing]'")
        super().__init__()
        self.seed = seed
        self.choices: list[int] = []
        self.options: list[int] = []
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self._replay = list(choices)
        self._random = random.Random(seed)
        # Some runs switch at each step, some let a task run on for long: other defects show.
        self._stay = self._random.choice((0.0, 0.0, 0.5, 0.9))
        self._max_steps = max_steps
        self._max_time = max_time
        self._trace: list[tuple[float, str, str, Sequence[Any]]] = []
        self._checks: list[Callable[[], None]] = []
        self._hub: Any = None

    # Tasks -------------------------------------------------------------------------------------------------

    def spawn(
        self, name: str, function: Callable[..., Any], *args: Any, daemon: bool = False, **kwargs: Any
    ) -> Task:
        """Adds a task; it begins when it is chosen. A running task may spawn others.

        Args:
            name: shown in the trace.
            function: what it runs.
            *args: handed to the function.
            **kwargs: handed to the function.
            daemon: whether the run ends without waiting for it.
        """
        task = Task(name, daemon)

        def body() -> None:
            task.result = function(*args, **kwargs)

        task._greenlet = greenlet.greenlet(body)
        self.tasks.append(task)
        return task

    def crash(self, task: Task) -> None:
        """Kills a task, as SIGKILL would: nothing that it does from now on reaches the store."""
        if task.done:
            return
        self._note(task, "crashes")
        task.done = task.crashed = True
        if task is self.current:
            raise Killed
        if task._greenlet:  # begun: unwind its stack, so that what it holds is let go
            outer, self.current = self.current, task
            task._greenlet.parent = greenlet.getcurrent()
            with contextlib.suppress(Killed):
                task._greenlet.throw(Killed)
            self.current = outer

    def pause(self, task: Task, seconds: float) -> None:
        """Stops a task for so many virtual seconds, as SIGSTOP or a lost network would."""
        self._note(task, f"is paused for {seconds:g} s")
        task._paused_until = self._now + seconds

    def at_step(self, task: Task, step: int, action: Callable[[], None]) -> None:
        """Plans something for just before a task's step.

        Args:
            task: whose step.
            step: which, from 1.
            action: what to do: crash or pause a task, make the store fail ...
        """
        task._plan.setdefault(step, []).append(action)

    def crash_at(self, task: Task, step: int) -> None:
        """Kills a task just before its step of this number, from 1."""
        self.at_step(task, step, lambda: self.crash(task))

    def pause_at(self, task: Task, step: int, seconds: float) -> None:
        """Stops a task for so many virtual seconds just before its step of this number, from 1."""
        self.at_step(task, step, lambda: self.pause(task, seconds))

    def after_each_step(self, check: Callable[[], None]) -> None:
        """Calls a check after each step, between the tasks; what it raises ends the run."""
        self._checks.append(check)

    # Running -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs until all tasks but daemons are over, then kills those.

        Raises:
            Deadlock: tasks are left and none can ever run.
            TooLong: the bounds on steps or time are passed.
            SchedulerError: a task or a check raised; the cause is chained.
        """
        self._hub = greenlet.getcurrent()
        try:
            while any(not task.done and not task.daemon for task in self.tasks):
                self._run_one()
        except (SchedulerError, KeyboardInterrupt):
            raise
        except BaseException as error:
            who = "" if self.current is None else f" in {self.current.name!r}"
            raise SchedulerError(self._report(f"{type(error).__name__}{who}: {error}")) from error
        finally:
            self.current = None
            for task in self.tasks:
                self.crash(task)

    def trace(self, last: int | None = None) -> str:
        """Who did what, one line a step; the last so many lines."""
        lines = self._trace if last is None else self._trace[-last:]
        return "\n".join(f"{time:10.3f}  {name:<12} {what} {_show(args)}" for time, name, what, args in lines)

    # What tasks call ---------------------------------------------------------------------------------------

    @property
    def lock(self) -> Any:
        """Nothing to lock: one task runs at a time, and changes hands only between operations."""
        return _NO_LOCK

    def step(self, client: str, operation: str, args: Sequence[Any]) -> None:
        """Lets others go first; called by the store before each operation."""
        task = self.current
        if task is None or self._hub is greenlet.getcurrent():
            return  # a check, or a test before the run
        if task.crashed:
            raise Killed
        self._hub.switch()
        task.steps += 1
        for action in task._plan.pop(task.steps, ()):
            action()
            while task._paused_until > self._now:
                self._hub.switch()
        self._note(task, operation, args)

    def block(self, waiter: Waiter, deadline: float) -> bool:
        """Waits until the waiter is woken; False if its deadline passed first."""
        task = self.current
        if task is None:
            raise RuntimeError("only a task of the scheduler can wait")
        if task.crashed:
            raise Killed
        task._waiter, task._deadline = waiter, deadline
        try:
            self._hub.switch()
        finally:
            task._waiter, task._deadline = None, math.inf
        return waiter.woken

    def woke(self, waiter: Waiter) -> None:
        """A waiter was woken; it is looked at before each choice."""

    def sleep(self, seconds: float) -> None:
        """Sleeps for so many virtual seconds. A step of the current task."""
        self.step("", "sleep", (seconds,))
        super().sleep(seconds)

    def advance(self, seconds: float) -> None:
        """Not to be turned by hand: time passes when nobody can run."""
        raise RuntimeError("a scheduler turns its clock itself; use sleep() in a task")

    # Steps -------------------------------------------------------------------------------------------------

    def _run_one(self) -> None:
        left = [task for task in self.tasks if not task.done]
        ready = [task for task in left if task.wakes_at(self._now) <= self._now]
        if not ready:
            soonest = min(task.wakes_at(self._now) for task in left)
            if soonest == math.inf:
                waiting = "; ".join(f"{t.name} for {sorted(t._waiter.missing)}" for t in left if t._waiter)
                raise Deadlock(self._report(f"deadlock: nobody can run. Waiting: {waiting}"))
            self._now = soonest
            if self._now > self._max_time:
                raise TooLong(self._report(f"more than {self._max_time:g} virtual seconds"))
            ready = [task for task in left if task.wakes_at(self._now) <= self._now]
        if len(self.choices) >= self._max_steps:
            raise TooLong(self._report(f"more than {self._max_steps} steps"))
        task = self.current = ready[self._choose(ready)]
        task._greenlet.parent = self._hub  # where it returns to; its spawner may be another task
        with contextlib.suppress(Killed):
            task._greenlet.switch()
        if task._greenlet.dead:
            task.done = True
        for check in self._checks:
            check()

    def _choose(self, ready: list[Task]) -> int:
        if len(self.choices) < len(self._replay):
            choice = self._replay[len(self.choices)] % len(ready)
        elif self._stay and self.current in ready and self._random.random() < self._stay:
            choice = ready.index(self.current)
        else:
            choice = int(self._random.random() * len(ready))
        self.choices.append(choice)
        self.options.append(len(ready))
        return choice

    def _note(self, task: Task, what: str, args: Sequence[Any] = ()) -> None:
        self._trace.append((self._now, task.name, what, args))

    def _report(self, what: str) -> str:
        return (
            f"{what}\n{self.trace(_TRACE_LINES)}\n{what}\n"
            f"replay: Scheduler(seed={self.seed}), or Scheduler(choices={self.choices})"
        )


def _show(args: Sequence[Any]) -> str:
    return ", ".join(arg if isinstance(arg, str) else repr(arg) for arg in args)
