"""The search through all schedules: it misses none, and knows when it cannot tell."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistStoreError

from ft_wrapper.testing import FakeStore, Scheduler
from ft_wrapper.testing.scheduler import TurnPolicy
from tests.explorer.explore import Explorer
from tests.explorer.scenario import Connect, Scenario
from tests.explorer.stores import SimulatedStore

from .__main__ import main
from .jobs import JOB, every_run
from .search import Search
from .seen import MOST_LEFT, SeenByAll, SeenHere
from .states import StateScheduler

MORE = pytest.mark.nightly("fewer programs run always")
ALONE = dataclasses.replace(JOB, members=1, active=1)

# Jobs of simulated processes


@pytest.mark.nightly("what they share is tested below always")
def test_processes_that_share_a_search_make_all_of_it() -> None:
    alone = every_run(Explorer(), 0, scenario=ALONE)
    shared = every_run(Explorer(), 0, processes=2, scenario=ALONE)
    assert alone.failure is None and shared.failure is None
    assert alone.count.schedules > 1_000
    # Two that come to a state at the same moment may both go into it.
    assert shared.count.schedules >= alone.count.schedules
    assert shared.count.states >= alone.count.states


@pytest.mark.parametrize("processes", [1, 2])
def test_runs_that_cannot_be_repeated_are_an_error(processes: int) -> None:
    runs = itertools.count()

    def stores(scheduler: Scheduler, scenario: Scenario) -> Connect:
        store = SimulatedStore(scheduler, use_libuv=scenario.use_libuv)
        store.set("which run this is", str(next(runs)))
        return store.clone

    with pytest.raises(RuntimeError, match=r"a run cannot be repeated: .*the same choices"):
        every_run(Explorer(stores=stores), 0, processes, ALONE)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--departures 9", "--departures 9: must lie in 0..6"),
        ("--processes 0", "--processes 0: must be at least 1"),
        ("--stores no.such:thing", "'no.such:thing' must be MODULE:NAME"),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments.split())
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err


# Small programs

Line = Sequence[tuple[Any, ...]]


class Program:
    """A few tasks that each carry out a line of operations on one store; stands in for a simulation.

    Args:
        policy: who goes on.
        lines: what each task does.
        later: what another one does, which may be started at any time.
        mortal: how many of the tasks may crash, one of them.
    """

    def __init__(self, policy: TurnPolicy, lines: Sequence[Line], later: Line = (), mortal: int = 0) -> None:
        self.scheduler = StateScheduler(policy=policy)
        self.learned: dict[str, list[Any]] = {}
        self._store = FakeStore(self.scheduler)
        self._crashed = False
        for number, line in enumerate(lines):
            self._spawn(f"task {number}", line)
        for task in self.scheduler.tasks[:mortal]:
            self._add_crash(task)
        if later:
            self.scheduler.add_event("start", lambda: self._spawn("later", later))
        self.scheduler.add_state(self._told)
        self.scheduler.add_store(self._store)

    def run(self) -> None:
        self.scheduler.run()

    @property
    def finished(self) -> bool:
        return all(task.done for task in self.scheduler.tasks)

    def connect(self, name: str, slot: int) -> FakeStore:
        return self._store.clone(name)

    def known(self) -> object:
        return self._crashed

    def outcome(self) -> str:
        """All that came of it, but for the order of what does not depend on each other."""
        crashed = [task.name for task in self.scheduler.tasks if task.crashed]
        return str((self.scheduler.now(), crashed, sorted(self._store.snapshot().items()), self.learned))

    def _told(self) -> str:
        """What is in the outcome and no longer part of a task's state."""
        return str((self._crashed, [self.learned[task.name] for task in self.scheduler.tasks if task.done]))

    def _spawn(self, name: str, line: Line) -> None:
        self.learned[name] = []
        self.scheduler.spawn(name, self._carry_out, self._store.clone(name), line, self.learned[name])

    def _carry_out(self, store: FakeStore, line: Line, learned: list[Any]) -> None:
        for operation, *args in line:
            try:
                act = self.scheduler.sleep if operation == "sleep" else getattr(store, operation)
                learned.append((act(*args), self.scheduler.now()))
            except DistStoreError:
                learned.append(("too late", self.scheduler.now()))

    def _add_crash(self, task: Any) -> None:
        scheduler = self.scheduler

        def crash() -> None:
            self._crashed = True
            self.learned[task.name] = []
            scheduler.crash(task)

        scheduler.add_event(f"crash of {task.name}", crash, lambda: not self._crashed and not task.done, task)


def outcomes(make: Callable[[TurnPolicy], Program], departures: int, *, reduced: bool = True) -> set[str]:
    """What a search finds."""
    found: set[str] = set()

    def noted(policy: TurnPolicy) -> Any:
        program = make(policy)
        program.scheduler.at_end(lambda: found.add(program.outcome()))
        return program

    Search(noted, departures, from_first=True, reduced=reduced).run()
    return found


def test_departures_are_counted() -> None:
    def both(policy: TurnPolicy) -> Program:
        return Program(policy, [[("append", "k", task), ("append", "k", task)] for task in "ab"])

    def logs(departures: int) -> set[str]:
        return {
            log
            for log in ("aabb", "abab", "abba", "baab", "baba", "bbaa")
            if any(log in outcome for outcome in outcomes(both, departures))
        }

    assert logs(0) == {"aabb"}
    assert logs(1) == {"aabb", "abba", "bbaa"}
    assert logs(2) == {"aabb", "abba", "bbaa", "abab", "baab"}
    assert logs(3) == {"aabb", "abab", "abba", "baab", "baba", "bbaa"}


Operations = tuple[Callable[[str], tuple[Any, ...]], ...]

WAITING: Operations = (
    lambda key: ("set", key, "1"),
    lambda key: ("wait", [key], timedelta(seconds=2)),
    lambda key: ("set", f"ft_wrapper/1/wake/{key}", "1"),
    lambda key: ("wait", [f"ft_wrapper/1/wake/{key}"], timedelta(seconds=1)),
    lambda key: ("append", "log", key),
)
OPERATIONS: Operations = (
    *WAITING,
    lambda key: ("append", key, "2"),
    lambda key: ("add", f"count {key}", 1),
    lambda key: ("check", [key]),
    lambda key: ("compare_set", key, "never", "never"),
    lambda key: ("compare_set", key, "", "3"),
    lambda key: ("compare_set", key, "1", "4"),
    lambda key: ("delete_key", key),
    lambda key: ("multi_set", [key, "b"], ["5", "6"]),
    lambda key: ("compare_set", "ft_wrapper/1/end/1", "", f"by {key}"),
    lambda key: ("check", ["ft_wrapper/1/end/1"]),
    lambda key: ("append", "ft_wrapper/1/faults/1", ""),
    lambda key: ("sleep", 1.0),
)


def random_lines(choose: random.Random, operations: Operations, tasks: int, most: int) -> Iterator[Line]:
    for _ in range(tasks):
        yield [choose.choice(operations)(choose.choice("ab")) for _ in range(choose.randint(1, most))]


@pytest.mark.parametrize(
    ("departures", "events", "programs"),
    [
        (0, True, 50),
        (1, True, 10),
        (1, False, 100),
        pytest.param(0, True, 150, marks=MORE),
        pytest.param(1, True, 40, marks=MORE),
        pytest.param(1, False, 400, marks=MORE),
        pytest.param(2, True, 10, marks=MORE),
    ],
)
def test_whatever_is_left_out_comes_to_the_same_as_something_else(
    departures: int, events: bool, programs: int
) -> None:
    for seed in range(programs):
        choose = random.Random(seed)
        operations = WAITING if seed % 2 else OPERATIONS
        lines = list(random_lines(choose, operations, 3, 4))
        later = next(random_lines(choose, operations, 1, 3)) if events and seed % 3 else ()
        mortal = seed % 3 if events else 0

        def make(
            policy: TurnPolicy, lines: list[Line] = lines, later: Line = later, mortal: int = mortal
        ) -> Program:
            return Program(policy, lines, later, mortal)

        every = outcomes(make, departures, reduced=False)
        assert outcomes(make, departures) == every, f"seed {seed}: {lines}, {later}"


def test_both_ways_of_remembering_say_the_same() -> None:
    choose = random.Random(1)
    here, by_all = SeenHere(), SeenByAll(4_096)
    states = [choose.getrandbits(64) - 2**63 & ~7 for _ in range(1_000)]
    for _ in range(10_000):
        state, left = choose.choice(states), choose.randint(0, MOST_LEFT)
        assert here.note(state, left) == by_all.note(state, left)


def test_no_room_is_an_error() -> None:
    seen = SeenByAll(16)
    with pytest.raises(MemoryError, match="no room for more than 16 states"):
        for state in range(17):
            seen.note(state << 3, 0)
