"""The decision of the next iteration, from what the store holds on the one that ended. Pure."""

import dataclasses
from collections.abc import Collection, Mapping

from ..exception import InternalError
from ..settings import AllLimits
from . import keys
from .history import Judgement, count_same_faults
from .records import DONE, RETURNS, ArrivalEntry, Decision, Member, View
from .widening import widen


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What the store holds on an iteration that ended.

    Args:
        outcome: how it ended: ``fault`` or ``done``.
        arrived: the members that have arrived, each with its entry.
        joining: the members that ask to join the next one, and whether each has waited for others.
        dead: the dead members, each with its marks; see `records.deaths_in`.
    """

    outcome: str
    arrived: Mapping[Member, ArrivalEntry]
    joining: Mapping[Member, bool]
    dead: Mapping[Member, Collection[str]]


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The members that may be in the next iteration.

    Args:
        kept: members of the iteration that ended.
        newcomers: members that join, by slot.
        missing: members of the iteration that ended that have not arrived, though they seem to live.
    """

    kept: tuple[Member, ...]
    newcomers: tuple[Member, ...]
    missing: frozenset[Member]

    @property
    def members(self) -> tuple[Member, ...]:
        """Those kept and the newcomers, by slot."""
        return tuple(sorted(self.kept + self.newcomers))

    def all_came_back(self, view: View) -> bool:
        """Whether every slot of the iteration that ended has a newcomer."""
        return {one.slot for one in self.newcomers}.issuperset(one.slot for one in view.members)

    def without(self, out: Collection[Member]) -> "Candidates":
        """The same without those of the kept members that are excluded."""
        return dataclasses.replace(self, kept=tuple(one for one in self.kept if one not in out))


def may_propose(found: Evidence, proposer: Member | None) -> bool:
    """Whether the proposer may propose: a member only after it has arrived, and unless it is logged dead.

    Monitors and joiners (None) may always.
    """
    return proposer is None or (proposer in found.arrived and proposer not in found.dead)


def candidates(
    view: View, found: Evidence, proposer: Member | None, silent: Collection[Member]
) -> Candidates:
    """The members that may be in the next iteration.

    Args:
        view: the iteration that ended.
        found: what the store holds on it.
        proposer: the member that proposes; None for a monitor or a joiner.
        silent: members whose heartbeat the proposer has seen stand still.
    """
    newest = {member.slot: member for member in sorted(found.joining)}
    kept = tuple(
        member
        for member in view.members
        if member in found.arrived
        and member not in found.dead
        and (member not in silent or member == proposer)
        and newest.get(member.slot, member) <= member
    )
    held = {member.slot for member in kept}
    newcomers = (
        member for slot, member in sorted(newest.items()) if slot not in held and member not in found.dead
    )
    missing = frozenset(view.members).difference(found.arrived, found.dead, silent)
    return Candidates(kept, tuple(newcomers), missing)


def awaited_replacements(found: Evidence, chosen: Candidates, judgement: Judgement) -> set[int]:
    """The slots whose replacements were announced and have not come."""
    announced = {member.slot for member, marks in found.dead.items() if RETURNS in marks}
    return announced - {judgement.slot} - {member.slot for member in chosen.newcomers}


def next_decision(
    view: View, found: Evidence, chosen: Candidates, judgement: Judgement, spares: set[Member], active: int
) -> Decision:
    """The decision of the next iteration.

    Args:
        view: the iteration that ended.
        found: what the store holds on it.
        chosen: the members of the next one.
        judgement: what follows from its faults.
        spares: members that were spares in it.
        active: number of its active ranks, as far as that is known.

    Raises:
        InternalError: two members left it with the same rank.
    """
    kept, newcomers, arrived, before = chosen.kept, chosen.newcomers, found.arrived, view.decision
    removed = tuple(sorted(set(view.members).difference(kept)))
    sizes = {arrived[member].world_size for member in kept}
    if len(sizes) > 1:
        # The iteration ended during the rank assignment: some members have new ranks, some old ones. So all
        # are treated as newcomers, and get ranks by slot.
        newcomers, kept = chosen.members, ()
    if len({arrived[member].rank for member in kept}) < len(kept):
        ranks = (f"slot {m.slot} is rank {arrived[m].rank} of {arrived[m].world_size}" for m in kept)
        raise InternalError(f"the ranks of iteration {view.n} do not fit together: {', '.join(ranks)}")
    size = sizes.pop() if kept else 0  # 0: nobody is left of that world, and newcomers form a new one
    known = {member: arrival.rank for member, arrival in arrived.items() if arrival.world_size == size}
    world = widen(size, known, kept, removed, newcomers, spares.intersection(kept), active)
    removed = tuple(sorted(removed + world.moved))
    return dataclasses.replace(
        before,
        call=next_call(view, found.outcome),
        n=view.n + 1,
        first=view.n + 1 if found.outcome == DONE else before.first,
        removed=removed,
        ranks=world.gaps,
        joined=newcomers + world.moved,
        joined_ranks=world.joined_ranks,
        inserted=world.inserted,
        world_size=world.size,
        same_faults=count_same_faults(before.same_faults, found.arrived, found.dead, bool(removed)),
        blamed=judgement.blamed,
        excluded=judgement.words,
    )


def first_decision(members: tuple[Member, ...], limits: AllLimits) -> Decision:
    """The decision that a job begins with: its members get ranks by slot."""
    ranks, n = tuple(range(len(members))), keys.BEFORE_FIRST + 1
    return Decision(
        call=0,
        n=n,
        first=n,
        removed=(),
        ranks=(),
        joined=members,
        joined_ranks=ranks,
        inserted=ranks,
        world_size=len(members),
        min_world_size=limits.min_world_size,
        max_faults=limits.max_faults or 0,
        fault_window=limits.fault_window if limits.max_faults else 0.0,
    )


def next_call(view: View, outcome: str) -> int:
    """The call of the next iteration."""
    return view.decision.call + (outcome == DONE)
