"""Rank assignments other than Tree: who gets which rank, and who is active."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plugin_job import Job
from torch.distributed import DistStoreError

from ft_wrapper.compose import Compose
from ft_wrapper.exception import InternalError
from ft_wrapper.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    FilterCountGroupedByKey,
    MaxActiveWorldSize,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    RankFilter,
    ShiftRanks,
)
from ft_wrapper.state import Mode, State
from ft_wrapper.store import BarrierTimeout
from ft_wrapper.testing import FakeStore


def ctx_of(rank: int | None, world_size: int, terminated: set[int], **more: Any) -> RankAssignmentCtx:
    return RankAssignmentCtx(State(rank=rank, world_size=world_size, **more), FakeStore(), terminated)


def assign(assignment: RankAssignment, world_size: int, terminated: set[int]) -> dict[int, int | None]:
    """New rank by old rank."""
    result = {}
    for rank in set(range(world_size)) - terminated:
        ctx = assignment(ctx_of(rank, world_size, set(terminated)))
        assert ctx.terminated_ranks == set()
        assert ctx.state.world_size == world_size - len(terminated)
        assert ctx.state.initial_rank == rank
        result[rank] = ctx.state.rank
    return result


def test_shift_ranks_keeps_the_order() -> None:
    assert assign(ShiftRanks(), 8, {1, 4, 5}) == {0: 0, 2: 1, 3: 2, 6: 3, 7: 4}


def test_fill_gaps_moves_the_last_ones_only() -> None:
    assert assign(FillGaps(), 8, {1, 4, 5}) == {0: 0, 6: 1, 2: 2, 3: 3, 7: 4}


@given(
    st.integers(1, 20).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=n)))
)
def test_gaps_are_closed(job: tuple[int, set[int]]) -> None:
    world_size, terminated = job
    size = world_size - len(terminated)
    shifted = assign(ShiftRanks(), world_size, terminated)
    assert [shifted[old] for old in sorted(shifted)] == list(range(size))
    filled = assign(FillGaps(), world_size, terminated)
    assert sorted(filled.values(), key=lambda rank: rank or 0) == list(range(size))
    assert all(new == old for old, new in filled.items() if old < size)


@pytest.mark.parametrize("assignment", [ShiftRanks(), FillGaps()])
def test_a_terminated_rank_is_discarded(assignment: RankAssignment) -> None:
    with pytest.raises(RankDiscarded, match=r"rank 2 .*\[1, 2\]"):
        assignment(ctx_of(2, 4, {1, 2}))


@pytest.mark.parametrize("assignment", [ShiftRanks(), FillGaps(), ActivateAllRanks(), MaxActiveWorldSize(1)])
def test_a_rank_that_has_left_is_an_error(assignment: RankAssignment) -> None:
    with pytest.raises(InternalError, match="has left"):
        assignment(ctx_of(None, 4, set(), initial_rank=1))


def activate(assignment: RankFilter, world_size: int, **more: Any) -> list[int | None]:
    active_ranks = []
    for rank in range(world_size):
        state = assignment(ctx_of(rank, world_size, set(), **more)).state
        active_ranks.append(state.active_rank)
        assert state.rank == rank
        assert state.mode is (Mode.INACTIVE if state.active_rank is None else Mode.ACTIVE)
    assert state.active_world_size == len([rank for rank in active_ranks if rank is not None])
    return active_ranks


@pytest.mark.parametrize(
    ("assignment", "active"),
    [
        (ActivateAllRanks(), 5),
        (MaxActiveWorldSize(), 5),
        (MaxActiveWorldSize(3), 3),
        (MaxActiveWorldSize(9), 5),
        (ActiveWorldSizeDivisibleBy(), 5),
        (ActiveWorldSizeDivisibleBy(2), 4),
        (ActiveWorldSizeDivisibleBy(divisor=5), 5),
        (ActiveWorldSizeDivisibleBy(6), 0),
        (Compose(ActiveWorldSizeDivisibleBy(2), MaxActiveWorldSize(max_active_world_size=3)), 2),
    ],
)
def test_the_first_ranks_are_active(assignment: RankFilter, active: int) -> None:
    assert activate(assignment, 5) == [rank if rank < active else None for rank in range(5)]


def test_filters_respect_what_came_before_and_the_world() -> None:
    assert activate(MaxActiveWorldSize(4), 5, active_world_size=2) == [0, 1, None, None, None]
    assert activate(ActiveWorldSizeDivisibleBy(1), 3, active_world_size=7) == [0, 1, 2]


def test_a_spare_moves_up() -> None:
    job = Job(5, lambda: Compose(MaxActiveWorldSize(3), ShiftRanks()))
    job.enter()
    job.check()
    assert job.active() == {0: 0, 1: 1, 2: 2}
    job.enter(lost={1})
    job.check()
    assert job.active() == {0: 0, 2: 1, 3: 2}
    job.enter(lost={0, 4})
    job.check()
    assert job.active() == {2: 0, 3: 1}


def by_node(state: State) -> str:
    return f"node {(state.initial_rank or 0) // 2}"


def whole_nodes() -> RankAssignment:
    return Compose(
        ActivateAllRanks(), ShiftRanks(), FilterCountGroupedByKey(by_node, lambda count: count == 2)
    )


def test_filter_terminates_whole_groups() -> None:
    job = Job(8, whole_nodes)
    job.enter()
    assert not job.discarded
    job.enter(lost={1, 4, 5})
    job.check()
    assert set(job.discarded) == {0}
    assert job.ranks() == {2: 0, 3: 1, 6: 2, 7: 3}
    job.enter(lost={6})
    job.check()
    assert set(job.discarded) == {0, 7}
    assert job.ranks() == {2: 0, 3: 1}


def test_filters_one_after_the_other_count_only_who_is_left() -> None:
    seen = []

    def make() -> RankAssignment:
        return Compose(
            ActivateAllRanks(),
            FillGaps(),
            FilterCountGroupedByKey("all", lambda count: seen.append(count) or count >= 3),
            FilterCountGroupedByKey(by_node, lambda count: count == 2),
        )

    job = Job(6, make)
    job.enter()
    assert seen == [6]
    job.enter(lost={0})
    job.check()
    assert seen == [6, 4]
    assert set(job.discarded) == {1}
    job.enter(lost={2})
    assert seen == [6, 4, 2]
    assert job.states == {}


def test_a_filter_does_not_wait_for_marked_ranks() -> None:
    def refuse(client: str, operation: str, args: Sequence[Any]) -> None:
        raise DistStoreError(f"{operation} is not needed")

    ctx = ctx_of(1, 3, {1})
    ctx.store.on_operation(refuse)  # type: ignore[attr-defined]
    assert FilterCountGroupedByKey("key", bool)(ctx) is ctx
    assert ctx.terminated_ranks == {1}


def test_a_condition_that_raises_fails_on_all_ranks() -> None:
    job = Job(3, lambda: FilterCountGroupedByKey("key", lambda count: bool(count // 0)))
    outcomes = job.try_enter()
    assert len(outcomes) == 3
    for outcome in outcomes.values():
        assert isinstance(outcome, RuntimeError)
        assert "ZeroDivisionError" in str(outcome)


def test_a_filter_names_who_does_not_come() -> None:
    store = FakeStore()

    def time_out(client: str, operation: str, args: Sequence[Any]) -> None:
        if operation == "wait":
            store.clock.advance(61.0)
            raise DistStoreError("timed out")

    store.on_operation(time_out)
    ctx = RankAssignmentCtx(State(rank=1, world_size=3), store, {2})
    with pytest.raises(BarrierTimeout, match=r"FilterCountGroupedByKey.*missing ranks \[0\]"):
        FilterCountGroupedByKey("key", bool)(ctx)


@settings(deadline=None, max_examples=60)
@given(
    nodes=st.lists(st.integers(0, 2), min_size=1, max_size=8),
    lost=st.sets(st.integers(0, 7), max_size=4),
    at_least=st.integers(0, 4),
)
def test_a_group_stays_or_goes_whole_whoever_computes(
    nodes: list[int], lost: set[int], at_least: int
) -> None:
    lost &= set(range(len(nodes)))
    survivors = set(range(len(nodes))) - lost

    def play(choose: Callable[[list[int]], int]) -> dict[int, State]:
        job = Job(
            len(nodes),
            lambda: Compose(
                ActivateAllRanks(),
                FillGaps(),
                FilterCountGroupedByKey(lambda s: str(nodes[s.initial_rank or 0]), lambda c: c >= at_least),
            ),
            choose,
        )
        states = job.enter(lost)
        job.check()
        return states

    sizes = {node: sum(nodes[slot] == node for slot in survivors) for node in nodes}
    if not survivors:
        return
    states = play(min)
    assert set(states) == {slot for slot in survivors if sizes[nodes[slot]] >= at_least}
    assert states == play(max)
