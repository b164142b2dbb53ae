"""Where newcomers get their places."""

from __future__ import annotations

import pytest

from ft_wrapper.protocol.records import Decision, Member
from ft_wrapper.protocol.widening import widen


def members(*slots: int, incarnation: int = 0) -> list[Member]:
    return [Member(slot, incarnation) for slot in slots]


def widened(
    size: int, kept: dict[int, int], removed: dict[int, int | None], newcomers: list[int]
) -> list[int]:
    """The slot in each place afterwards, -1 for a gap; kept and removed give ranks by slot."""
    stay, gone, new = members(*kept), members(*removed), members(*newcomers, incarnation=1)
    ranks = {Member(slot, 0): rank for slot, rank in {**kept, **removed}.items() if rank is not None}
    world = widen(size, ranks, stay, gone, new)
    decision = Decision(
        0, 1, 0, tuple(gone), world.gaps, tuple(new), world.joined_ranks, world.inserted, world.size, 1
    )
    places = [-1] * world.size
    for slot, rank in kept.items():
        assert places[decision.rank_of(Member(slot, 0), rank)] == -1
        places[decision.rank_of(Member(slot, 0), rank)] = slot
    for member in new:
        assert places[decision.rank_of(member, None)] == -1
        places[decision.rank_of(member, None)] = member.slot
    assert world.gaps == tuple(rank for rank, slot in enumerate(places) if slot == -1)
    return places


@pytest.mark.parametrize(
    ("size", "kept", "removed", "newcomers", "expected"),
    [
        (3, {0: 0, 2: 2}, {1: 1}, [1], [0, 1, 2]),  # a predecessor's place, of known rank
        (3, {0: 0, 2: 2}, {1: None}, [1], [0, 1, 2]),  # and of one that died without a word
        (4, {0: 0, 3: 3}, {1: None, 2: None}, [2], [0, -1, 2, 3]),
        (3, {1: 1}, {2: None}, [2], [-1, 1, 2]),  # of two gaps that which keeps the slots in order
        (4, {0: 0, 3: 3}, {1: None, 2: 1}, [1, 2], [0, 2, 1, 3]),  # known ranks before the others
        (2, {0: 0, 2: 1}, {}, [1], [0, 1, 2]),  # long gone: put in by slot
        (2, {1: 0, 2: 1}, {}, [0], [0, 1, 2]),
        (2, {0: 0, 1: 1}, {}, [5, 7], [0, 1, 5, 7]),  # growth
        (
            3,
            {0: 0, 3: 1, 2: 2},
            {},
            [1],
            [0, 1, 3, 2],
        ),  # before the first higher slot
        (3, {0: 0, 2: 2}, {1: None}, [], [0, -1, 2]),
        (3, {0: 0, 2: 2}, {1: None}, [4], [0, -1, 2, 4]),  # no one takes another slot's place
        (0, {}, {0: None, 1: None}, [0, 1], [0, 1]),  # a world of newcomers alone
    ],
)
def test_places(
    size: int,
    kept: dict[int, int],
    removed: dict[int, int | None],
    newcomers: list[int],
    expected: list[int],
) -> None:
    assert widened(size, kept, removed, newcomers) == expected
