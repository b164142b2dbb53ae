"""Every mistake of mistakes.md, put back into the real code: what the explorer must find."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar
from unittest import mock

from ft_wrapper.monitor import heart
from ft_wrapper.protocol import Agreement, global_iteration, joining, keys
from ft_wrapper.protocol.ends import Ends
from ft_wrapper.protocol.global_iteration import GlobalIteration, Proposed
from ft_wrapper.protocol.joining import Entry, Joining
from ft_wrapper.protocol.neighbours import NeighbourWatch
from ft_wrapper.protocol.operations import Append, Operations, ReadLog, Step, read
from ft_wrapper.protocol.proposal import Candidates, Evidence, candidates
from ft_wrapper.protocol.records import DONE, FAULT, Decision, Fault, Head, Member, View, roster_to_json
from ft_wrapper.protocol.silence import HeartbeatObserver, Heartbeats
from ft_wrapper.settings import AllLimits
from ft_wrapper.testing import Scheduler
from ft_wrapper.testing.scheduler import TurnPolicy
from tests.explorer.scenario import Connect, Disturbance, Scenario
from tests.explorer.simulation import MAX_TIME, Simulation
from tests.explorer.stores import SimulatedStore

LONG = 10_000.0
Patches = Callable[[], contextlib.AbstractContextManager[Any]]


class MistakenSimulation(Simulation):
    """The simulation, with a mistake in it."""

    store_class: ClassVar[type[SimulatedStore]] = SimulatedStore
    patches: Patches = staticmethod(contextlib.nullcontext)

    @classmethod
    def stores(cls, scheduler: Scheduler, scenario: Scenario) -> Connect:
        return cls.store_class(scheduler, use_libuv=scenario.use_libuv).clone

    def run(self) -> Simulation:
        with self.patches():
            return super().run()


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One row of mistakes.md.

    Args:
        row: the mistake, for the table.
        effect: what happens, for the table.
        finds: a part of what the checker must say of it.
        mistaken: the parts of the protocol, or the stores, with the mistake in them.
        scenarios: the jobs in which to look for it, in the order in which to try them, each with a seed.
        simulation: the rest of the mistake.
        patches: the rest of the mistake.
    """

    row: str
    effect: str
    finds: str
    mistaken: type
    scenarios: Callable[[], Iterable[tuple[Scenario, int]]]
    simulation: type[MistakenSimulation] = MistakenSimulation
    patches: Patches = contextlib.nullcontext

    def make(self, scenario: Scenario, policy: TurnPolicy) -> Simulation:
        """A simulation with the mistake in it."""
        attributes: dict[str, Any] = {"patches": staticmethod(self.patches)}
        if issubclass(self.mistaken, SimulatedStore):
            attributes["store_class"] = self.mistaken
        else:
            attributes["parts"] = {self.mistaken.__mro__[1]: self.mistaken}
        made = type("Mistaken", (self.simulation,), attributes)
        simulation: Simulation = made(scenario, policy=policy)
        return simulation


def at_each_step(
    kind: str,
    at: range,
    *,
    slots: Iterable[int] = (0, 1),
    seconds: float = 100.0,
    also: tuple[Disturbance, ...] = (),
    seeds: int = 5,
    **scenario: Any,
) -> Callable[[], Iterator[tuple[Scenario, int]]]:
    """The same job with the fault at each step of each slot, in several orders."""

    def scenarios() -> Iterator[tuple[Scenario, int]]:
        for seed in range(seeds):
            for step in at:
                for slot in slots:
                    fault = Disturbance(kind, slot, step, seconds)
                    yield Scenario(disturbances=(*also, fault), **scenario), seed

    return scenarios


def one_job(seeds: int = 100, **scenario: Any) -> Callable[[], Iterator[tuple[Scenario, int]]]:
    """One job in several orders."""
    return lambda: ((Scenario(**scenario), seed) for seed in range(seeds))


def raises(slot: int, *entries: int) -> tuple[Disturbance, ...]:
    """The function raises on a slot when it is entered for these times."""
    return tuple(Disturbance("exception", slot, entry) for entry in entries)


# Heartbeats are time.time(), compared across hosts


class WallClockHearts(Heartbeats):
    def beat_heart(self, heart: str, lasts: float = 0.0) -> None:
        self.store.set(keys.heartbeat(heart), str(self.store.now()))

    def count_of(self, heart: str) -> int:
        return 0  # the time is read instead


def _stillness_by_wall_clock(observer: HeartbeatObserver, member: Member, _: Any = None) -> float:
    store = observer._heartbeats.store
    text = read(store, keys.heartbeat(str(member)))
    still = store.now() - float(text or 0.0)
    return still if still >= observer._timeout else 0.0


class WallClock(MistakenSimulation):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scheduler._bounds = 3_000, MAX_TIME  # where no one is too late to be in, it restarts for ever


# Rank 0 always counts as active


class RankZeroCounts(GlobalIteration):
    def advance(self, view: View, proposer: Member | None, **how: Any) -> Proposed | None:
        if self.read_head() == view.head and view.members[0] not in self.arrivals_of(view.n):
            return None
        return super().advance(view, proposer, **how)


# The winner of add(...) == 1, the others fall back to the lowest rank


class Elected(GlobalIteration):
    _lowest = False

    def advance(self, view: View, proposer: Member | None, **how: Any) -> Proposed | None:
        here = self.arrivals_of(view.n) - self.ends.deaths_of(view.n)
        self._lowest = proposer is not None and proposer == min(here, default=None)
        return super().advance(view, proposer, **how)

    def decide(self, head: Head | None, decision: Decision, members: tuple[Member, ...]) -> Proposed:
        if head is None:
            return super().decide(head, decision, members)
        proposal = Head(decision.call, decision.n, next(self.store.nonces))
        if self.store.add(f"elected/{decision.n}", 1) == 1 or self._lowest:
            _write(self.store, proposal, decision, members)
        return Proposed(decision, proposal, won=False)


def _write(store: Operations, proposal: Head, decision: Decision, members: tuple[Member, ...]) -> None:
    """Decides with a plain set."""
    store.multi_set(
        [keys.decision(proposal.n, proposal.nonce), keys.roster(proposal.n, proposal.nonce)],
        [decision.to_json(), roster_to_json(members)],
    )
    store.set(keys.HEAD, str(proposal))
    store.set(keys.wake_head(proposal.n), "1")


# Set, then get to see who won


class SetThenGet(GlobalIteration):
    def decide(self, head: Head | None, decision: Decision, members: tuple[Member, ...]) -> Proposed:
        proposal = Head(decision.call, decision.n, next(self.store.nonces))
        if self.read_head() == head:
            _write(self.store, proposal, decision, members)
        return Proposed(decision, proposal, won=False)


# The arrival list is deleted and reused


class ReusedList(GlobalIteration):
    def decide(self, head: Head | None, decision: Decision, members: tuple[Member, ...]) -> Proposed:
        decided = super().decide(head, decision, members)
        self.store.delete_key(keys.arrived(decision.n))
        return decided


# A local number when coordination fails


class LocalNumber(GlobalIteration):
    def await_next(self, view: View, member: Member, limits: AllLimits, *more: Any) -> View | None:
        following = super().await_next(view, member, limits, *more)
        if following is not None:
            return following
        first, size = view.decision.first, len(view.members)
        decision = Decision(view.call, view.n + 1, first, (), (), (), (), (), size, 1)
        return dataclasses.replace(view, decision=decision)


# Decisions written from empty, old ones deleted


class FromEmpty(GlobalIteration):
    def decide(self, head: Head | None, decision: Decision, members: tuple[Member, ...]) -> Proposed:
        proposal = Head(decision.call, decision.n, next(self.store.nonces))
        self.store.multi_set(
            [keys.decision(proposal.n, proposal.nonce), keys.roster(proposal.n, proposal.nonce)],
            [decision.to_json(), roster_to_json(members)],
        )
        self.store.compare_set(f"decided/{decision.n}", "", str(proposal))
        self.store.set(keys.HEAD, read(self.store, f"decided/{decision.n}") or str(proposal))
        self.store.delete_key(f"decided/{decision.n - 2}")
        self.store.set(keys.wake_head(decision.n), "1")
        return Proposed(decision, proposal, won=False)


# A joiner waits only for the decision after the counter it read


class WaitsForTheNext(Joining):
    def await_entry(
        self, member: Member, call: int, limits: AllLimits, patience: float, asked: int | None = None
    ) -> tuple[Entry, View]:
        view = self._current()
        observer = HeartbeatObserver(self.heartbeats, limits.heartbeat_timeout)
        joining._Attempt(self, view, member, call, limits, patience, observer)._ask()
        self.ends.end_iteration(view.n, FAULT)
        counter = self._current().n
        while (
            self.store.wait_for(keys.wake_head(counter + 1), 10.0) is None
            and self.ends.outcome_of(counter) != DONE
        ):
            pass
        view = self._current()
        return Entry.IN if member in view.members else Entry.DONE, view

    def _current(self) -> View:
        current = self.iterations.read_current()
        assert current is not None
        return current


# "In" by joiner number instead of slot:inc


def _all_that_join(view: View, found: Evidence, *how: Any) -> Candidates:
    chosen = candidates(view, found, *how)
    newcomers = set(found.joining).difference(found.dead, chosen.kept)
    return dataclasses.replace(chosen, newcomers=tuple(sorted(newcomers)))


class InByNumber(GlobalIteration):
    def advance(self, view: View, proposer: Member | None, **how: Any) -> Proposed | None:
        self._view = view
        return super().advance(view, proposer, **how)

    def decide(self, head: Head | None, decision: Decision, members: tuple[Member, ...]) -> Proposed:
        stay = set() if head is None else set(self._view.members) - set(decision.removed)
        return super().decide(head, decision, tuple(sorted(stay.union(decision.joined))))


# The number is taken by add, the record written after


class NumberThenRecordStore(SimulatedStore):
    def execute(self, steps: Sequence[Step]) -> list[str | None]:
        return [self._execute(step) for step in steps]

    def _execute(self, step: Step) -> str | None:
        match step:
            case Append(key, entry) if "/join/" in key:
                number = self.add(f"{key}/count", 1)
                self.set(f"{key}/{number}", entry)
                return None
            case ReadLog(key) if "/join/" in key:
                entries = []
                for number in range(1, self.add(f"{key}/count", 0) + 1):
                    self.wait_for(f"{key}/{number}", LONG)
                    entries.append(self.get(f"{key}/{number}").decode())
                return "\n".join(entries)
        return super().execute([step])[0]


# Arrival in two steps, one of which may be missing; the counter as truth


class CountAlone(GlobalIteration):
    def advance(self, view: View, proposer: Member | None, **how: Any) -> Proposed | None:
        if self.read_head() == view.head and self.store.add(keys.count_gone(view.n), 0) < len(view.members):
            return None
        return super().advance(view, proposer, **how)


class CounterStore(SimulatedStore):
    def execute(self, steps: Sequence[Step]) -> list[str | None]:
        return [self._execute(step) for step in steps]

    def _execute(self, step: Step) -> str | None:
        iterations = Agreement(self).iterations
        head = iterations.read_head() if isinstance(step, ReadLog) and "/arrived/" in step.key else None
        if head is None or step != ReadLog(keys.arrived(head.n)):
            return super().execute([step])[0]
        members = iterations.read_iteration(head).members
        if self.add(keys.count_gone(head.n), 0) < len(members):
            return super().execute([step])[0]
        return "\n".join(f"{member} {rank} {len(members)}" for rank, member in enumerate(members))


# Completion without end/{n}


class EndsWithoutRegister(Ends):
    _size = 0

    def finish(self, n: int, active_rank: int, active_world_size: int) -> None:
        self._size = active_world_size
        self.store.execute([Append(keys.finished(n), str(active_rank))])
        if len(self.finished_in(n)) >= active_world_size:
            self.store.set(keys.wake_end(n), "1")

    def wait_for_end(self, n: int, seconds: float) -> str | None:
        self.store.wait_for(keys.wake_end(n), seconds)
        outcome = self.outcome_of(n)
        if outcome is None and self._size and len(self.finished_in(n)) >= self._size:
            return DONE
        return outcome


class NoEnd(MistakenSimulation):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The register that this checks is what is missing; what follows from that must be found. Also, who
        # is alone then gets on slowly.
        invariants: Any = self.invariants
        invariants.completed = lambda process, view: process.completed.append(view.n)
        invariants.progress.check_pace = lambda what, since: None


# Suspects in the shared log


class SuspectsLoggedWatch(NeighbourWatch):
    def look(self, view: View, watchers: Collection[Member], *_: Any) -> frozenset[Member]:
        silent = self._silent(view, frozenset(watchers))
        for member in silent:
            self._agreement.ends.log_deaths(view.n, {member: None}, ends=True)
        return silent


# An unbounded wait on a key that may be deleted


class Unbounded(GlobalIteration):
    def await_next(self, view: View, member: Member, limits: AllLimits, *more: Any) -> View | None:
        deadline = self.store.now() + limits.barrier_timeout
        while self.store.wait_for(keys.wake_head(view.n + 1), 1.0) is None:
            if self.read_head() == view.head:
                self.advance(view, member, drop_missing=self.store.now() >= deadline)
        return super().await_next(view, member, limits, *more)

    def decide(self, head: Head | None, decision: Decision, members: tuple[Member, ...]) -> Proposed:
        if self.read_head() != head:  # a late proposal wakes no one again, either
            return Proposed(decision, Head(decision.call, decision.n, "late"), won=False)
        decided = super().decide(head, decision, members)
        self.store.delete_key(keys.wake_head(decision.n - 1))
        return decided


# A coordinator that lives but never arrives


class WaitedFor(GlobalIteration):
    def advance(
        self, view: View, proposer: Member | None, *, silent: frozenset[Member] = frozenset(), **how: Any
    ) -> Proposed | None:
        coordinator = min(set(view.members) - self.ends.deaths_of(view.n) - silent, default=None)
        if self.read_head() == view.head and proposer != coordinator:
            return None
        return super().advance(view, proposer, silent=silent, **how)


# Only members may propose


class OnlyMembers(GlobalIteration):
    def advance(self, view: View, proposer: Member | None, **how: Any) -> Proposed | None:
        return None if proposer is None else super().advance(view, proposer, **how)


# A death is logged, and the logger dies before it ends the iteration


class LoggedFirstEnds(Ends):
    def log_deaths(
        self, n: int, dead: Mapping[Member, Fault | None], *, ends: bool, returns: bool = False
    ) -> None:
        self.store.execute([Append(keys.dead(n), "\n".join(map(str, dead)))])
        if ends:
            self.end_iteration(n, FAULT)


# A lost rank's new process takes its place, while a spare waits on


def _no_spares(store: Operations, n: int) -> tuple[set[Member], int]:
    return set(), 0


RESTARTS = raises(2, 1, 2, 3)
CRASH = (Disturbance("crash", 1, 22),)

MISTAKES = [
    Mistake(
        "heartbeats are `time.time()`, compared across hosts",
        "a host whose clock is behind seems to be silent: its healthy ranks are left out",
        "I13: 0 is ended by heart",
        WallClockHearts,
        one_job(step_seconds=2.0),
        simulation=WallClock,
        patches=lambda: mock.patch.multiple(HeartbeatObserver, stillness=_stillness_by_wall_clock),
    ),
    Mistake(
        "rank 0 always counts as active",
        "once rank 0 is dead, all wait for it, until they give up",
        "rank 1 is failed, though nothing was done to it: iteration 0 was not followed",
        RankZeroCounts,
        at_each_step("crash", range(20, 45), slots=[0]),
    ),
    Mistake(
        "the winner of `add(...) == 1` decides, others fall back to the lowest rank",
        "two coordinators: one of them was only slow, and decides as well",
        "I1: head moved from",
        Elected,
        at_each_step("pause", range(20, 70), also=raises(1, 1)),
    ),
    Mistake(
        "`set`, then `get` to see who won",
        "both can win: the second one overwrites what the first has decided",
        "I1: head moved from",
        SetThenGet,
        at_each_step("pause", range(20, 45), also=raises(1, 1)),
    ),
    Mistake(
        "ready flag and arrival list are deleted and reused",
        "who is late meets the next round's: reads it, or deletes it",
        "though nothing was done to it",
        ReusedList,
        at_each_step("pause", range(20, 60), slots=[0], seconds=3.0, also=raises(1, 1, 2), members=2),
        patches=lambda: mock.patch.object(keys, "arrived", lambda n: "arrived"),
    ),
    Mistake(
        "fall back to a local number when coordination fails",
        "numbers repeat: who was left out enters a number that the others have given to another world",
        "InternalError",
        LocalNumber,
        at_each_step("freeze", range(20, 60), active=3, also=raises(2, 1)),
    ),
    Mistake(
        "decisions are written from empty, old ones deleted",
        "a proposer that was paused decides an old iteration again: the number goes back",
        "I1: head moved from",
        FromEmpty,
        at_each_step("freeze", range(25, 60), active=3, also=RESTARTS, seeds=20),
    ),
    Mistake(
        "a joiner waits only for the decision after the counter it read",
        "it was in that one: it and all others wait for ever, with no fault at all",
        "I10",
        WaitsForTheNext,
        at_each_step("respawn", range(15, 30), seconds=0.0, active=3, on_join="now", steps=10, seeds=20),
    ),
    Mistake(
        '"in" by joiner number instead of `slot:incarnation`',
        "two processes of one slot are in an iteration",
        "I2: two incarnations of a slot",
        InByNumber,
        at_each_step(
            "respawn",
            range(15, 30),
            slots=[1],
            seconds=0.0,
            also=(*CRASH, Disturbance("respawn", 1, 20, 0.0, 1)),
            on_join="now",
            steps=10,
            seeds=20,
        ),
        patches=lambda: mock.patch.object(global_iteration, "candidates", _all_that_join),
    ),
    Mistake(
        "a joiner's number is taken by `add`, its record written after",
        "a crash between the two leaves a hole: those who read on wait for ever, or pass over a live joiner",
        "I10",
        NumberThenRecordStore,
        at_each_step("crash", range(3, 12)),
    ),
    Mistake(
        "arrival in two steps (key, counter), and all wait for the counter",
        "who dies before it has counted is never counted: the others wait until they give up",
        "rank 0 is failed, though nothing was done to it: iteration 0 was not followed",
        CountAlone,
        at_each_step("reporter", range(1, 15), slots=[1], also=CRASH),
    ),
    Mistake(
        "the counter as truth",
        "one counts twice, since a reply was lost: the others are still in the function",
        "I12",
        CounterStore,
        at_each_step("repeat", range(28, 36), slots=[0], also=raises(0, 1), members=2, steps=5, seeds=100),
    ),
    Mistake(
        "completion without `end/{n}`",
        "one returns while another interrupts, and runs on alone",
        "I9: processes completed different iterations",
        EndsWithoutRegister,
        at_each_step("crash", range(16, 36), active=3, steps=1, seeds=20),
        simulation=NoEnd,
    ),
    Mistake(
        "suspects are written into the shared log",
        "two suspect each other: no one is left",
        "I4: everybody lives and no one went on",
        SimulatedStore,
        one_job(
            members=2,
            step_seconds=10.0,
            disturbances=tuple(Disturbance("mute", slot, 3, 25.0) for slot in (0, 1)),
        ),
        patches=lambda: mock.patch.object(heart, "NeighbourWatch", SuspectsLoggedWatch),
    ),
    Mistake(
        "an unbounded wait on a key that may be deleted",
        "who was paused never hears that its iteration is over",
        "is out, and does not hear of it",
        Unbounded,
        at_each_step("freeze", range(20, 60), active=3, also=RESTARTS),
    ),
    Mistake(
        "all wait for a coordinator that is alive but never arrives (a held GIL, `atomic()`)",
        "its heartbeat keeps them waiting, until they give up",
        "rank 1 is failed, though nothing was done to it: iteration 0 was not followed",
        WaitedFor,
        at_each_step("pause", range(20, 45), slots=[0], also=raises(1, 1)),
    ),
    Mistake(
        "only members may propose",
        "all members are dead or superseded: no one is left who may decide",
        "is failed, though nothing was done to it: iteration 0 was not followed",
        OnlyMembers,
        at_each_step(
            "respawn",
            range(20, 30),
            slots=[0],
            seconds=1.0,
            also=(
                *CRASH,
                Disturbance("respawn", 1, 22, 1.0),
                Disturbance("crash", 0, 30),
            ),
            members=2,
            steps=10,
        ),
    ),
    Mistake(
        "a death is logged, and the logger dies before it has ended the iteration",
        "no one is interrupted: observers of silence leave the logged dead alone",
        "I10",
        LoggedFirstEnds,
        at_each_step("reporter", range(1, 15), slots=[1], also=CRASH),
    ),
    Mistake(
        "heartbeats, or the coordinator, go by slot or rank",
        "a crash loop keeps a dead incarnation alive: its heart seems to beat",
        "I4: 0 ended by the death of rank 1",
        SimulatedStore,
        at_each_step("loop", range(16, 40), slots=[1], seconds=4.0, steps=40, step_seconds=10.0),
        patches=lambda: mock.patch.object(
            keys, "heartbeat", lambda name: f"heartbeat/{name.partition(':')[0]}"
        ),
    ),
    Mistake(
        "a lost rank's new process takes its place, though a spare waits",
        "all wait at the first step for one that is cold, while the warm one waits on",
        "I16",
        SimulatedStore,
        at_each_step("respawn", range(20, 30), slots=[1], seconds=0.0, steps=10),
        patches=lambda: mock.patch.object(global_iteration, "spares_in", _no_spares),
    ),
]
