"""Where newcomers get their places: a pure function, so that it can be read and tested by itself.

A newcomer of this decision is cold: it has no device context, and has imported little. A member that stays is
warm. So a lost active rank's place goes to a waiting spare first, and the newcomer becomes the next spare.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from .records import Member


@dataclasses.dataclass(frozen=True)
class WidenedWorld:
    """The world of an iteration that ended, with places for newcomers.

    Args:
        size: number of places.
        gaps: places that nobody has.
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
    slot: int | None  # slot of the member that has, or had, the place; None if that is not known
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
