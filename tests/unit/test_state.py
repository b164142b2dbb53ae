"""State: numbers that are counted, and numbers that the ranks agree on."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from ft_wrapper.exception import RestartError
from ft_wrapper.protocol import Agreement
from ft_wrapper.state import State
from ft_wrapper.testing import FakeStore, Scheduler

TIMEOUT = timedelta(seconds=60)


class Recorder:
    """Stands for a store: notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.error: Exception | None = None

    def coordinate_global_iteration_advance(self, *args: Any) -> int:
        self.asked.append(args)
        if self.error is not None:
            raise self.error
        return 7

    def handle_rank_restart(self, *args: Any, **more: Any) -> int:
        self.asked.append((*args, more))
        if self.error is not None:
            raise self.error
        return 5


def test_counts_without_global_iterations() -> None:
    store, state = Recorder(), State(rank=0, world_size=2, fn_exception=ValueError())
    state.advance()
    assert (state.iteration, state.fn_exception) == (1, None)
    state.advance(store, 2, TIMEOUT, is_coordinator=True)
    state.sync_with_global_iteration(store)
    assert state.iteration == 2 and not store.asked


def test_global_iterations_need_a_store() -> None:
    state = State(rank=0, world_size=2, use_global_iteration=True, iteration=3)
    with pytest.raises(ValueError, match="use_global_iteration=True needs store="):
        state.advance()
    assert state.iteration == 3


def test_asks_the_store() -> None:
    store = Recorder()
    state = State(rank=1, world_size=2, initial_rank=2, initial_world_size=4, use_global_iteration=True)
    state.fn_exception = ValueError()
    state.advance(store)
    assert (state.iteration, state.fn_exception) == (7, None)
    state.advance(store, 3, timedelta(0), True)
    state.sync_with_global_iteration(store, TIMEOUT)
    assert state.iteration == 5
    minutes = timedelta(minutes=2)
    assert store.asked == [(4, minutes, False), (3, timedelta(0), True), (4, TIMEOUT, {"rank": 2})]


def test_stays_as_it_was_if_the_ranks_do_not_agree() -> None:
    store, failed = Recorder(), ValueError("loss is nan")
    store.error = RestartError("no")
    state = State(rank=1, world_size=2, iteration=3, fn_exception=failed, use_global_iteration=True)
    with pytest.raises(RestartError, match="no"):
        state.advance(store)
    with pytest.raises(RestartError, match="no"):
        state.sync_with_global_iteration(store)
    assert (state.iteration, state.fn_exception) == (3, failed)


@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_have_the_same_numbers_also_one_that_restarts(seed: int) -> None:
    scheduler = Scheduler(seed)
    store = FakeStore(scheduler, use_libuv=bool(seed % 2))
    numbers: dict[str, list[int]] = {}

    def train(name: str, rank: int, until: int) -> None:
        client = store.clone(name)
        state = State(rank=rank, world_size=3, use_global_iteration=True)
        state.sync_with_global_iteration(client, TIMEOUT)
        seen = numbers.setdefault(name, [state.iteration])
        while state.iteration < until:
            if seen[-1] == 2:
                Agreement(client).ends.wait_for_end(
                    2, seconds=60.0
                )  # until the one that is missing comes back
            state.advance(client, timeout=TIMEOUT, is_coordinator=rank == 0)
            seen.append(state.iteration)

    def crash_and_come_back() -> None:
        train("rank 1", 1, until=1)
        client = store.clone("monitor 1")
        Agreement(client).ends.log_deaths(1, {Agreement(client).joining.newest_of(1): None}, ends=True)
        client.wait_for_global_iteration_ready(TIMEOUT, iteration=2)
        train("rank 1 again", 1, until=4)

    scheduler.spawn("rank 0", train, "rank 0", 0, 4)
    scheduler.spawn("rank 2", train, "rank 2", 2, 4)
    scheduler.spawn("rank 1", crash_and_come_back)
    scheduler.run()
    assert numbers == {
        "rank 0": [0, 1, 2, 3, 4],
        "rank 1": [0, 1],
        "rank 2": [0, 1, 2, 3, 4],
        "rank 1 again": [3, 4],
    }
