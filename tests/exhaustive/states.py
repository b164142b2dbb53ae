"""What tells the states of a run apart, for a search that goes into each of them once."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from ft_wrapper.testing import Scheduler
from ft_wrapper.testing.tasks import Task


class StateScheduler(Scheduler):
    """Notes what each task learns: what a task does next follows from that.

    What tasks share beside the store has to be said with `add_state`, and what a task reads there with
    `learn`.

    Attributes:
        waited_at: how many steps had been taken when time passed last; -1 before it ever did.
    """

    tells_states_apart = True

    def __init__(self, *args: Any, **options: Any) -> None:
        self.waited_at = -1
        self._shared: list[Callable[[], object]] = []
        self._learned: dict[Task, int] = collections.defaultdict(int)
        super().__init__(*args, **options)

    @property
    def idle(self) -> bool:
        """Whether no task can run: time is about to pass."""
        return not self._ready

    def observe(self, result: Any) -> None:
        """See `Clock`."""
        super().observe(result)
        self.learn(result)

    def learn(self, value: Any) -> None:
        """See `Clock`."""
        task = self.current
        if task is None or self.aside:
            return
        try:
            self._learned[task] = hash((self._learned[task], self._now, value))
        except TypeError:
            self._learned[task] = hash((self._learned[task], self._now, repr(value)))

    def forget(self, task: Task, known: Any) -> None:
        """See `Clock`."""
        self._learned[task] = hash(known)

    def add_state(self, state: Callable[[], object]) -> None:
        """See `Clock`."""
        self._shared.append(state)

    def state(self, without: Task | None = None) -> int:
        """A hash of everything that decides what can happen from here on.

        That is what each task has learned so far, who can run, the time, and what the tasks share (a
        `FakeStore` says itself what it holds).
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

    def _pass_time(self) -> None:
        super()._pass_time()
        self.waited_at = self.steps


def has_only_waited(task: Task) -> bool:
    """Whether a task goes on to its next step whatever others do: what it waited for came, or it begins."""
    if task._waiter is None:
        return task.steps == 0
    came = task._waiter.woken or not task._waiter.missing
    return came and task._step is not None and task._step.what in ("wait", "sleep")
