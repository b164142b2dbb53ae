"""What tells the states of a run apart, for a search that goes into each of them once."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from ft_wrapper.testing import FakeStore, Scheduler
from ft_wrapper.testing.scheduler import Step, Task

# Read as sets: no one tells the order of their entries.
_LOG = re.compile(r"ft_wrapper/1/(?:(?:arrived|dead|join|finished|faults)/|goodbyes)")


@dataclasses.dataclass(eq=False)
class Event:
    """Something that may happen between any two steps, once. Made by `StateScheduler.add_event`.

    A policy is offered it behind the tasks.

    Args:
        name: shown in the trace.
        action: what happens.
        allowed: whether it may happen now.
        task: whom it is about.
        number: before all tasks, of which `run_on` takes one.
    """

    name: str
    action: Callable[[], None]
    allowed: Callable[[], bool]
    task: Task | None = None
    number: int = -1


TIME_PASSES = Event("", lambda: None, lambda: True)
"""Offered before what may happen instead, where no task can run, or the run ends."""


class StateScheduler(Scheduler):
    """Notes what each task learns: what a task does next follows from that. Offers events, too.

    What tasks share has to be said with `add_state`, their stores with `add_store`, and what a task reads
    there with `learn`.

    Attributes:
        events: what may happen.
        waited_at: how many steps had been taken when time passed last; -1 before it ever did.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.events: list[Event] = []
        self.waited_at = -1
        self._shared: list[Callable[[], object]] = []
        self._learned: dict[Task, int] = collections.defaultdict(int)
        super().__init__(*args, **options)

    @property
    def idle(self) -> bool:
        """Whether no task can run: time is about to pass."""
        return not self._turns.ready

    # What may happen ---------------------------------------------------------------------------------------

    def add_event(
        self,
        name: str,
        action: Callable[[], None],
        allowed: Callable[[], bool] = lambda: True,
        task: Task | None = None,
    ) -> Event:
        """Offers the policy something that may happen between any two steps, once.

        Args:
            name: shown in the trace.
            action: what happens: crash or pause a task, spawn one, make the store fail ...
            allowed: whether it may happen now.
            task: the task that it is about, if any.
        """
        event = Event(name, action, allowed, task)
        self.events.append(event)
        return event

    def _next(self) -> Task | None:
        while True:
            self._check()
            over = not self._turns.required
            tasks: list[Any] = [] if over else self._turns.ready
            offered = [event for event in self.events if event.allowed()]
            choices = [*(tasks or [TIME_PASSES]), *offered]
            chosen = choices[self._choose(choices) if len(choices) > 1 else 0]
            if isinstance(chosen, Task):
                self.current = chosen
                self.steps += 1
                return chosen
            if chosen is not TIME_PASSES:
                self.events.remove(chosen)
                self.trace_steps.append(Step(self._now, "", chosen.name))
                chosen.action()
            elif over:
                return None
            else:
                self._pass_time()

    def _choose(self, tasks: Sequence[Task]) -> int:
        self.aside = True  # a policy may look at the store
        try:
            return super()._choose(tasks)
        finally:
            self.aside = False

    def _pass_time(self) -> None:
        super()._pass_time()
        self.waited_at = self.steps

    # States ------------------------------------------------------------------------------------------------

    def observe(self, result: Any) -> None:
        """See `Clock`."""
        super().observe(result)
        task = self.current
        if task is not None and not self.aside:
            args = () if task._step is None else task._step.args
            of = args[0][0] if args and isinstance(args[0], list) and args[0] else args and args[0]
            self.learn(essence(of, result) if isinstance(of, str) else result)

    def learn(self, value: Any) -> None:
        """Says what the current task has learned."""
        task = self.current
        if task is None or self.aside:
            return
        try:
            self._learned[task] = hash((self._learned[task], self._now, value))
        except TypeError:
            self._learned[task] = hash((self._learned[task], self._now, repr(value)))

    def forget(self, task: Task, known: Any) -> None:
        """Says that only ``known`` counts of what a task has learned so far."""
        self._learned[task] = hash(known)

    def add_state(self, state: Callable[[], object]) -> None:
        """Says what tells one state from another: something hashable that tasks share."""
        self._shared.append(state)

    def add_store(self, store: FakeStore) -> None:
        """Says that what a store holds tells states apart."""
        values = Values(store._contents.values)
        store._contents.values = values
        self.add_state(lambda: values.digest)

    def state(self, without: Task | None = None) -> int:
        """A hash of everything that decides what can happen from here on.

        That is what each task has learned so far, who can run, the time, and what the tasks share.
        """
        learned = 0
        for task in self.tasks:
            if not task.done and task is not without:
                learned ^= hash(self._state_of(task))
        return hash((self._now, learned, *(state() for state in self._shared)))

    def _state_of(self, task: Task) -> tuple[object, ...]:
        """All that decides what a task does from here on, together with what tasks share."""
        waits = None if task._waiter is None else (task._waiter.woken, task._deadline)
        planned = task.steps if task._plan else None
        is_at_step = task.upcoming is not None and bool(task._greenlet)
        learned = self._learned[task]
        return task.name, learned, task.ready, is_at_step, waits, task._paused_until, planned


class Values(dict[str, bytes]):
    """What a store holds, with a hash of it.

    Attributes:
        digest: the hash.
    """

    def __init__(self, values: dict[str, bytes]) -> None:
        super().__init__()
        self.digest = 0
        for key, value in values.items():
            self[key] = value

    def __setitem__(self, key: str, value: bytes) -> None:
        self._forget(key)
        self.digest ^= hash((key, essence(key, value)))
        super().__setitem__(key, value)

    def pop(self, key: str, *default: Any) -> Any:
        """Removes a key."""
        self._forget(key)
        return super().pop(key, *default)

    def _forget(self, key: str) -> None:
        before = self.get(key)
        if before is not None:
            self.digest ^= hash((key, essence(key, before)))


def essence(key: str, value: Any) -> Any:
    """What can make a difference of what a key holds, or an operation on it returned."""
    if isinstance(value, bytes) and _LOG.match(key):
        return frozenset(value.split(b"\n"))
    return value


def has_only_waited(task: Task) -> bool:
    """Whether a task goes on to its next step whatever others do: what it waited for came, or it begins."""
    if task._waiter is None:
        return task.steps == 0
    came = task._waiter.woken or not task._waiter.missing
    return came and task._step is not None and task._step.what in ("wait", "sleep")
