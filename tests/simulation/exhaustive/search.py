"""Every schedule of a simulated job within a bound.

By default a task runs on until it has to wait, and the next one in a fixed order goes on. The bound is the
number of places where a schedule departs from that, as in M. Emmi, S. Qadeer, Z. Rakamarić: Delay-bounded
scheduling, POPL 2011. Events (a crash, a start) are not counted: they happen wherever they can. After a crash
anybody may go on; what is started goes on at once, since to start it earlier makes no difference.

What need not be tried, because something that comes to the same is:

- A state that was gone into before with as many departures left is not gone into again. What a task does next
  follows from what it has learned, so a state is what every task has learned, what the store holds, what is
  known outside of it, and the time (`StateScheduler`), compared by 64-bit hashes.
- A crash that leads to a state that another one has led to: what the dead one had learned counts no more.
- A departure, or a start, before a step that comes to the same before or after all that others do.
- A departure to a task that would only begin to wait.
- The last departure before a step, where all that the others then do has nothing to do with that step: after
  the step it comes to the same. So in C. Flanagan, P. Godefroid: Dynamic partial-order reduction for model
  checking software, POPL 2005; but only where neither an event nor a departure is left, so that what follows
  a departure is one run, and that after the step has been made before.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from ft_wrapper.store import StoreMixin
from ft_wrapper.testing.scheduler import Step, Stop, Task, TurnPolicy
from tests.explorer.failure import run_on

from .seen import Seen, SeenHere
from .states import Event, StateScheduler, has_only_waited


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


@dataclasses.dataclass(slots=True)
class Place:
    """Where a task is about to take a step, and others could go first.

    Args:
        state: there.
        task: number of the task.
        touches: what the step does.
        apart: what must be the same after the step for it to have changed nothing but keys.
        after: the state before the task's next step that others could precede, if the step changed nothing
            but keys, and the task goes on.
    """

    state: int
    task: int
    touches: Touched
    apart: int
    after: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Branch:
    """A run that is to be made.

    Args:
        choices: the first choices of it.
        left: departures that it has left after these.
        state: in which the last of these choices is made.
        place: where it departs, if its departure is the last and nothing else can happen after it.
        to: number of the task that goes first.
    """

    choices: bytes = b""
    left: int = 0
    state: int = 0
    place: Place | None = None
    to: int = 0


class Touched:
    """Which keys some steps read, write and wait for. May say so of a key that they do not touch."""

    __slots__ = ("awaited", "read", "written")

    def __init__(self) -> None:
        self.read = self.written = self.awaited = 0

    def add(self, operation: str, args: Sequence[Any]) -> None:
        """Adds a step."""
        if operation == "sleep":
            return
        keys = 0
        if args and isinstance(args[0], str):
            keys = _bit(args[0])
        elif args and isinstance(args[0], list):
            for key in args[0]:
                keys |= _bit(key)
        else:
            keys = _ALL_KEYS
        if operation == "wait":
            self.awaited |= keys
        elif operation in _READS or (operation == "compare_set" and args[1] == args[2]):
            self.read |= keys
        else:
            self.written |= keys

    def meets(self, others: Touched) -> bool:
        """Whether it makes a difference whether one steps (none of which waits) or the others come first."""
        anything = others.read | others.written | others.awaited
        # With libuv, to read an absent key by compare_set wakes those who wait for it.
        return bool(self.written & anything or self.read & (others.written | others.awaited))


class Searched(Protocol):
    """What is searched, a `Simulation` for instance: its scheduler tells states apart."""

    @property
    def scheduler(self) -> Any:
        """A `StateScheduler`."""

    @property
    def finished(self) -> bool:
        """Whether all came to their end."""

    def run(self) -> object:
        """Runs it."""

    def connect(self, name: str, slot: int) -> StoreMixin:
        """A client of its store."""

    def known(self) -> object:
        """What is known otherwise than from the store."""


class Search:
    """A search through all schedules within a bound.

    Args:
        make: makes the simulation with a policy.
        departures: the bound.
        split_at: the event after which branches are put aside in `parts`, by what it returns, rather than
            followed; so that several processes can share the work. None follows all.
        from_first: whether after all have waited the first one in the order goes first, rather than the one
            that comes after the last that ran. Only then nothing at all is lost by what is left out: who ran
            last may depend on it.
        seen: the states that this search and others have gone into; none when None.
        reduced: whether to leave out what comes to the same as something else; states are gone into once in
            any case.

    Attributes:
        count: how much was tried.
        parts: the branches that were put aside.
        choices: those of the last run.
        touched: what others do, after a departure to a task, until the one goes on that was left.
    """

    def __init__(
        self,
        make: Callable[[TurnPolicy], Searched],
        departures: int,
        split_at: Callable[[Event], str | None] | None = None,
        *,
        from_first: bool = False,
        seen: Seen | None = None,
        reduced: bool = True,
    ) -> None:
        self.count = Count()
        self.parts: dict[str, list[Branch]] = collections.defaultdict(list)
        self.choices: Sequence[int] = ()
        self.from_first = from_first
        self.seen = SeenHere() if seen is None else seen
        self.reduced = reduced
        self.touched: dict[tuple[int, int], Touched] = {}
        # Those with the most departures left are followed first: a state is seldom gone into twice then.
        self._pending: list[list[Branch]] = [[] for _ in range(departures + 1)]
        self._make = make
        self._split_at = split_at

    def run(self, start: Iterable[Branch] | None = None, most: float = float("inf")) -> Count:
        """Makes all runs.

        Args:
            start: the branches to begin with; the whole of it when None.
            most: schedules after which to give up.

        Raises:
            SchedulerError: a run went wrong.
        """
        first = [Branch(left=len(self._pending) - 1)] if start is None else list(start)
        for branches in self._pending:
            branches.clear()
        for branch in first:
            self._pending[branch.left].append(branch)
        while self.count.schedules < most:
            following = self._next()
            if following is None:
                break
            policy = SearchPolicy(self, following)
            simulation = self._make(policy)
            policy.begin(simulation)
            try:
                simulation.run()
            finally:
                self.choices = simulation.scheduler.choices
                self.count.schedules += 1
                self.count.complete += simulation.finished
                self.count.steps += simulation.scheduler.steps
        return self.count

    @property
    def pending(self) -> list[Branch]:
        """The runs that have not been made yet, in the order in which they were found."""
        return [branch for branches in self._pending for branch in branches]

    def add(self, branch: Branch, event: Event | None = None) -> None:
        """Notes a run that is to be made."""
        part = self._split_at(event) if self._split_at is not None and event is not None else None
        if part is None:
            self._pending[branch.left].append(branch)
        else:
            self.parts[part].append(branch)

    def _next(self) -> Branch | None:
        for branches in reversed(self._pending):
            while branches:
                if not self._is_another_one(branches[-1]):
                    return branches.pop()
                branches.pop()
        return None

    def _is_another_one(self, branch: Branch) -> bool:
        """Whether a departure comes to the same as that after the step before which it is."""
        place = branch.place
        if place is None or place.after is None:
            return False
        later = self.touched.get((place.after, branch.to))
        if later is None or place.touches.meets(later):
            return False
        self.touched[place.state, branch.to] = later
        return True


class SearchPolicy:
    """Follows a branch, then runs on; adds to the search whatever else it could have chosen."""

    def __init__(self, search: Search, branch: Branch) -> None:
        self._search = search
        self._branch = branch
        self._left = branch.left
        self._made = 0
        self._event: Event | None = None  # what has happened
        self._event_at = -1  # after how many steps
        self._place: Place | None = None  # the last place
        self._others: Touched | None = None  # what was done since the departure
        self._noted = 0
        self._known = False  # only made to see what is done
        self._simulation: Searched
        self._scheduler: StateScheduler
        self._store: StoreMixin

    def begin(self, simulation: Searched) -> None:
        """Says what is simulated."""
        self._simulation = simulation
        self._scheduler = simulation.scheduler
        self._store = simulation.connect("search", 0)

    def choose(self, choices: Sequence[Task | Event], current: Task | None) -> int:
        tasks = [choice for choice in choices if isinstance(choice, Task)]
        events = [choice for choice in choices[len(tasks) or 1 :] if isinstance(choice, Event)]
        place, self._made = self._made, self._made + 1
        made = self._branch.choices
        if place < len(made):
            choice = made[place]
            if place == len(made) - 1:
                self._arrive(tasks, current)
        else:
            if self._others is not None:
                self._listen(self._others)
            happened = self._has_just_happened()
            is_start = happened is not None and happened.task is None
            choice = len(tasks) - 1 if is_start else self._look(tasks, events, current)
        first_event = len(tasks) or 1
        if choice >= first_event:
            self._event = events[choice - first_event]
            self._event_at = self._scheduler.steps
        return choice

    def _has_just_happened(self) -> Event | None:
        """The event since which no one has taken a step."""
        return self._event if self._scheduler.steps == self._event_at else None

    @property
    def _free(self) -> bool:
        """Whether anybody may go on: somebody has just crashed."""
        return self._has_just_happened() is not None

    def _arrive(self, tasks: Sequence[Task], current: Task | None) -> None:
        """Comes where the branch begins."""
        if self._state(tasks, current) != self._branch.state:
            raise RuntimeError("the same choices led to another state: something in it is not simulated")
        if self._branch.place is not None:
            self._others = Touched()
            self._noted = len(self._scheduler.trace_steps)

    def _listen(self, others: Touched) -> None:
        """Notes what others have done, until the one goes on that was left."""
        branch, scheduler = self._branch, self._scheduler
        assert branch.place is not None
        left = scheduler.tasks[branch.place.task].name
        steps: Sequence[Step] = scheduler.trace_steps
        for number in range(self._noted, len(steps)):
            step = steps[number]
            if step.task == left:
                self._search.touched[branch.place.state, branch.to] = others
                self._others = None
                if self._known:
                    raise Stop
                return
            others.add(step.what, step.args)
        self._noted = len(steps)

    def _state(self, tasks: Sequence[Task], current: Task | None) -> int:
        following = current  # the order after a wait depends on it
        if tasks:
            following = tasks[self._default(tasks, current)]
        elif self._search.from_first:
            following = None
        name = None if following is None else following.name
        return hash((self._scheduler.state(), self._free, name))

    def _default(self, tasks: Sequence[Task], current: Task | None) -> int:
        scheduler = self._scheduler
        waited = self._search.from_first and scheduler.waited_at == scheduler.steps
        return run_on(tasks, None if waited else current)

    def _look(self, tasks: Sequence[Task], events: Sequence[Event], current: Task | None) -> int:
        search, scheduler, left = self._search, self._scheduler, self._left
        default = self._default(tasks, current)
        if self._known:
            return default
        state = self._state(tasks, current)
        following = tasks[default] if tasks else None
        neutral = not self._free and search.reduced and self._is_neutral(tasks, following)
        if not neutral:
            self._pass(state, tasks, events, following)
        before = search.seen.note(state, left)
        if before >= left:
            if self._others is None:
                raise Stop
            self._known = True
            return default
        search.count.states += before < 0
        made = bytes(scheduler.choices)
        # Not where the task may still crash: then it may do so after the start, before its step.
        start_later = neutral and not any(event.task is not None for event in events)
        for number, event in enumerate(events, len(tasks) or 1):
            if self._may_happen(event, following) and self._is_new(event, start_later):
                search.add(Branch(made + bytes((number,)), left, state), event)
        cost = 0 if self._free else 1
        if left >= cost and not neutral:
            place = self._place if left == cost == 1 else None
            for number, task in enumerate(tasks):
                if number != default and not (search.reduced and self._only_waits(tasks, task)):
                    choices = made + bytes((number,))
                    search.add(Branch(choices, left - cost, state, place, task.number))
        return default

    @staticmethod
    def _may_happen(event: Event, following: Task | None) -> bool:
        """Whether an event about a task comes just before a step of that, or while all wait.

        Where others take steps it would change nothing.
        """
        if event.task is None or following is None:
            return True
        return event.task is following and following.upcoming is not None

    def _is_new(self, event: Event, start_later: bool) -> bool:
        """Whether an event may lead somewhere where no other one leads."""
        if not self._search.reduced:
            return True
        if event.task is None:
            return not start_later
        after = hash((self._scheduler.state(without=event.task), event.name))
        return self._search.seen.note(after, self._left) < self._left

    # Steps that others need not precede --------------------------------------------------------------------

    def _pass(
        self, state: int, tasks: Sequence[Task], events: Sequence[Event], following: Task | None
    ) -> None:
        """Notes the place, and for the one before that the task has come here from there."""
        before, self._place = self._place, None
        if not self._search.reduced or self._left != 1 or events or self._free:
            return
        if following is None or following.upcoming is None:
            return
        scheduler = self._scheduler
        ready = tuple(task.number for task in tasks)
        apart = hash((len(scheduler.tasks), ready, self._simulation.known()))
        if before is not None and before.task == following.number and before.apart == apart:
            before.after = state
        touches = Touched()
        touches.add(*following.upcoming)
        if not touches.awaited:
            self._place = Place(state, following.number, touches, apart)

    def _is_neutral(self, tasks: Sequence[Task], task: Task | None) -> bool:
        """Whether a task's next step can be taken before or after anything that others do, all the same.

        Then it makes no difference whether others go first now or after that step.
        """
        if task is None or not task.ready:
            return False
        if task.upcoming is None:
            return has_only_waited(task)
        operation, args = task.upcoming
        if operation == "sleep":
            return True
        if operation == "wait":
            return _waits_for_a_wake(args) and not _cleans_up(tasks)
        if operation not in _ON_ONE_KEY:
            return False
        key = args[0]
        if not isinstance(key, str):
            return False
        if _NOBODY_ELSES.match(key) or (_HEARTBEAT.match(key) and not task.daemon):
            return True
        return _WRITTEN_ONCE.match(key) is not None and self._store.check([key]) and not _cleans_up(tasks)

    def _only_waits(self, tasks: Sequence[Task], task: Task) -> bool:
        """Whether all that a task would do is to begin to wait for what is not there."""
        if task.upcoming is None:
            return False
        operation, args = task.upcoming
        if operation == "sleep":
            return True
        if operation != "wait" or not _waits_for_a_wake(args) or _cleans_up(tasks):
            return False
        return not self._store.check(list(args[0]))


def _waits_for_a_wake(args: Sequence[Any]) -> bool:
    """Whether it makes no difference if what a task is about to wait for came before or comes later."""
    return all(map(_ONLY_WAKES.match, args[0]))


def _cleans_up(tasks: Sequence[Task]) -> bool:
    """Whether somebody may delete a key before time passes: only monitors do, which are daemons."""
    return any(task.daemon and (task.upcoming is None or task.upcoming[0] != "sleep") for task in tasks)


def _bit(key: str) -> int:
    return 1 << (hash(key) & 255)


_ALL_KEYS = (1 << 256) - 1
_READS = ("get", "multi_get", "check", "list_keys", "num_keys")
_ON_ONE_KEY = ("set", "get", "check", "compare_set", "append", "add")
# Written by one process and read by none that could learn something from it.
_NOBODY_ELSES = re.compile(r"ft_wrapper/1/(?:member|faults|seat)/|ft_wrapper/(?:version|1/terms)")
# Sent by a monitor, which others observe; but the first one by the process itself, before anybody knows it.
_HEARTBEAT = re.compile(r"ft_wrapper/1/heartbeat/")
# Once they are there they never change, and nothing that is done to them changes anything.
_WRITTEN_ONCE = re.compile(r"ft_wrapper/1/(?:end|world|seat|decision|roster|wake/end|wake/head)/")
# Only ever set, and waited for.
_ONLY_WAKES = re.compile(r"ft_wrapper/1/wake/")
