"""From what the store has of an iteration that ended to the decision of the next one. Pure."""

import dataclasses
from collections.abc import Collection, Mapping

from ..exception import InternalError
from ..settings import Limits
from . import keys
from .history import Judgement, count_same_faults
from .records import DONE, RETURNS, ArrivalEntry, Decision, Member, View
from .widening import widen


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What the store has of an iteration that ended.

    Args:
        outcome: how it ended.
        arrived: who has left its function.
        joining: who asks to be let into the next one.
        dead: who has ended, with what was noted; see `records.deaths_in`.
    """

    outcome: str
    arrived: Mapping[Member, ArrivalEntry]
    joining: Collection[Member]
    dead: Mapping[Member, Collection[str]]


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Who may be in the next iteration.

    Args:
        kept: members of the one that ended.
        newcomers: members that join, by slot.
        missing: members of the one that ended that live, as far as is known, and have not arrived.
    """

    kept: tuple[Member, ...]
    newcomers: tuple[Member, ...]
    missing: frozenset[Member]

    @property
    def members(self) -> tuple[Member, ...]:
        """All of them, by slot."""
        return tuple(sorted(self.kept + self.newcomers))

    def all_came_back(self, view: View) -> bool:
        """Whether a newcomer has come for the slot of every member of the iteration that ended."""
        return {one.slot for one in self.newcomers}.issuperset(one.slot for one in view.members)

    def without(self, out: Collection[Member]) -> "Candidates":
        """These, but for members that are excluded."""
        return dataclasses.replace(self, kept=tuple(one for one in self.kept if one not in out))


def may_propose(found: Evidence, proposer: Member | None) -> bool:
    """Whether somebody may propose: a member only once it has arrived, and while it is not dead."""
    return proposer is None or (proposer in found.arrived and proposer not in found.dead)


def candidates(
    view: View, found: Evidence, proposer: Member | None, silent: Collection[Member]
) -> Candidates:
    """Who may be in the iteration after one.

    Args:
        view: the iteration that ended.
        found: what the store has of it.
        proposer: who asks; None for one that is no member of it.
        silent: members that the proposer has seen stand still.
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


def awaited_replacements(found: Evidence, chosen: Candidates, verdict: Judgement) -> set[int]:
    """The slots of dead members whose replacements were announced, and have not come."""
    announced = {member.slot for member, marks in found.dead.items() if RETURNS in marks}
    return announced - {verdict.slot} - {member.slot for member in chosen.newcomers}


def next_decision(
    view: View, found: Evidence, chosen: Candidates, verdict: Judgement, spares: set[Member], active: int
) -> Decision:
    """The decision of the iteration after one.

    Args:
        view: the iteration that ended.
        found: what the store has of it.
        chosen: who is in the next one.
        verdict: what follows from its faults.
        spares: members that were spares in it.
        active: how many of its ranks were active, as far as that is known.

    Raises:
        InternalError: two members left it with the same rank.
    """
    kept, newcomers, arrived, before = chosen.kept, chosen.newcomers, found.arrived, view.decision
    removed = tuple(sorted(set(view.members).difference(kept)))
    sizes = {arrived[member].world_size for member in kept}
    if len(sizes) > 1:
        # The iteration ended when the rank assignment was through on some ranks, and not on others. No world
        # is left whose ranks they all have: a new one, in which all get theirs by slot.
        newcomers, kept = chosen.members, ()
    if len({arrived[member].rank for member in kept}) < len(kept):
        ranks = (f"slot {m.slot} is rank {arrived[m].rank} of {arrived[m].world_size}" for m in kept)
        raise InternalError(f"the ranks of iteration {view.n} do not fit together: {', '.join(ranks)}")
    size = sizes.pop() if kept else 0  # or no one is left of that world: a new one of newcomers alone
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
        blamed=verdict.blamed,
        excluded=verdict.words,
    )


def first_decision(members: tuple[Member, ...], limits: Limits) -> Decision:
    """The decision that a job begins with: all its members get their ranks by slot."""
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
    """The call that the iteration after an ended one belongs to."""
    return view.decision.call + (outcome == DONE)
