"""State: numbers that are counted, and numbers that the ranks agree on."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from ft_wrapper.exception import RestartError
from ft_wrapper.state import State
from ft_wrapper.testing import FakeStore

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


def test_the_numbers_are_those_of_a_store() -> None:
    store, state = FakeStore(), State(rank=0, world_size=1, use_global_iteration=True)
    state.sync_with_global_iteration(store, TIMEOUT)
    assert state.iteration == 0
    state.advance(store, timeout=TIMEOUT, is_coordinator=True)
    assert state.iteration == store.get_global_iteration() == 1
