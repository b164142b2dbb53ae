"""Every mistake of DESIGN.md 5.6 that concerns what exists, put back: the simulation must find it.

These rows concern joining only, and come with it: a joiner that waits only for the decision after the counter
it read; "in" by joiner number; a joiner's number taken by ``add`` and its record written after; only members
may propose.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import pytest
from simulation import HEARTBEAT_TIMEOUT, Disturbance, Job, Scenario, SkewedStore, Violation

from ft_wrapper.monitor.neighbours import NeighbourWatch
from ft_wrapper.store import Decision, Fault, Head, HeartbeatObserver, Member, View, keys
from ft_wrapper.store.records import DONE, FAULT, roster_to_json
from ft_wrapper.testing import SchedulerError

Patches = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One row of 5.6.

    Args:
        name: the row.
        job: the simulation with the mistake in it.
        scenarios: where to look for it, with seeds.
        finds: a part of what is found.
        patches: makes the rest of the mistake.
    """

    name: str
    job: type[Job]
    scenarios: Callable[[], Iterable[tuple[Scenario, int]]]
    finds: str
    patches: Patches = contextlib.nullcontext


def failure(job: type[Job], scenario: Scenario, seed: int) -> str | None:
    """What goes wrong in one run."""
    try:
        job(scenario, seed).run()
    except (Violation, SchedulerError) as error:
        return str(error)
    return None


def each_step(
    kind: str,
    at: range,
    seeds: range,
    *,
    slots: Iterable[int] = (0, 1),
    seconds: float = 100.0,
    also: tuple[Disturbance, ...] = (),
    **scenario: Any,
) -> Callable[[], Iterator[tuple[Scenario, int]]]:
    """The same job with the fault at each step of each slot, in several orders."""

    def scenarios() -> Iterator[tuple[Scenario, int]]:
        for step in at:
            for slot in slots:
                faults = (*also, Disturbance(kind, slot, step, seconds))
                for seed in seeds:
                    yield Scenario(disturbances=faults, **scenario), seed

    return scenarios


def plain(seeds: range, **scenario: Any) -> Callable[[], Iterator[tuple[Scenario, int]]]:
    """One job in several orders."""
    return lambda: ((Scenario(**scenario), seed) for seed in seeds)


# Heartbeats are time.time(), compared across hosts


class WallClockStore(SkewedStore):
    def send_heartbeat(self, member: Member) -> int:
        self.set(keys.heartbeat(str(member)), str(self.now()))
        return 1


class WallClock(Job):
    store_class = WallClockStore


def _stillness_by_wall_clock(observer: HeartbeatObserver, member: Member) -> float:
    store: Any = observer._store
    text = store.try_get(keys.heartbeat(str(member)))
    still = store.now() - float(text or 0.0)
    return still if still >= observer._timeout else 0.0


# Rank 0 always counts as active


class RankZeroCountsStore(SkewedStore):
    def advance(self, view: View, proposer: Member | None, **how: Any) -> bool:
        if self.read_head() == view.head and view.members[0] not in self.arrivals_of(view.n):
            return False
        return super().advance(view, proposer, **how)


class RankZeroCounts(Job):
    store_class = RankZeroCountsStore


# The winner of add(...) == 1, the others fall back to the lowest rank


class ElectedStore(SkewedStore):
    _lowest = False

    def advance(self, view: View, proposer: Member | None, **how: Any) -> bool:
        self._lowest = proposer is not None and proposer == min(
            self.arrivals_of(view.n) - self.deaths_of(view.n)
        )
        return super().advance(view, proposer, **how)

    def _decide(self, head: Head | None, decision: Decision, members: tuple[Member, ...]) -> bool:
        if head is None:
            return super()._decide(head, decision, members)
        if self.add(f"elected/{decision.n}", 1) > 1 and not self._lowest:
            return False
        _write(self, decision, members)
        return True


class Elected(Job):
    store_class = ElectedStore


def _write(store: SkewedStore, decision: Decision, members: tuple[Member, ...]) -> Head:
    """Decides with a plain set."""
    proposal = Head(decision.call, decision.n, store.new_nonce())
    store.multi_set(
        [keys.decision(proposal.n, proposal.nonce), keys.roster(proposal.n, proposal.nonce)],
        [decision.to_json(), roster_to_json(members)],
    )
    store.set(keys.HEAD, str(proposal))
    store.set(keys.wake_head(proposal.n), "1")
    return proposal


# Set, then get to see who won


class SetThenGetStore(SkewedStore):
    def _decide(self, head: Head | None, decision: Decision, members: tuple[Member, ...]) -> bool:
        if self.read_head() == head:
            _write(self, decision, members)
        return True


class SetThenGet(Job):
    store_class = SetThenGetStore


# The arrival list is deleted and reused


class ReusedListStore(SkewedStore):
    def _decide(self, head: Head | None, decision: Decision, members: tuple[Member, ...]) -> bool:
        decided = super()._decide(head, decision, members)
        self.delete_key(keys.arrived(decision.n))
        return decided


class ReusedList(Job):
    store_class = ReusedListStore


# A local number when coordination fails


class LocalNumberStore(SkewedStore):
    def await_next(self, view: View, member: Member, **how: Any) -> tuple[View, Decision] | None:
        following = super().await_next(view, member, **how)
        if following is not None:
            return following
        after = dataclasses.replace(view, n=view.n + 1)
        return after, Decision(view.call, after.n, view.first, (), (), (), (), (), len(view.members))


class LocalNumber(Job):
    store_class = LocalNumberStore


# Decisions written from empty, old ones deleted


class FromEmptyStore(SkewedStore):
    def _decide(self, head: Head | None, decision: Decision, members: tuple[Member, ...]) -> bool:
        proposal = Head(decision.call, decision.n, self.new_nonce())
        self.multi_set(
            [keys.decision(proposal.n, proposal.nonce), keys.roster(proposal.n, proposal.nonce)],
            [decision.to_json(), roster_to_json(members)],
        )
        self.compare_set(f"decided/{decision.n}", "", str(proposal))
        self.set(keys.HEAD, self.get(f"decided/{decision.n}"))
        self.delete_key(f"decided/{decision.n - 2}")
        self.set(keys.wake_head(decision.n), "1")
        return True


class FromEmpty(Job):
    store_class = FromEmptyStore


# The counter is the truth; arrival takes two steps and one of them may be missing


class CounterStore(SkewedStore):
    def _arrivals(self, n: int) -> dict[Member, tuple[int, int]]:
        head = self.read_head()
        if head is None or head.n != n:
            return super()._arrivals(n)
        members = self.read_view(head).members
        if self.add(keys.count_gone(n), 0) < len(members):
            return super()._arrivals(n)
        return {member: (rank, len(members)) for rank, member in enumerate(members)}


class Counter(Job):
    store_class = CounterStore


class CountAloneStore(SkewedStore):
    def advance(self, view: View, proposer: Member | None, **how: Any) -> bool:
        if self.read_head() == view.head and self.add(keys.count_gone(view.n), 0) < len(view.members):
            return False
        return super().advance(view, proposer, **how)


class CountAlone(Job):
    store_class = CountAloneStore


# Completion without end/{n}


class NoEndStore(SkewedStore):
    _size = 0

    def finish(self, n: int, active_rank: int, active_world_size: int) -> None:
        self._size = active_world_size
        self.log_append(keys.finished(n), str(active_rank))
        if len(self.finished_in(n)) >= active_world_size:
            self.set(keys.wake_end(n), "1")

    def wait_for_end(self, n: int, seconds: float) -> str | None:
        self.wait_for(keys.wake_end(n), seconds)
        outcome = self.outcome_of(n)
        if outcome is None and self._size and len(self.finished_in(n)) >= self._size:
            return DONE
        return outcome


class NoEnd(Job):
    store_class = NoEndStore

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # The register that this checks is what is missing; what follows from that must be found.
        self.invariants.completed = lambda rank, view: rank.done_in.append(view.n)  # type: ignore[method-assign]


# Suspects in the shared log


class SuspectsLoggedWatch(NeighbourWatch):
    def look(self, view: View) -> frozenset[Member]:
        silent = self._silent(view)
        for member in silent:
            self._store.log_death(view.n, member, None, ends=True)
        return silent


class SuspectsLogged(Job):
    def watch(self, store: SkewedStore, member: Member) -> NeighbourWatch:
        return SuspectsLoggedWatch(store, member, HEARTBEAT_TIMEOUT)


# An unbounded wait on a key that may be deleted


class UnboundedStore(SkewedStore):
    def await_next(self, view: View, member: Member, **how: Any) -> tuple[View, Decision] | None:
        deadline = self.now() + how["timeout"]
        while not self.wait_for(keys.wake_head(view.n + 1), 1.0):
            if self.read_head() == view.head:
                self.advance(view, member, drop_missing=self.now() >= deadline)
        return super().await_next(view, member, **how)

    def _decide(self, head: Head | None, decision: Decision, members: tuple[Member, ...]) -> bool:
        if self.read_head() != head:
            return True  # a late proposal wakes nobody again, either
        decided = super()._decide(head, decision, members)
        self.delete_key(keys.wake_head(decision.n - 1))
        return decided


class Unbounded(Job):
    store_class = UnboundedStore


# A coordinator that lives but never arrives


class WaitedForStore(SkewedStore):
    def advance(
        self, view: View, proposer: Member | None, *, silent: frozenset[Member] = frozenset(), **how: Any
    ) -> bool:
        coordinator = min(set(view.members) - self.deaths_of(view.n) - silent, default=None)
        if self.read_head() == view.head and proposer != coordinator:
            return False
        return super().advance(view, proposer, silent=silent, **how)


class WaitedFor(Job):
    store_class = WaitedForStore


# A death is logged, and the logger dies before it ends the iteration


class LoggedFirstStore(SkewedStore):
    def log_death(self, n: int, member: Member, fault: Fault | None, *, ends: bool) -> None:
        self.log_append(keys.dead(n), str(member))
        if ends:
            self.end_iteration(n, FAULT)


class LoggedFirst(Job):
    store_class = LoggedFirstStore


TWO_RESTARTS = ((2, 1), (2, 2), (2, 3))

MISTAKES = [
    Mistake(
        "heartbeats are compared across hosts",
        WallClock,
        plain(range(3), steps=50),
        "",
        lambda: mock.patch.object(HeartbeatObserver, "stillness", _stillness_by_wall_clock),
    ),
    Mistake(
        "rank 0 always counts as active",
        RankZeroCounts,
        each_step("crash", range(25, 45), range(3), slots=[0]),
        "rank 1 is failed, though nothing was done to it",
    ),
    Mistake(
        "winner of add, others fall back to the lowest rank",
        Elected,
        each_step("pause", range(20, 70), range(5), exceptions=((1, 1),)),
        "I1: head moved",
    ),
    Mistake(
        "set, then get",
        SetThenGet,
        each_step("repeat", range(22, 40), range(20), exceptions=((0, 1),)),
        "I1: head moved",
    ),
    Mistake(
        "arrival list deleted and reused",
        ReusedList,
        each_step("pause", range(25, 60), range(5), seconds=3.0, active=3, exceptions=TWO_RESTARTS),
        "",
        lambda: mock.patch.object(keys, "arrived", lambda n: "arrived"),
    ),
    Mistake(
        "local number when coordination fails",
        LocalNumber,
        each_step("pause", range(20, 50), range(3), exceptions=((2, 1),), members=3, active=3),
        "rank_assignment disagrees in iteration 1",
    ),
    Mistake(
        "decisions from empty, old ones deleted",
        FromEmpty,
        each_step("pause", range(25, 60), range(20), exceptions=TWO_RESTARTS, active=3),
        "I1: head moved",
    ),
    Mistake(
        "counter as truth",
        Counter,
        each_step("repeat", range(26, 36), range(60), slots=[0], exceptions=((0, 1),), members=2, steps=5),
        "I12",
    ),
    Mistake(
        "arrival in two steps",
        CountAlone,
        each_step("reporter", range(1, 15), range(2), slots=[1], also=(Disturbance("crash", 1, 20),)),
        "",
    ),
    Mistake(
        "completion without end",
        NoEnd,
        each_step("crash", range(16, 34), range(20), active=3, steps=1),
        "",
    ),
    Mistake(
        "suspects in the shared log",
        SuspectsLogged,
        plain(
            range(20),
            members=2,
            steps=300,
            disturbances=tuple(Disturbance("mute", s, 3, 25.0) for s in (0, 1)),
        ),
        "everybody lives and nobody went on",
    ),
    Mistake(
        "unbounded wait on a key that may be deleted",
        Unbounded,
        each_step("pause", range(20, 60), range(5), exceptions=TWO_RESTARTS, active=3),
        "",
    ),
    Mistake(
        "coordinator that lives but never arrives",
        WaitedFor,
        each_step("pause", range(22, 40), range(2), slots=[0], exceptions=((1, 1),)),
        "rank 1 is failed, though nothing was done to it",
    ),
    Mistake(
        "death logged, logger dies before ending",
        LoggedFirst,
        each_step("reporter", range(1, 15), range(2), slots=[1], also=(Disturbance("crash", 1, 20),)),
        "",
    ),
    Mistake(
        "heartbeat keyed by slot",
        Job,
        each_step("loop", range(20, 40), range(3), seconds=0.0),
        "I4",
        lambda: mock.patch.object(keys, "heartbeat", lambda name: f"heartbeat/{name.partition(':')[0]}"),
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_mistake_is_found(mistake: Mistake) -> None:
    for scenario, seed in mistake.scenarios():
        with mistake.patches():
            found = failure(mistake.job, scenario, seed)
        if found is not None and mistake.finds in found.partition("\n")[0]:
            break
    else:
        pytest.fail(f"nothing found: {mistake.name}")
    assert failure(Job, scenario, seed) is None, "the same run must succeed without the mistake"


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_scenarios_of_mistake_succeed_without_it(mistake: Mistake) -> None:
    for number, (scenario, seed) in enumerate(mistake.scenarios()):
        if number % 31 == 0:
            assert failure(Job, scenario, seed) is None
