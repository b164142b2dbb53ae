"""Mistakes, to be put into the course, the plan or what a rank does for them: the explorer must find each."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any
from unittest import mock

from ft_wrapper.live import commit
from ft_wrapper.live.commit import Course
from ft_wrapper.live.plan import Held, Holding, Plan, Register, Route, Rung, make_plan

from .member import Member, Received

Planner = Callable[[Sequence[Holding], Register], Plan]


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A mistake.

    Args:
        name: what it is called.
        job: the name of the one that shows it.
        course, member, plan: what is put in the place of the right one.
        forgets_between_calls: whether what is kept belongs to the wrapped call.
    """

    name: str
    job: str = "ddp-spare"
    course: type[Course] = Course
    member: type[Member] = Member
    plan: Planner | None = None
    forgets_between_calls: bool = True

    @contextlib.contextmanager
    def put_in(self) -> Iterator[None]:
        """Has the course make this plan."""
        with mock.patch.object(commit, "make_plan", self.plan or make_plan):
            yield


NONE = Mistake("none")


def change_held(one: Holding, **changes: Any) -> Holding:
    """A holding with something else said of the state that is held."""
    return (
        one if one.held is None else dataclasses.replace(one, held=dataclasses.replace(one.held, **changes))
    )


# ---- votes


class NoVote(Member):
    """Steps are applied without one."""

    def vote(self, step: int) -> None:
        """See `Performer`."""
        if self.is_recovering:
            super().vote(step)


class VoteOfReplicas(Member):
    """Only the replicas of a shard vote on a step."""

    def vote(self, step: int) -> None:
        """See `Performer`."""
        shards = self.world.job.shards
        same = frozenset(rank for rank, shard in enumerate(shards) if shard == shards[self.rank])
        self.cast(step, None if self.is_recovering else same)


class VoteInReplica(Member):
    """Only the ranks of a replica vote on a step, as HSDP's clipping does."""

    def vote(self, step: int) -> None:
        """See `Performer`."""
        size = len(set(self.world.job.shards))
        first = self.rank - self.rank % size
        same = frozenset(range(first, first + size))
        self.cast(step, None if self.is_recovering else same)


class PreparedAfterVote(Course):
    """A rank says that it is prepared once the vote has ended."""

    def commit(self, arguments: tuple[Any, ...] = ()) -> None:
        """See `Course`."""
        held = self._held()
        self.performer.make_ready()
        self.performer.vote(held.step)
        with self.performer.atomic():
            self.kept.arguments = arguments
            self.kept.held = dataclasses.replace(held, is_prepared=True)
        self._apply()


class PreparedOutsideAtomic(Course):
    """A rank is prepared with what a collective cut short has left."""

    def commit(self, arguments: tuple[Any, ...] = ()) -> None:
        """See `Course`."""
        held = self._held()
        self.performer.make_ready()
        member = self.performer
        assert isinstance(member, Member)
        was, member.is_aborted = member.is_aborted, False
        with self.performer.atomic():
            member.is_aborted = was
            self.kept.arguments = arguments
            self.kept.held = dataclasses.replace(held, is_prepared=True)
        self.performer.vote(held.step)
        self._apply()


# ---- the state


class KeepsPrepared(Course):
    """A rank stays prepared though the step is begun again."""

    def _follow(self, plan: Plan, needs: Hashable) -> Any:
        held = self.kept.held
        later = super()._follow(plan, needs)
        now = self.kept.held
        if held is not None and now is not None and held.step == now.step and held.is_prepared:
            self.kept.held = dataclasses.replace(now, is_prepared=True)
        return later


class NotTorn(Course):
    """What is held stays so while it is written."""

    def _apply(self) -> None:
        kept = self.kept
        with self.performer.atomic():
            held = self._held()
            self.performer.update(held.step, kept.arguments)
            kept.newest = held.step + 1
            kept.held = dataclasses.replace(held, step=held.step + 1, is_prepared=False)


class NotTornByAdoption(Course):
    """What is held is said before it is there."""

    def _follow(self, plan: Plan, needs: Hashable) -> Any:
        adopt = self.performer.adopt

        def too_late(received: Received) -> None:
            self.kept.held = Held(needs, plan.step, False, plan.origin, plan.history, plan.ready)
            adopt(received)

        self.performer.adopt = too_late  # type: ignore[method-assign]
        return super()._follow(plan, needs)


class AdoptsAtOnce(Course):
    """Who is to hold another shard gives its own up before all have theirs."""

    def _follow(self, plan: Plan, needs: Hashable) -> Any:
        later = super()._follow(plan, needs)
        if later is not None:
            self.kept.held = None
            self.performer.adopt(later)
            self.kept.held = Held(needs, plan.step, False, plan.origin, plan.history, plan.ready)
        return None


class NoEqualize(Member):
    """What each rank has built stays as it is."""

    def differing(self, shard: Hashable, receivers: Collection[int] | None) -> tuple[Route, ...]:
        """See `Performer`."""
        return () if receivers is None else super().differing(shard, receivers)


class BuffersNotPutBack(Member):
    """What a forward pass has changed stays changed."""

    def put_buffers_back(self) -> None:
        """See `Member`."""


class BuffersForgotten(Member):
    """Who puts another shard in after the seal keeps no copies of its buffers."""

    def keep_buffers(self) -> None:
        """See `Member`."""


class OwnBuffers(Member):
    """Each rank has its own buffers."""

    def make_ready(self) -> None:
        """See `Performer`."""
        buffers = self.state.buffers
        super().make_ready()
        if not self.is_aborted:
            self.state.buffers = buffers


class GradientsLeft(Member):
    """What was added up in a step cut short stays."""

    def drop_step(self) -> None:
        """See `Performer`."""
        self.point("drops the step")
        self.put_buffers_back()


class CollectiveInUpdate(Member):
    """An update that needs the others."""

    def update(self, step: int, arguments: tuple[Any, ...]) -> None:
        """See `Performer`."""
        self.is_atomic = False  # the simulation has no points in atomic blocks but for one
        self.meet("clips")
        self.is_atomic = True
        super().update(step, arguments)


# ---- plans


def plan_of_each_shard(holdings: Sequence[Holding], register: Register) -> Plan:
    """Each shard plans for itself."""
    shards = dict.fromkeys(one.needs for one in holdings)

    def only(shard: Hashable, one: Holding) -> Holding:
        held = one.held if one.held is not None and one.held.shard == shard else None
        return dataclasses.replace(one, needs=shard, held=held)

    plans = {shard: make_plan([only(shard, one) for one in holdings], register) for shard in shards}
    if any(plan.rung is not Rung.PEERS for plan in plans.values()):
        return make_plan(holdings, register)

    def mine(rank: int) -> Plan:
        return plans[holdings[rank].needs]

    ranks = range(len(holdings))
    routes = [mine(rank).route_of(rank) for rank in ranks]
    return dataclasses.replace(
        plans[holdings[0].needs],
        step=max(plan.step for plan in plans.values()),
        rolls=frozenset(rank for rank in ranks if rank in mine(rank).rolls),
        routes=tuple(route for route in routes if route is not None),
        void=frozenset(rank for rank in ranks if rank in mine(rank).void),
    )


def newest_step(holdings: Sequence[Holding], register: Register) -> Plan:
    """The newest step that a rank is at, if others cannot reach it, too."""
    return make_plan([change_held(one, is_prepared=False) for one in holdings], register)


def no_history(holdings: Sequence[Holding], register: Register) -> Plan:
    """All that is held counts."""
    return make_plan([change_held(one, history=0, ready=frozenset()) for one in holdings], Register())


def no_register(holdings: Sequence[Holding], register: Register) -> Plan:
    """What others went on from is known from those that are here alone."""
    return make_plan(holdings, Register(origin=register.origin))


def no_ready(holdings: Sequence[Holding], register: Register) -> Plan:
    """Who has finished counts only once it saw the seal."""
    return make_plan([change_held(one, ready=frozenset()) for one in holdings], register)


def last_ready(holdings: Sequence[Holding], register: Register) -> Plan:
    """Of the recoveries that were finished the last number is kept."""

    def last(one: Holding) -> Holding:
        ready = one.held.ready if one.held is not None else frozenset[int]()
        return change_held(one, ready=frozenset({max(ready)} if ready else ()))

    return make_plan([last(one) for one in holdings], register)


EVERY = frozenset(range(-1, 100))
"""More recoveries than a job has."""


def copies_of_any_history(holdings: Sequence[Holding], register: Register) -> Plan:
    """Copies count whatever became of their history."""
    relabelled = [
        dataclasses.replace(
            one, copies=tuple(dataclasses.replace(copy, origins=EVERY) for copy in one.copies)
        )
        for one in holdings
    ]
    return make_plan(relabelled, register)


# ---- seals


class WritesEarly(Member):
    """The register is written before the seal."""

    def finish(self, plan: Plan, number: int) -> None:
        """See `Performer`."""
        super().finish(plan, number)
        if self.rank == 0:
            self.write_register(Register(number, plan.origin))


class NoSeal(Course):
    """The history is raised by a rank that does not know whether all have finished."""

    def recover(self, needs: Hashable) -> Plan:
        """See `Course`."""
        vote = self.performer.vote

        def no_vote(step: int) -> None:
            if self.kept.held is not None:
                self.kept.held = dataclasses.replace(self.kept.held, history=self.number, ready=frozenset())
            vote(step)

        self.performer.vote = no_vote  # type: ignore[method-assign]
        try:
            return super().recover(needs)
        finally:
            del self.performer.vote


class ReceivesAnew(Course):
    """A receiver counts only from the seal on."""

    ready: frozenset[int] | None = frozenset()
    """What a receiver has; None: its sources'."""
    history: int | None = -1

    def _follow(self, plan: Plan, needs: Hashable) -> Any:
        if self.ready is not None:
            as_received = dataclasses.replace(plan, ready=self.ready)
        if self.history is not None:
            as_received = dataclasses.replace(as_received, history=self.history)
        is_receiver = plan.route_of(self.performer.rank) is not None and (
            self.kept.held is None or self.performer.rank in plan.void
        )
        return super()._follow(as_received if is_receiver else plan, needs)


class ReceivesWithoutReady(ReceivesAnew):
    """A receiver has the history of its sources without what they have finished since."""

    history = None


class ReadyOutlives(Course):
    """What was finished with a state that is gone passes for finished with the one that was loaded."""

    def recover(self, needs: Hashable) -> Plan:
        """See `Course`."""
        held = self.kept.held
        kept: frozenset[int] = getattr(self.kept, "ready", frozenset())
        self.kept.ready = kept if held is None else held.ready  # type: ignore[attr-defined]
        return super().recover(needs)

    def _load(self, needs: Hashable, was_built: bool) -> int:
        step = super()._load(needs, was_built)
        self.kept.held = dataclasses.replace(self._held(), ready=self.kept.ready)  # type: ignore[attr-defined]
        return step


MISTAKES = [
    Mistake("no-vote", "ddp", member=NoVote),
    Mistake("vote-of-replicas", "hsdp", member=VoteOfReplicas),
    Mistake("vote-in-replica", "hsdp", member=VoteInReplica),
    Mistake("prepared-after-vote", "ddp", PreparedAfterVote),
    Mistake("prepared-outside-atomic", "hsdp", PreparedOutsideAtomic),
    Mistake("keeps-prepared", "ddp", KeepsPrepared),
    Mistake("not-torn", "ddp", NotTorn),
    Mistake("not-torn-by-adoption", "ddp", NotTornByAdoption),
    Mistake("adopts-at-once", "hsdp", AdoptsAtOnce),
    Mistake("no-equalize", "ddp", member=NoEqualize),
    Mistake("buffers-not-put-back", "ddp", member=BuffersNotPutBack),
    Mistake("buffers-forgotten", "hsdp", member=BuffersForgotten),
    Mistake("own-buffers", "ddp", member=OwnBuffers),
    Mistake("gradients-left", "ddp", member=GradientsLeft),
    Mistake("collective-in-update", "ddp", member=CollectiveInUpdate),
    Mistake("global-state", "calls", forgets_between_calls=False),
    Mistake("plan-of-each-shard", "hsdp", plan=plan_of_each_shard),
    Mistake("newest-step", "ddp", plan=newest_step),
    Mistake("no-history", plan=no_history),
    Mistake("no-register", plan=no_register),
    Mistake("no-ready", plan=no_ready),
    Mistake("last-ready", plan=last_ready),
    Mistake("writes-early", member=WritesEarly),
    Mistake("no-seal", course=NoSeal),
    Mistake("receives-anew", course=ReceivesAnew),
    Mistake("receives-without-ready", course=ReceivesWithoutReady),
    Mistake("ready-outlives", "fsdp", ReadyOutlives),
    Mistake("copies-of-any-history", "buddies", plan=copies_of_any_history),
]
