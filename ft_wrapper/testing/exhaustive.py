"""Every schedule of a simulated job within a bound.

By default a task runs on until it has to wait, and the next one in a fixed order goes on. The bound is the
number of places where a schedule departs from that, as in M. Emmi, S. Qadeer, Z. Rakamarić: Delay-bounded
scheduling, POPL 2011. Events (a crash, a respawn) are not counted: they happen wherever they can, and after
one of them anybody may go on.

Two schedules that differ only in the order of operations that do not depend on each other lead to the same
state. A state that was gone into before with as many departures left is not gone into again: all that can
follow has been tried, or will be. What a task does next follows from what it has learned, so a state is what
every task has learned, what the store holds, and the time (`Scheduler.state`), compared by 64-bit hashes.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from .policies import Policy, run_on
from .scheduler import Event, Stop, Task

if TYPE_CHECKING:
    from ..store import StoreMixin
    from .simulation import Simulation


@dataclasses.dataclass
class Count:
    """How much was tried.

    Args:
        schedules: runs, from the start to their end or to a state that was gone into before.
        complete: those that went to their end.
        states: different states in which more than one thing could happen.
        steps: store operations and sleeps of all runs, repetitions included.
    """

    schedules: int = 0
    complete: int = 0
    states: int = 0
    steps: int = 0

    def __iadd__(self, other: Count) -> Count:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self


@dataclasses.dataclass(frozen=True)
class Branch:
    """A run that is to be made.

    Args:
        choices: the first choices of it.
        left: departures that it has left after these.
        state: in which the last of these choices is made.
    """

    choices: bytes = b""
    left: int = 0
    state: int = 0


class Search:
    """A search through all schedules within a bound.

    Args:
        make: makes the simulation with a policy.
        departures: the bound.
        split_at: the event after which branches are put aside in `parts`, by what it returns, rather than
            followed; so that several processes can share the work. None follows all.

    Attributes:
        count: how much was tried.
        parts: the branches that were put aside.
        choices: those of the last run.
    """

    def __init__(
        self,
        make: Callable[[Policy], Simulation],
        departures: int,
        split_at: Callable[[Event], str | None] | None = None,
    ) -> None:
        self.count = Count()
        self.parts: dict[str, list[Branch]] = collections.defaultdict(list)
        self.choices: Sequence[int] = ()
        self.seen: dict[int, int] = {}
        self.pending: list[Branch] = []
        self._make = make
        self._departures = departures
        self._split_at = split_at

    def run(self, start: Iterable[Branch] | None = None, most: float = float("inf")) -> Count:
        """Makes all runs.

        Args:
            start: the branches to begin with; the whole of it when None.
            most: schedules after which to give up.

        Raises:
            SchedulerError: a run went wrong.
        """
        self.pending = [Branch(left=self._departures)] if start is None else list(start)
        while self.pending and self.count.schedules < most:
            policy = SearchPolicy(self, self.pending.pop())
            simulation = self._make(policy)
            policy.begin(simulation)
            try:
                simulation.run()
            finally:
                self.choices = simulation.scheduler.choices
                self.count.schedules += 1
                self.count.complete += simulation.finished
                self.count.steps += simulation.scheduler.steps
        self.count.states = len(self.seen)
        return self.count

    def add(self, branch: Branch, event: Event | None = None) -> None:
        """Notes a run that is to be made."""
        part = self._split_at(event) if self._split_at is not None and event is not None else None
        if part is None:
            self.pending.append(branch)
        else:
            self.parts[part].append(branch)


class SearchPolicy:
    """Follows a branch, then runs on; adds to the search whatever else it could have chosen."""

    def __init__(self, search: Search, branch: Branch) -> None:
        self._search = search
        self._branch = branch
        self._left = branch.left
        self._made = 0
        self._free = False  # something has just happened: anybody may go on
        self._simulation: Simulation
        self._store: StoreMixin

    def begin(self, simulation: Simulation) -> None:
        """Says what is simulated."""
        self._simulation = simulation
        self._store = simulation.connect("search", 0)

    def choose(self, tasks: Sequence[Task], events: Sequence[Event], current: Task | None) -> int:
        place, self._made = self._made, self._made + 1
        choices = self._branch.choices
        if place < len(choices):
            if place == len(choices) - 1 and self._state() != self._branch.state:
                raise RuntimeError("the same choices led to another state: something in it is not simulated")
            choice = choices[place]
        else:
            choice = self._look(tasks, events, current)
        self._free = choice >= (len(tasks) or 1)
        return choice

    def _state(self) -> int:
        return hash((self._simulation.scheduler.state(), self._free))

    def _look(self, tasks: Sequence[Task], events: Sequence[Event], current: Task | None) -> int:
        scheduler = self._simulation.scheduler
        state = self._state()
        if self._search.seen.get(state, -1) >= self._left:
            raise Stop
        self._search.seen[state] = self._left
        made = bytes(scheduler.choices)
        for number, event in enumerate(events, len(tasks) or 1):
            self._search.add(Branch(made + bytes((number,)), self._left, state), event)
        default = run_on(tasks, current)
        cost = 0 if self._free else 1
        if self._left >= cost and (self._free or not self._is_neutral(current)):
            for number in range(len(tasks)):
                if number != default:
                    self._search.add(Branch(made + bytes((number,)), self._left - cost, state))
        return default

    def _is_neutral(self, task: Task | None) -> bool:
        """Whether a task's next step can be taken before or after anything that others do, all the same.

        Then it makes no difference whether others go first now or after that step.
        """
        if task is None or not task.ready or task.upcoming is None:
            return False
        operation, args = task.upcoming
        if operation == "sleep":
            return True
        if operation not in _ON_ONE_KEY:
            return False
        key = args[0]
        if not isinstance(key, str):
            return False
        if _NOBODY_ELSES.match(key):
            return True
        return _WRITTEN_ONCE.match(key) is not None and self._store.check([key])


_ON_ONE_KEY = ("set", "get", "check", "compare_set", "append", "add")
# Written by one process and read by none that could learn something from it.
_NOBODY_ELSES = re.compile(r"ft_wrapper/1/(?:member|faults)/|ft_wrapper/(?:version|1/terms)")
# Once they are there they never change, and nothing that is done to them changes anything.
_WRITTEN_ONCE = re.compile(r"ft_wrapper/1/(?:end|world|seat|decision|roster|wake/end|wake/head)/")
