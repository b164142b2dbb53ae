"""ReplicaGroups: complete replicas are active, and survivors keep the shards they hold."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plugin_job import Job

from ft_wrapper.compose import Compose
from ft_wrapper.exception import InternalError, RankDiscarded
from ft_wrapper.rank_assignment import MaxActiveWorldSize, RankAssignment, RankAssignmentCtx, ReplicaGroups
from ft_wrapper.rank_assignment.places import fill_holes, ranks_in_replicas
from ft_wrapper.state import State
from ft_wrapper.testing import FakeStore

Loss = tuple[int, int, int, set[int]]
"""Size of a replica, world size, active world size, lost ranks."""


@st.composite
def losses(draw: st.DrawFn, most_replicas: int = 3, most_spares: int = 3) -> Loss:
    """What may be lost of some replicas and spares."""
    size = draw(st.integers(1, 3))
    active = size * draw(st.integers(0, most_replicas))
    world_size = active + draw(st.integers(0 if active else 1, most_spares))
    return size, world_size, active, draw(st.sets(st.integers(0, world_size - 1)))


def new_ranks(size: int, world_size: int, active: int | None, lost: set[int]) -> dict[int, int]:
    """New rank by old one, as each rank works it out for itself."""
    found = {}
    for rank in set(range(world_size)) - lost:
        state = State(rank=rank, world_size=world_size, active_world_size=active)
        ctx = ReplicaGroups(size)(RankAssignmentCtx(state, FakeStore(), set(lost)))
        assert ctx.terminated_ranks == set() and ctx.state.rank is not None
        assert ctx.state.world_size == world_size - len(lost)
        assert ctx.state.active_world_size == ctx.state.world_size - ctx.state.world_size % size
        found[rank] = ctx.state.rank
    return found


@pytest.mark.parametrize(
    ("size", "world_size", "active", "lost", "becomes"),
    [
        (2, 6, 6, {2, 5}, [0, 1, 4, 3]),  # 4 held the same shard
        (2, 6, 6, {1}, [0, 5, 2, 3, 4]),  # 5 held the same shard; 4 is a spare now
        (2, 6, 4, {1}, [0, 5, 2, 3, 4]),  # a spare
        (2, 7, 6, {1}, [0, 6, 2, 3, 4, 5]),  # a spare, although 5 holds the same shard
        (3, 8, 6, {1, 3, 5}, [0, 4, 2, 6, 7]),  # 4 alone holds its shard: it goes before the spares
        (3, 8, 6, {1, 4, 5}, [0, 7, 2, 3, 6]),  # 3 holds another one: the spares go before it
        (3, 6, 6, {1, 4}, [0, 5, 2, 3]),  # none holds it any more
        (2, 6, None, {0}, [4, 1, 2, 3, 5]),
        (4, 6, 4, {0, 1, 2}, [3, 4, 5]),  # too few for a replica
        (1, 4, 4, {0}, [3, 1, 2]),
    ],
)
def test_who_takes_which_place(
    size: int, world_size: int, active: int | None, lost: set[int], becomes: list[int]
) -> None:
    found = new_ranks(size, world_size, active, lost)
    assert sorted(found, key=found.__getitem__) == becomes


@settings(deadline=None)
@given(losses(most_replicas=6, most_spares=7))
def test_each_place_is_given_once_and_replicas_that_stay_complete_do_not_move(loss: Loss) -> None:
    size, world_size, active, lost = loss
    found = new_ranks(*loss)
    assert sorted(found.values()) == list(range(world_size - len(lost)))
    end = ranks_in_replicas(size, len(found))
    assert all(found[rank] == rank for rank in found if rank < end)
    # A shard that one of the survivors holds is held by an active rank, so it is not lost.
    holders = {rank: place for rank, place in found.items() if rank < active}
    if end:
        held = {rank % size for rank in holders}
        assert held == {r % size for r, place in holders.items() if place < end and place % size == r % size}


def price(loss: Loss, rank: int, place: int) -> tuple[int, int, int]:
    """What it costs to give a rank a place: shards to receive, to give up, and active ranks moved."""
    size, world_size, active, lost = loss
    is_active, was_active = place < ranks_in_replicas(size, world_size - len(lost)), rank < active
    same = rank % size == place % size
    return (
        int(is_active and not (was_active and same)),
        int(is_active and was_active and not same),
        int(is_active and was_active and rank != place),
    )


def added(prices: list[tuple[int, int, int]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip((0, 0, 0), *prices, strict=True))


def cheapest(loss: Loss) -> tuple[int, ...]:
    """The lowest price of all ways to give the survivors places."""
    _, world_size, _, lost = loss
    survivors = tuple(sorted(set(range(world_size)) - lost))

    @functools.cache
    def for_the(left: tuple[int, ...]) -> tuple[int, ...]:
        place = len(survivors) - len(left)
        return min(
            (
                added([price(loss, rank, place), for_the((*left[:i], *left[i + 1 :]))])  # type: ignore[list-item]
                for i, rank in enumerate(left)
            ),
            default=(0, 0, 0),
        )

    return for_the(survivors)


@settings(deadline=None, max_examples=60)
@given(losses())
def test_no_other_way_costs_less(loss: Loss) -> None:
    """Of all ways: fewest ranks receive a shard, of these fewest change shards, of these fewest move."""
    assert added([price(loss, rank, place) for rank, place in fill_holes(*loss).items()]) == cheapest(loss)


@settings(deadline=None)
@given(losses())
def test_no_active_rank_moves_while_there_are_spares_for_all(loss: Loss) -> None:
    _, _, active, lost = loss
    places = fill_holes(*loss)
    lost_active = sum(rank < active for rank in lost)
    if lost_active <= len(places) - (active - lost_active):
        assert all(places[rank] == rank for rank in places if rank < active)


def with_spares() -> RankAssignment:
    return Compose(MaxActiveWorldSize(4), ReplicaGroups(2))


def test_spares_are_taken_one_after_the_other_then_a_replica_goes() -> None:
    """In the end 2 is a spare; the store is not asked what it held."""
    job = Job(6, with_spares)
    for lost, active in (
        (set[int](), {0: 0, 1: 1, 2: 2, 3: 3}),
        ({1}, {0: 0, 5: 1, 2: 2, 3: 3}),
        ({0}, {4: 0, 5: 1, 2: 2, 3: 3}),
        ({5}, {4: 0, 3: 1}),
        ({4}, {2: 0, 3: 1}),
        ({2}, {}),
    ):
        job.enter(lost)
        job.check()
        assert job.active() == active


def test_a_newcomer_in_a_lost_ranks_place_moves_no_one() -> None:
    job = Job(6, with_spares)
    job.enter()
    job.replace_process(1)
    for state in job.states.values():
        state.active_world_size = None  # as the wrapper does when processes join
    job.enter(lost={5})
    job.check()
    assert job.active() == {0: 0, 1: 1, 2: 2, 3: 3}


def test_ranks_that_are_gone() -> None:
    def ctx(rank: int | None, **more: Any) -> RankAssignmentCtx:
        return RankAssignmentCtx(State(rank=rank, world_size=4, **more), FakeStore(), {1})

    with pytest.raises(RankDiscarded, match=r"rank 1 .*\[1\]"):
        ReplicaGroups(2)(ctx(1))
    with pytest.raises(InternalError, match="has left"):
        ReplicaGroups(2)(ctx(None, initial_rank=1))
