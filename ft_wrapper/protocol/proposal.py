"""The decision of the next iteration, from the store's evidence on the one that ended. Pure."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from ..exception import InternalError
from ..settings import AllLimits
from . import keys
from .history import Judgement, count_same_faults
from .records import DONE, RETURNS, ArrivalEntry, Decision, Member, View


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
        """The same without the kept members that are excluded."""
        return dataclasses.replace(self, kept=tuple(one for one in self.kept if one not in out))


def may_propose(found: Evidence, proposer: Member | None) -> bool:
    """Whether the proposer may propose: a member only once it has arrived, unless it is logged dead.

    Monitors and joiners (None) always may.
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
        silent: members whose heartbeat the proposer has seen unchanged for the timeout.
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
    """The slots whose replacements were announced and have not joined."""
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
        active: number of its active ranks, as far as known.

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
        raise InternalError(f"the ranks of iteration {view.n} contradict each other: {', '.join(ranks)}")
    size = sizes.pop() if kept else 0  # 0: no member is left of that world, and newcomers form a new one
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
    """The first decision of a job: its members get ranks by slot."""
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


# Where newcomers get their places ------------------------------------------------------------------------
# A newcomer of this decision is cold: it has no device context, and has imported little. A member that stays
# is warm. So a lost active rank's place goes to a waiting spare first, and the newcomer becomes the next
# spare.


@dataclasses.dataclass(frozen=True)
class WidenedWorld:
    """The world of an iteration that ended, with places for newcomers.

    Args:
        size: number of places.
        gaps: empty places.
        moved: spares that take places of lost active ranks.
        joined_ranks: the place of each newcomer, then of each spare in ``moved``.
        inserted: places that did not exist before.
    """

    size: int
    gaps: tuple[int, ...]
    moved: tuple[Member, ...]
    joined_ranks: tuple[int, ...]
    inserted: tuple[int, ...]


@dataclasses.dataclass(eq=False)
class _Place:
    slot: int | None  # slot of the member that has, or had, the place; None if unknown
    taken: bool
    new: bool = False


def widen(
    size: int,
    ranks: Mapping[Member, int],
    kept: Collection[Member],
    removed: Iterable[Member],
    newcomers: Collection[Member],
    spares: Iterable[Member] = (),
    active: int = 0,
) -> WidenedWorld:
    """Gives each newcomer the place of its slot's last member, or a new place in the order of the slots.

    If spares move to lost active ranks, a newcomer whose place is taken gets the spare's old place, and a
    newcomer without a place comes last. So all other members keep their ranks.

    Args:
        size: world size of the iteration that ended.
        ranks: ranks in that iteration: of all kept members, and of removed members whose rank is known.
        kept: members that stay.
        removed: members that do not stay.
        newcomers: members that join, by slot.
        spares: kept members that move to places of lost active ranks.
        active: number of active ranks, whose places are the first ones.
    """
    places = [_Place(None, taken=False) for _ in range(size)]
    for member in kept:
        places[ranks[member]] = _Place(member.slot, taken=True)
    unknown = []
    for member in sorted(removed):
        rank = ranks.get(member)
        if rank is None or places[rank].slot is not None:
            unknown.append(member.slot)
        else:
            places[rank].slot = member.slot
    for slot in unknown:
        _guess_place(slot, places)
    back = {member.slot for member in newcomers}
    # Spares take places without a returning slot first.
    lost = sorted((one for one in places[:active] if not one.taken), key=lambda one: one.slot in back)
    taken_over = dict(zip(sorted(spares, key=ranks.__getitem__), lost, strict=False))
    for spare, place in taken_over.items():
        left = places[ranks[spare]]
        # The places exchange their slots, so a newcomer of the lost slot gets the spare's old place.
        left.slot, left.taken, place.slot, place.taken = place.slot, False, spare.slot, True
    joined = [_place_of(member.slot, places, is_last=bool(taken_over)) for member in newcomers]
    numbers = {id(place): number for number, place in enumerate(places)}
    return WidenedWorld(
        size=len(places),
        gaps=tuple(number for number, place in enumerate(places) if not place.taken),
        moved=tuple(taken_over),
        joined_ranks=tuple(numbers[id(place)] for place in (*joined, *taken_over.values())),
        inserted=tuple(number for number, place in enumerate(places) if place.new),
    )


def _guess_place(slot: int, places: list[_Place]) -> None:
    """Guesses the place of a dead member with unknown rank: most assignments keep the order of slots."""
    free = [number for number, place in enumerate(places) if place.slot is None]

    def keeps_the_order(number: int) -> bool:
        before = all(place.slot is None or place.slot < slot for place in places[:number])
        behind = all(place.slot is None or place.slot > slot for place in places[number:])
        return before and behind

    number = next(filter(keeps_the_order, free), free[0] if free else None)
    if number is not None:
        places[number].slot = slot


def _place_of(slot: int, places: list[_Place], *, is_last: bool) -> _Place:
    """Takes the slot's free place, or inserts a new one: at the end, or in the order of the slots."""
    for place in places:
        if place.slot == slot and not place.taken:
            place.taken = True
            return place
    behind = (number for number, place in enumerate(places) if place.slot is not None and place.slot > slot)
    place = _Place(slot, taken=True, new=True)
    places.insert(len(places) if is_last else next(behind, len(places)), place)
    return place
