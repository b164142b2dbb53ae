"""Who goes on at each step of a `Scheduler`."""

import collections
import dataclasses
import random
from collections.abc import Sequence
from typing import Protocol

from .clock import Step, Task, describe


class Policy(Protocol):
    """Decides who goes on. Called where there is more than one possibility."""

    def choose(self, tasks: Sequence[Task], current: Task | None) -> int:
        """Chooses.

        Args:
            tasks: the tasks that can run, in the order of spawning.
            current: the task that ran last; among ``tasks`` if it can go on.

        Returns:
            Index of a task.
        """


_LATE_ONES = 4
_TRIES = 4


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


def run_on(tasks: Sequence[Task], current: Task | None) -> int:
    """The current task for as long as it can run, then the next in the order of spawning."""
    if current is None:
        return 0
    return next((number for number, task in enumerate(tasks) if task.number >= current.number), 0)


class ReplayPolicy:
    """Repeats the choices of another run.

    Args:
        choices: as ``Scheduler.choices`` of that run told them.
        after: what goes on when they are used up.
    """

    def __init__(self, choices: Sequence[int], after: Policy) -> None:
        self._choices = iter(choices)
        self._after = after

    def choose(self, tasks: Sequence[Task], current: Task | None) -> int:
        choice = next(self._choices, None)
        if choice is None:
            return self._after.choose(tasks, current)
        return choice % len(tasks)


@dataclasses.dataclass(frozen=True)
class Switch:
    """A place where a schedule departs from `run_on`.

    Args:
        task: who ran last; empty at the start.
        step: how many steps it had taken.
        to: who goes on instead, or what happens.
        choice: how often somebody else could have gone on there before: time passes, and it may wake.
        before: the step that it was about to take, for people.
    """

    task: str
    step: int
    to: str
    choice: int = 0
    before: str = dataclasses.field(default="", compare=False)


class _Places:
    """Counts the choices that are made where a task is."""

    def __init__(self) -> None:
        self._made: collections.Counter[tuple[str, int]] = collections.Counter()

    def next(self, current: Task | None) -> tuple[str, int, int]:
        """Who ran last, how many steps it had taken, and how often there was a choice there before."""
        place = ("", 0) if current is None else (current.name, current.steps)
        self._made[place] += 1
        return (*place, self._made[place] - 1)


class RecordingPolicy:
    """Notes where another policy departs from `run_on`.

    Args:
        policy: the other one.

    Attributes:
        switches: where it did.
        places: where each of these is in the trace.
        trace: the steps that were taken so far.
    """

    def __init__(self, policy: Policy) -> None:
        self.switches: list[Switch] = []
        self.places: list[int] = []
        self.trace: Sequence[Step] = ()
        self._policy = policy
        self._places = _Places()

    def choose(self, tasks: Sequence[Task], current: Task | None) -> int:
        choice = self._policy.choose(tasks, current)
        task, step, number = self._places.next(current)
        if choice != run_on(tasks, current):
            upcoming = None if current is None or not current.ready else current.upcoming
            before = "" if upcoming is None else describe(*upcoming)
            self.switches.append(Switch(task, step, tasks[choice].name, number, before))
            self.places.append(len(self.trace))
        return choice


class SwitchPolicy:
    """Runs on but for some switches. Those for which there is no occasion are passed over.

    Args:
        switches: where to depart, and to whom.
    """

    def __init__(self, switches: Sequence[Switch]) -> None:
        self._wanted = {(switch.task, switch.step, switch.choice): switch.to for switch in switches}
        self._places = _Places()

    def choose(self, tasks: Sequence[Task], current: Task | None) -> int:
        wanted = self._wanted.get(self._places.next(current))
        if wanted is not None:
            names = [task.name for task in tasks]
            if wanted in names:
                return names.index(wanted)
        return run_on(tasks, current)
