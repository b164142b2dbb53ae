"""Checks the invariants L1 to L7 by what really happened, not by what the ranks say of themselves.

A recovery is *effective* once active rank 0 has written that it is sealed, or a step was applied behind it:
from then on others may have gone on from it. Between the first rank that sees the seal and that moment both
may be taken for the job's state: what was before the recovery, and what it came to. So there may be several
views, and only what is wrong in each of them is a violation.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

from ft_wrapper.live.plan import Holding, Plan, Register, Rung, make_plan

from .job import Value, whole
from .world import Copied, SeenKept, Violation

if TYPE_CHECKING:
    from .member import Member
    from .world import World

Gradients = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class View:
    """What may be taken for the job's state.

    Args:
        top: the last recovery that is effective; -1: none.
        truth: all steps that were applied.
    """

    top: int
    truth: Gradients


@dataclasses.dataclass(frozen=True)
class Said:
    """What a member really has when it says what it holds.

    Args:
        shard: of its state; None if it has none that is whole.
        reach: the gradients of the states at which it can stand.
        recoveries: those that were finished with it.
        since: see `Process`.
    """

    shard: str | None
    reach: frozenset[Gradients]
    recoveries: frozenset[int]
    since: int


@dataclasses.dataclass(frozen=True)
class Finished:
    """What a member has as it enters the vote that seals."""

    shard: str
    value: Value


class Checker:
    """Checks a job.

    Attributes:
        views: see the module.
        prepared: which ranks were prepared, by iteration and step.
        recoveries: how many there were, by rung.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.views = [View(-1, ())]
        self.prepared: dict[tuple[int, int], set[int]] = {}
        self.said: dict[int, Said] = {}
        self.finishers: dict[int, Finished] = {}
        self.plan: Plan | None = None
        self.is_sealed = False
        self.is_recoverable = self.swaps = False
        self.recoveries: Counter[str] = Counter()

    @property
    def is_sealing(self) -> bool:
        """Whether a recovery is about to be sealed, or was and is not effective yet."""
        return bool(self.finishers) and (len(self.views) > 1 or not self.is_sealed)

    # ---- the job's course

    def begin(self) -> None:
        """An iteration begins."""
        self.prepared, self.said, self.finishers = {}, {}, {}
        self.plan, self.is_sealed, self.is_recoverable = None, False, False
        self.swaps = False

    def next_call(self) -> None:
        """Another wrapped call begins: another state."""
        self.views = [View(-1, ())]

    def done(self) -> None:
        """All members have returned from a call, without a fault."""
        for member in self.world.members:
            state = member.state
            if state.gradients is None or len(state.gradients) != self.world.job.steps:
                raise Violation(f"the job is done, but rank {member.rank} is at {state.gradients}")
        self._same_bits("at the end")

    # ---- a step

    def held(self, member: Member) -> None:
        """A member has said what it holds."""
        held, state = member.kept.held, member.state
        if held is not None:
            if state.gradients is None or (held.shard, held.step) != (state.shard, len(state.gradients)):
                raise Violation(f"rank {member.rank} says {held}, but has {state.key()}")
            if held.is_prepared and member.is_atomic:
                self._is_prepared(member, held.step)
        if (
            self.is_recoverable
            and member.is_recovering
            and not self.world.is_ending
            and not (self.swaps and self.is_sealed)
        ):
            self._recoverable_still(member)

    def _is_prepared(self, member: Member, step: int) -> None:
        n, gradient = self.world.n, member.state.gradient
        if gradient != whole(n, step):
            raise Violation(f"rank {member.rank} is prepared for step {step} with other bits: {gradient}")
        self.prepared.setdefault((n, step), set()).add(member.rank)

    def reach(self, member: Member) -> frozenset[Gradients]:
        """The gradients of the states at which a member can stand without talking to any other."""
        return _reach(member.kept)

    def updates(self, member: Member, step: int, arguments: tuple[Any, ...]) -> tuple[int, int]:
        """A member begins to apply a step; returns the gradient's name."""
        gradient, world = member.state.gradient, self.world
        if len(arguments) != 2 or arguments[1] != step or gradient != whole(*arguments):
            raise Violation(f"rank {member.rank} applies step {step} with {gradient}, {arguments}")
        n: int = arguments[0]
        if member.state.buffers != step + 1:
            raise Violation(f"rank {member.rank} applies step {step} with buffers {member.state.buffers}")
        if not member.is_recovering:
            missing = set(range(world.size)) - self.prepared.get((n, step), set())
            if n != world.n or missing:
                raise Violation(f"L1: rank {member.rank} applies step {step}, and {missing} are not prepared")
        return n, step

    def applied(self, member: Member, gradients: Gradients) -> None:
        """A member has applied a step."""
        behind = []
        for view in self.views:
            length = min(len(view.truth), len(gradients))
            if view.truth[:length] == gradients[:length]:
                if not member.is_recovering:
                    longest = max(view.truth, gradients, key=len)
                    self.views = [View(self.world.n, longest)]
                return
            behind.append(view.truth)
        raise Violation(f"L3: rank {member.rank} does a step again: {gradients}; done was {behind}")

    # ---- a recovery

    def says(self, member: Member) -> None:
        """A member tells the others what it holds."""
        self.said[member.rank] = self._said(member)

    def _said(self, member: Member) -> Said:
        held, state, process = member.kept.held, member.state, member.process
        if held is not None and state.gradients is None:
            raise Violation(f"rank {member.rank} says that it holds {held}, and that is half written")
        shard = None if held is None else state.shard
        return Said(shard, _reach(member.kept), process.recoveries, process.since)

    def planned(self, holdings: list[Holding], register: Register) -> None:
        """All know what all hold: looks at the plan, once in an iteration."""
        if self.plan is not None:
            return
        self._same_bits("at a plan")
        self.plan = plan = make_plan(holdings, register)
        complaints = [self._complaint(plan, view) for view in self.views]
        if all(complaints):
            raise Violation("; or ".join(map(str, complaints)) + f"; plan {plan}")
        self.is_recoverable = plan.rung is Rung.PEERS
        moves = {one.receiver for one in plan.routes if self.said[one.receiver].shard is not None}
        self.swaps = bool(moves - plan.void)
        self.recoveries[plan.rung.name] += 1

    def _complaint(self, plan: Plan, view: View) -> str | None:
        """What is wrong with a plan in a view."""
        said, needs = self.said, self.world.job.shards
        if plan.rung is not Rung.PEERS:
            left = _common([said[rank] for rank in said if view.top in said[rank].recoveries], needs, view)
            if left:
                return f"L7: {plan.rung.value}, although all shards of {max(left, key=len)} are held"
            return None
        if plan.step < len(view.truth):
            return f"L3: step {len(view.truth)} was applied, and the plan goes to step {plan.step}"
        receivers = {route.receiver for route in plan.routes}
        stay = {rank for rank in said if rank not in receivers}
        for rank in stay.union(*(route.holders for route in plan.routes)):
            if view.top not in said[rank].recoveries:
                return f"L7: rank {rank} is believed, which was away in recovery {view.top}"
        for rank, one in said.items():
            has_it = one.shard == needs[rank] and view.top in one.recoveries
            if has_it and rank in receivers and any(len(state) == plan.step for state in one.reach):
                return f"L4: the state of rank {rank} is overwritten for nothing"
        return None

    def _recoverable_still(self, member: Member) -> None:
        """Were there a fault now that takes no process, the next recovery would still find all shards."""
        having = []
        for other in self.world.members:
            reach = other.before if other.is_atomic else _reach(other.kept)
            if reach and other.kept.objects is not None:
                state = other.state
                having.append(Said(state.shard, reach, other.process.recoveries, 0))
        for view in self.views:
            if _common([one for one in having if view.top in one.recoveries], self.world.job.shards, view):
                return
        raise Violation(f"L6: a shard has no holder as rank {member.rank} is at {member.at!r}")

    def sends(self, member: Member) -> None:
        """A member's state is read by a receiver."""
        assert self.plan is not None
        state = member.state
        step = None if state.gradients is None else len(state.gradients)
        if step != self.plan.step or state.buffers != step or member.kept.held is None:
            raise Violation(f"rank {member.rank} sends {state.key()} for step {self.plan.step}")

    def uses_copy(self, copy: Copied) -> None:
        """A recovery goes back to a copy."""
        step = len(copy.value.gradients)
        if all(view.truth[:step] != copy.value.gradients for view in self.views):
            raise Violation(f"L7: a copy of a history that was given up is used: {copy}; {self.views}")

    def finished(self, member: Member, plan: Plan) -> None:
        """A member has finished its part of the recovery, and enters the vote on it."""
        n, process, state = self.world.n, member.process, member.state
        value = state.value() if member.later is None else member.later.value
        shard = state.shard if member.later is None else member.later.shard
        needs = self.world.job.shards[member.rank]
        if shard != needs or len(value.gradients) != plan.step or value.buffers != plan.step:
            raise Violation(f"L5: rank {member.rank} has {shard}, {value}, not {needs} at step {plan.step}")
        process.recoveries |= {n}
        self.finishers[member.rank] = Finished(shard, value)

    def sealed(self, member: Member) -> None:
        """A member has seen that all have finished."""
        if self.is_sealed:
            return
        self.is_sealed = True
        finishers = self.finishers
        if len(finishers) != self.world.size:
            raise Violation(f"L5: sealed, and only ranks {sorted(finishers)} have finished")
        if len({(one.shard, one.value) for one in finishers.values()}) != len(set(self.world.job.shards)) or (
            len({one.value.gradients for one in finishers.values()}) > 1
        ):
            raise Violation(f"L5: sealed with different states: {finishers}")
        self._same_bits("at a seal")
        self.views.append(View(self.world.n, finishers[member.rank].value.gradients))

    def written(self, register: Register) -> None:
        """Active rank 0 has written the register."""
        for view in self.views:
            if view.top == register.sealed == self.world.n:
                self.views = [view]

    def _same_bits(self, where: str) -> None:
        """L2, over all processes that live."""
        for view in self.views[-1:]:
            found: dict[Any, Any] = {}
            for process in self.world.places + self.world.pool:
                state = process.kept.objects
                if process.kept.held is None or state.gradients is None or view.top not in process.recoveries:
                    continue
                mine = state.base, state.gradients
                its = found.setdefault((state.shard, len(state.gradients)), mine)
                if its != mine:
                    raise Violation(f"L2: {where}, {state.shard} at one step has two states: {its}, {mine}")


def _reach(kept: SeenKept) -> frozenset[Gradients]:
    state, held = kept.objects, kept.held
    if held is None or state.gradients is None:
        return frozenset()
    found = {state.gradients}
    if held.is_prepared and len(kept.arguments) == 2 and state.gradient == whole(*kept.arguments):
        found.add((*state.gradients, kept.arguments))
    return frozenset(found)


def _common(having: list[Said], needs: tuple[str, ...], view: View) -> set[Gradients]:
    """The states that all shards can reach, and that go behind nothing that was applied."""
    by_shard = [
        set[Gradients]().union(*(one.reach for one in having if one.shard == shard)) for shard in set(needs)
    ]
    return {one for one in set.intersection(*by_shard) if one[: len(view.truth)] == view.truth}
