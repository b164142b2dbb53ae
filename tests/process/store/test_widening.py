"""Where newcomers get their places."""

from __future__ import annotations

from typing import Any

import pytest

from ft_wrapper.protocol.proposal import widen
from ft_wrapper.protocol.records import Decision, Member


def members(*slots: int, incarnation: int = 0) -> list[Member]:
    return [Member(slot, incarnation) for slot in slots]


def widened(
    size: int,
    kept: dict[int, int],
    removed: dict[int, int | None],
    newcomers: list[int],
    spares: tuple[int, ...] = (),
    active: int = 0,
) -> list[int]:
    """The slot in each place afterwards, -1 for a gap; kept and removed give ranks by slot."""
    stay, gone, new = members(*kept), members(*removed), members(*newcomers, incarnation=1)
    ranks = {Member(slot, 0): rank for slot, rank in {**kept, **removed}.items() if rank is not None}
    world = widen(size, ranks, stay, gone, new, members(*spares), active)
    removed_, joined = (*gone, *world.moved), (*new, *world.moved)
    decision = Decision(
        0, 1, 0, removed_, world.gaps, joined, world.joined_ranks, world.inserted, world.size, 1
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
    ("expected", "size", "kept", "removed", "newcomers"),
    [
        ([0, 1, 2], 3, {0: 0, 2: 2}, {1: 1}, [1]),  # a predecessor's place, of known rank
        ([0, 1, 2], 3, {0: 0, 2: 2}, {1: None}, [1]),  # and of one that died without a word
        ([0, -1, 2, 3], 4, {0: 0, 3: 3}, {1: None, 2: None}, [2]),
        ([-1, 1, 2], 3, {1: 1}, {2: None}, [2]),  # of two gaps that which keeps the slots in order
        ([0, 2, 1, 3], 4, {0: 0, 3: 3}, {1: None, 2: 1}, [1, 2]),  # known ranks before the others
        ([0, 1, 2], 2, {0: 0, 2: 1}, {}, [1]),  # long gone: put in by slot
        ([0, 1, 2], 2, {1: 0, 2: 1}, {}, [0]),
        ([0, 1, 5, 7], 2, {0: 0, 1: 1}, {}, [5, 7]),  # growth
        ([0, 1, 3, 2], 3, {0: 0, 3: 1, 2: 2}, {}, [1]),  # before the first higher slot
        ([0, -1, 2], 3, {0: 0, 2: 2}, {1: None}, []),
        ([0, -1, 2, 4], 3, {0: 0, 2: 2}, {1: None}, [4]),  # no one takes another slot's place
        ([0, 1], 0, {}, {0: None, 1: None}, [0, 1]),  # a world of newcomers alone
    ],
)
def test_places(expected: list[int], size: int, kept: Any, removed: Any, newcomers: list[int]) -> None:
    assert widened(size, kept, removed, newcomers) == expected


@pytest.mark.parametrize(
    ("expected", "case"),
    [
        # The spare steps in, the new process is the next spare, the others keep their ranks.
        ([0, 3, 2, 1], (4, {0: 0, 2: 2, 3: 3}, {1: None}, [1], (3,), 3)),
        ([3, 1, 2, 0], (4, {1: 1, 2: 2, 3: 3}, {0: 0}, [0], (3,), 3)),
        # Two lost, one spare: a newcomer keeps its own place, if the other's place has no newcomer.
        ([0, 1, 4, 3, -1], (5, {0: 0, 3: 3, 4: 4}, {1: None, 2: None}, [1], (4,), 4)),
        ([0, 4, 2, 3, 1], (5, {0: 0, 3: 3, 4: 4}, {1: None, 2: None}, [1, 2], (4,), 4)),
        # Two lost, two spares: the lowest first.
        ([0, 3, 4, 1, 2], (5, {0: 0, 3: 3, 4: 4}, {1: None, 2: None}, [1, 2], (3, 4), 3)),
        ([0, 3, 4, -1, 2], (5, {0: 0, 3: 3, 4: 4}, {1: None, 2: None}, [2], (3, 4), 3)),
        # A spare that was lost is one again.
        ([0, 1, 2, 3], (4, {0: 0, 1: 1, 3: 3}, {2: None}, [2], (3,), 2)),
        ([0, 3, 2, 1], (4, {0: 0, 3: 3}, {1: None, 2: None}, [1, 2], (3,), 2)),
        ([0, 3, 2, -1], (4, {0: 0, 3: 3}, {1: None, 2: None}, [2], (3,), 2)),
        # All spares are lost, too: nothing changes.
        ([0, 1, 2], (3, {0: 0}, {1: None, 2: None}, [1, 2], (), 2)),
        # One without a place of its own does not shift the others.
        ([4, 2, 3, -1, 0], (4, {2: 1, 3: 2, 4: 3}, {1: 0}, [0], (4,), 3)),
        ([4, 2, 3, 1, 0], (4, {2: 1, 3: 2, 4: 3}, {1: 0}, [0, 1], (4,), 3)),
        ([0, 2, 3], (2, {2: 0, 3: 1}, {}, [0], (3,), 1)),  # if no place is lost, it is put in by slot
        # After that: ranks are no longer in the order of the slots.
        ([0, 1, 2, 3], (4, {0: 0, 2: 2, 1: 3}, {3: 1}, [3], (1,), 3)),
        ([0, 1, 2, 3], (4, {0: 0, 2: 2, 1: 3}, {3: None}, [3], (1,), 3)),
        ([0, 4, 2, 3, -1], (5, {0: 0, 2: 2, 4: 4}, {3: None, 1: None}, [3], (4,), 3)),
    ],
)
def test_a_waiting_spare_steps_in_before_a_newcomer(expected: list[int], case: Any) -> None:
    assert widened(*case) == expected
