"""Who goes on at each step of a `Scheduler`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .scheduler import Event, Task


class Policy(Protocol):
    """Decides who goes on. Called where there is more than one possibility."""

    def choose(self, tasks: Sequence[Task], events: Sequence[Event], current: Task | None) -> int:
        """Chooses.

        Args:
            tasks: the tasks that can run, in the order of spawning; none where time passes, or the run ends.
            events: what may happen instead.
            current: the task that ran last; among ``tasks`` if it can go on.

        Returns:
            Index of a task; 0 lets time pass (or the run end) where there are none. Counted on from there, of
            an event.
        """


class RandomPolicy:
    """Any task that can run; no event.

    Args:
        seed: what is chosen from. Some seeds switch at each step, some let a task run on for long: other
            defects show.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random
        self._stay = (0.0, 0.0, 0.5, 0.9)[int(self._random() * 4)]

    def choose(self, tasks: Sequence[Task], events: Sequence[Event], current: Task | None) -> int:
        if not tasks:
            return 0
        if self._stay and current is not None and current.ready and self._random() < self._stay:
            return tasks.index(current)
        return int(self._random() * len(tasks))


class RunOnPolicy:
    """The current task for as long as it can run, then the first that can: the least switches; no event."""

    def choose(self, tasks: Sequence[Task], events: Sequence[Event], current: Task | None) -> int:
        return tasks.index(current) if tasks and current is not None and current.ready else 0


class ReplayPolicy:
    """Repeats the choices of another run.

    Args:
        choices: as ``Scheduler.choices`` of that run told them.
        after: what goes on when they are used up.
    """

    def __init__(self, choices: Sequence[int], after: Policy) -> None:
        self._choices = iter(choices)
        self._after = after

    def choose(self, tasks: Sequence[Task], events: Sequence[Event], current: Task | None) -> int:
        choice = next(self._choices, None)
        if choice is None:
            return self._after.choose(tasks, events, current)
        return choice % (max(1, len(tasks)) + len(events))
