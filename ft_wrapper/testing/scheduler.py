"""A deterministic scheduler: the real store code of many processes, step by step, in one thread.

Each simulated process is a task. A task runs until its next store operation, then the scheduler chooses, by
default from a seed, which one goes on; so a seed is an interleaving, and the same seed is the same
interleaving. Time is virtual: it passes when no task can run, and then it jumps to the earliest deadline::

    scheduler = Scheduler(seed=7)
    store = FakeStore(scheduler)
    scheduler.spawn("rank 0", train, store.clone("rank 0"))
    scheduler.spawn("rank 1", train, store.clone("rank 1"))
    scheduler.run()

Code that runs this way must not wait on anything but the store and `Scheduler.sleep`.
"""

import bisect
import contextlib
import dataclasses
import datetime
import math
import operator
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .fake_store import Clock, Waiter

try:
    import greenlet
except ImportError:  # reported when a scheduler is made: the rest of this package needs no greenlet
    greenlet = None

_TRACE_LINES = 200
_LATE_ONES = 4
_TRIES = 4
_ROOT = "ft_wrapper/1/"
_LONGEST = 100


class SchedulerError(AssertionError):
    """A run went wrong. The message has the last steps and how to replay it; `what` is its first line."""

    def __init__(self, what: str, report: str = "") -> None:
        super().__init__(report or what)
        self.what = what


class Deadlock(SchedulerError):
    """Tasks are left, none can run, and none has a deadline."""


class TooLong(SchedulerError):
    """The run took more steps or more virtual time than allowed."""


class Stop(BaseException):
    """Ends a run early without an error: raised by a policy that has seen enough."""


@dataclasses.dataclass(eq=False, slots=True)
class Step:
    """One step of a task, or something that happened to one.

    Args:
        time: virtual seconds since the start.
        task: name of the task; empty for events of no task.
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
    """Ends a crashed task. Never raised where others could still see anything it does."""


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
        """Whether it is paused at a time, or has not resumed since."""
        return self._paused_until > now


class TurnPolicy(Protocol):
    """Decides which task goes on. Called if there is more than one possibility."""

    def choose(self, tasks: Sequence[Task], current: Task | None) -> int:
        """Chooses.

        Args:
            tasks: the tasks that can run, in the order of spawning.
            current: the task that ran last; among ``tasks`` if it can go on.

        Returns:
            Index of a task.
        """


class RandomPolicy:
    """Any task that can run.

    Args:
        seed: what is chosen from. Some seeds switch at each step, some let a task run on for long, some let
            a few tasks hardly ever go on while others can: other defects show.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random
        self._stay = (0.0, 0.0, 0.5, 0.9)[int(self._random() * 4)]
        self._late = int(random.Random(~seed).random() * _LATE_ONES * 3)  # of those with a number like this

    def choose(self, tasks: Sequence[Task], current: Task | None) -> int:
        if self._stay and current is not None and current.ready and self._random() < self._stay:
            return tasks.index(current)
        index = int(self._random() * len(tasks))
        if self._late < _LATE_ONES:
            for _ in range(_TRIES):
                if tasks[index].number % _LATE_ONES != self._late:
                    break
                index = int(self._random() * len(tasks))
        return index


class Scheduler(Clock):
    """Runs tasks in an order chosen from a seed, in virtual time.

    Args:
        seed: what the order is chosen from.
        choices: the first choices, from `choices` of an earlier run; then the policy goes on.
        policy: decides which task goes on; at random, from the seed, when None.
        max_steps: more steps than this are an error.
        max_time: more virtual seconds than this are an error.

    Attributes:
        choices: the choices made so far, where there was more than one possibility: an index among the tasks
            that can run, in the order of spawning.
        options: among how many each of them was made, for tests that try all of them.
        tasks: all tasks, in the order of spawning.
        current: the task that runs, or ran last.
        steps: the steps taken so far, by all tasks.
        trace_steps: these steps, one by one.
        last_step: the step since the last check; None if there was none.

    Raises:
        ImportError: greenlet is not installed.
    """

    def __init__(
        self,
        seed: int = 0,
        choices: Sequence[int] = (),
        *,
        policy: TurnPolicy | None = None,
        max_steps: int = 50_000,
        max_time: float = 3600.0,
    ) -> None:
        if greenlet is None:
            raise ImportError("Scheduler needs greenlet: pip install 'ft-wrapper[testing]'")
        # Nothing to lock: one task runs at a time, and changes hands only between operations.
        super().__init__(lock=contextlib.nullcontext())
        self.seed = seed
        self.choices: list[int] = []
        self.options: list[int] = []
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.steps = 0
        self.trace_steps: list[Step] = []
        self.last_step: Step | None = None
        self._given = iter(choices)
        self._policy = policy or RandomPolicy(seed)
        self._bounds = max_steps, max_time
        self._after_each_step: list[Callable[[], None]] = []
        self._at_end: list[Callable[[], None]] = []
        self._ready: list[Task] = []  # in the order of spawning
        self._required = 0  # how many are left that are not daemons
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
        task = Task(name, daemon, len(self.tasks))

        def body() -> None:
            try:
                task.result = function(*args, **kwargs)
            except Killed:
                pass
            finally:
                self._end(task)

        task._greenlet = greenlet.greenlet(body, self._hub)
        self.tasks.append(task)
        self._add(task)
        self._required += not daemon
        return task

    def crash(self, task: Task) -> None:
        """Kills a task, as SIGKILL would: nothing that it does from now on reaches the store."""
        if task.done:
            return
        upcoming = "" if task.upcoming is None else f" before {describe(*task.upcoming)}"
        self._note(task, f"crashes{upcoming}")
        task.crashed = True
        self._end(task)
        if task is self.current:
            raise Killed
        if task._greenlet:  # begun: unwind its stack, so that what it holds is released
            outer, self.current = self.current, task
            task._greenlet.parent = greenlet.getcurrent()
            task._greenlet.throw(Killed)
            self.current = outer

    def pause(self, task: Task, seconds: float) -> None:
        """Stops a task for some virtual seconds, as SIGSTOP or a lost network would."""
        if task.done:
            return
        self._note(task, f"is paused for {seconds:g} s")
        task._paused_until = self._now + seconds
        self._hold(task)

    def at_step(self, task: Task, step: int, action: Callable[[], None]) -> None:
        """Calls an action just before a task's step of this number, from 1: a crash, a failing store ..."""
        task._plan.setdefault(step, []).append(action)

    def crash_at(self, task: Task, step: int) -> None:
        """Kills a task just before its step of this number, from 1."""
        self.at_step(task, step, lambda: self.crash(task))

    def pause_at(self, task: Task, step: int, seconds: float) -> None:
        """Stops a task for some virtual seconds just before its step of this number, from 1."""
        self.at_step(task, step, lambda: self.pause(task, seconds))

    def after_each_step(self, check: Callable[[], None]) -> None:
        """Calls a check after each step, between the tasks; what it raises ends the run.

        Its own operations on the store are not steps, and meet no faults.
        """
        self._after_each_step.append(check)

    def at_end(self, check: Callable[[], None]) -> None:
        """Calls a check once the run is over, before daemons are killed."""
        self._at_end.append(check)

    # Running -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs until all tasks but daemons have ended, then kills the daemons.

        Raises:
            Deadlock: tasks are left and none can ever run.
            TooLong: the bounds on steps or time are passed.
            SchedulerError: a task or a check raised; the cause is chained.
        """
        self._hub = greenlet.getcurrent()
        for task in self.tasks:
            task._greenlet.parent = self._hub
        try:
            while (chosen := self._next()) is not None:
                chosen._greenlet.switch()  # returns when a task has ended
            self.current = None
            for check in self._at_end:
                check()
        except Stop:
            pass
        except (SchedulerError, KeyboardInterrupt):
            raise
        except BaseException as error:
            who = "" if self.current is None else f" in {self.current.name!r}"
            raise self._failed(SchedulerError, f"{type(error).__name__}{who}: {error}") from error
        finally:
            self.current = None
            told = len(self.trace_steps)
            for task in self.tasks:
                self.crash(task)
            del self.trace_steps[told:]  # the cleanup of the rest is not part of what happened

    def trace(self, last: int | None = None) -> str:
        """Time, task, operation and result, one line per step; only the ``last`` lines."""
        return "\n".join(
            f"{step.time:10.3f}  {step.task:<12} {describe(step.what, step.args)}{_result(step)}".rstrip()
            for step in (self.trace_steps if last is None else self.trace_steps[-last:])
        )

    # What tasks call ---------------------------------------------------------------------------------------

    def step(self, client: str, operation: str, args: Sequence[Any]) -> None:
        """Lets others go first; called by the store before each operation."""
        task = self.current
        if task is None or self.aside:
            return  # a check, or a test before the run
        if task.crashed:
            raise Killed
        task.upcoming = (operation, args)
        if task.delay:
            task._paused_until = max(task._paused_until, self._now + task.delay)
            self._hold(task)
        self._give_way(task)
        task.steps += 1
        if task._plan:
            for action in task._plan.pop(task.steps, ()):
                action()
                if not task.ready:
                    self._give_way(task)
        task.upcoming = None
        task._step = self.last_step = self._note(task, operation, args)

    def observe(self, result: Any) -> None:
        """Notes the result of the current task's operation; called by the store after it."""
        task = self.current
        if task is not None and task._step is not None and not self.aside:
            task._step.result = result

    def block(self, waiter: Waiter, deadline: float) -> bool:
        """Waits until the waiter is woken; False if its deadline passed first."""
        task = self.current
        if task is None or self.aside:
            raise RuntimeError("only a task of the scheduler can wait")
        if task.crashed:
            raise Killed
        task._waiter, task._deadline = waiter, deadline
        waiter.task = task
        self._hold(task)
        try:
            self._give_way(task)
        finally:
            task._waiter, task._deadline = None, math.inf
        return waiter.woken

    def woke(self, waiter: Waiter) -> None:
        """A waiter was woken: its task can run, unless it is paused."""
        task = waiter.task
        if task is not None and not task.ready and not task.done and task._paused_until <= self._now:
            self._add(task)

    def sleep(self, seconds: float) -> None:
        """Sleeps for some virtual seconds. A step of the current task."""
        self.step("", "sleep", (seconds,))
        super().sleep(seconds)
        self.observe(None)

    def advance(self, seconds: float) -> None:
        """Not to be turned by hand: time passes when no task can run."""
        raise RuntimeError("a scheduler turns its clock itself; use sleep() in a task")

    # Steps -------------------------------------------------------------------------------------------------

    def _give_way(self, task: Task) -> None:
        """Returns when the task is chosen."""
        try:
            following = self._next()
        except (Exception, Stop) as error:
            self._hub.throw(error)
            raise
        if following is None:
            self._hub.throw(Stop())
        elif following is not task:
            following._greenlet.switch()

    def _next(self) -> Task | None:
        """The task that goes on; None when the run is over."""
        while True:
            self._check()
            if not self._required:
                return None
            tasks = self._ready
            if tasks:
                self.current = tasks[self._choose(tasks) if len(tasks) > 1 else 0]
                self.steps += 1
                return self.current
            self._pass_time()

    def _check(self) -> None:
        if self._after_each_step:
            self.aside = True
            try:
                for check in self._after_each_step:
                    check()
            finally:
                self.aside = False
                self.last_step = None
        if self.steps >= self._bounds[0]:
            raise self._failed(TooLong, f"more than {self._bounds[0]} steps")

    def _choose(self, tasks: Sequence[Task]) -> int:
        given = next(self._given, None)
        choice = self._policy.choose(tasks, self.current) if given is None else given % len(tasks)
        self.choices.append(choice)
        self.options.append(len(tasks))
        return choice

    def _pass_time(self) -> None:
        left = [task for task in self.tasks if not task.done]
        time = min((task.wakes_at(self._now) for task in left), default=math.inf)
        if time == math.inf:
            raise self._failed(Deadlock, f"deadlock: no one can run; {self._who_waits()}")
        if time > self._bounds[1]:
            words = f"more than {self._bounds[1]:g} virtual seconds; {self._who_waits()}"
            raise self._failed(TooLong, words)
        self._now = time
        for task in left:
            if task.wakes_at(time) <= time:
                self._add(task)

    def _add(self, task: Task) -> None:
        """A task can run."""
        task.ready = True
        bisect.insort(self._ready, task, key=operator.attrgetter("number"))

    def _hold(self, task: Task) -> None:
        """A task has to wait."""
        if task.ready:
            task.ready = False
            self._ready.remove(task)

    def _end(self, task: Task) -> None:
        """A task has ended."""
        if not task.done:
            task.done = True
            self._required -= not task.daemon
            self._hold(task)

    def _who_waits(self) -> str:
        waits = [
            f"{task.name} waits for {', '.join(sorted(task._waiter.missing))}"
            for task in self.tasks
            if not task.done and task._waiter is not None and task._waiter.missing
        ]
        return "; ".join(waits) or "no one waits"

    def _note(self, task: Task, what: str, args: Sequence[Any] = ()) -> Step:
        step = Step(self._now, task.name, what, args)
        self.trace_steps.append(step)
        return step

    def _failed(self, kind: type[SchedulerError], what: str) -> SchedulerError:
        replay = f"replay: Scheduler(seed={self.seed}), or Scheduler(choices={self.choices})"
        return kind(what, f"{what}\n{self.trace(_TRACE_LINES)}\n{what}\n{replay}")


# For people ------------------------------------------------------------------------------------------------


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
    # For an absent key, a read by compare_set returns what was expected.
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
