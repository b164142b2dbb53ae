"""What an agent knows of its ranks: a made-up job, with the memory that ranks have."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ft_wrapper.agent.group import BOUNDS, Histogram, RankMetrics
from ft_wrapper.monitor.shared_memory import RankMemory


class Rank:
    """A rank that does what the test says, at the moments that it says."""

    def __init__(self) -> None:
        self.memory = RankMemory()
        self.memory.main_stamp = 0.0
        self.has_monitor = self.is_in_call = False

    def join(self) -> None:
        self.has_monitor = self.is_in_call = True

    def decided(self, n: int) -> None:
        self.memory.enter_iteration(n)

    def enter(self, *, active: bool = True) -> None:
        self.memory.active, self.memory.is_in_function = active, True

    def step(self, number: int, at: float) -> None:
        self.memory._step, self.memory.step_stamp = number, at


Make = Callable[[], Rank]


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    ranks: list[Rank] = []
    yield ranks
    for rank in ranks:
        rank.memory.close()


@pytest.fixture
def metrics(ranks: list[Rank]) -> RankMetrics:
    metrics = RankMetrics()
    metrics.ranks = lambda: [(rank.memory if rank.has_monitor else None, rank.is_in_call) for rank in ranks]
    return metrics


def read(metrics: RankMetrics) -> RankMetrics:
    metrics.read()
    return metrics


@pytest.fixture
def make(ranks: list[Rank]) -> Make:
    """Starts a rank's process."""

    def make() -> Rank:
        ranks.append(Rank())
        return ranks[-1]

    return make


def test_before_anything_happens() -> None:
    known = read(RankMetrics())
    assert (known.iteration, known.step, known.progress) == (None, None, None)
    assert sum(known.states.values()) == 0 and known.restarts == {}


def test_a_restart_from_start_to_end(metrics: RankMetrics, make: Make) -> None:
    trains, waits = make(), make()
    assert read(metrics).states == {"outside": 2}
    for rank in (trains, waits):
        rank.join()
    known = read(metrics)
    assert (known.states, known.iteration) == ({"waiting": 2}, None)
    for rank in (trains, waits):
        rank.decided(0)
    known = read(metrics)
    assert (known.states, known.iteration) == ({"waiting": 2}, 0)
    trains.enter()
    waits.enter(active=False)
    known = read(metrics)
    assert (known.states, known.iteration, known.step) == ({"active": 1, "spare": 1}, 0, None)
    trains.step(0, 1011.0)
    trains.step(10, 1021.0)
    known = read(metrics)
    assert (known.step, known.progress) == (10, 1021.0)
    trains.memory.leave_iteration()
    known = read(metrics)
    assert (known.states, known.step) == ({"restarting": 1, "spare": 1}, 10)
    waits.memory.leave_iteration()
    for rank in (trains, waits):
        rank.decided(1)
    known = read(metrics)
    assert (known.states, known.iteration, known.step) == ({"restarting": 2}, 1, 10)
    trains.enter()
    waits.enter(active=False)
    trains.step(6, 1024.0)  # the checkpoint's
    trains.step(8, 1026.0)
    known = read(metrics)
    assert (known.states, known.step, known.progress) == ({"active": 1, "spare": 1}, 8, 1026.0)
    trains.step(9, 1027.0)
    for rank in (trains, waits):
        rank.is_in_call = False
    known = read(metrics)
    assert (known.states, known.iteration, known.step, known.progress) == ({"outside": 2}, 1, 9, 1027.0)


def test_a_step_of_the_last_iteration_is_not_that_of_this_one(metrics: RankMetrics, make: Make) -> None:
    """A rank is back at step 3, and another one has not left the last iteration yet."""
    first, second = make(), make()
    for rank in (first, second):
        rank.join()
        rank.decided(0)
        rank.enter()
        rank.step(20, 1001.0)
    first.memory.leave_iteration()
    first.decided(1)
    assert read(metrics).step == 20
    first.enter()
    first.step(3, 1003.0)
    known = read(metrics)
    assert (known.step, known.iteration, known.progress) == (3, 1, 1003.0)


def test_an_iteration_that_a_rank_never_entered_and_the_progress_before_it(
    metrics: RankMetrics, make: Make
) -> None:
    rank = make()
    rank.join()
    rank.decided(7)
    rank.decided(8)
    assert read(metrics).states == {"restarting": 1}, "the first one has ended"
    rank.enter()
    rank.step(4, 1004.0)
    rank.memory.leave_iteration()
    rank.decided(9)
    known = read(metrics)
    assert (known.states, known.iteration, known.progress) == ({"restarting": 1}, 9, 1004.0)


def test_what_was_read_stays_when_a_process_has_gone(
    metrics: RankMetrics, ranks: list[Rank], make: Make
) -> None:
    rank = make()
    rank.join()
    rank.decided(2)
    rank.enter()
    rank.step(5, 1005.0)
    read(metrics)
    ranks.remove(rank)
    rank.memory.close()
    known = read(metrics)
    assert (known.states, known.iteration, known.step, known.progress) == ({}, 2, 5, 1005.0)
    replacement = make()
    replacement.join()
    replacement.decided(3)
    replacement.enter()
    replacement.memory.ping_stamp = 1001.0
    assert read(metrics).progress == 1005.0, "it never goes back"


def test_a_function_that_tells_no_steps(metrics: RankMetrics, make: Make) -> None:
    """Its pings are progress; without any, that its main thread runs."""
    rank = make()
    rank.join()
    rank.decided(0)
    rank.memory.main_stamp = 1001.0
    assert read(metrics).progress is None
    rank.enter(active=False)
    assert read(metrics).progress is None, "a spare makes none"
    rank.memory.active = True
    assert read(metrics).progress == 1001.0
    rank.memory.ping_stamp, rank.memory.main_stamp = 1002.0, 1003.0
    known = read(metrics)
    assert (known.progress, known.step) == (1002.0, None)


def test_restarts_and_how_long_they_took(metrics: RankMetrics) -> None:
    metrics.restarted("terminated", {"abort": 0.002, "total": 0.0025})
    metrics.restarted("terminated", {"total": 500.0, "unknown": 1.0})
    metrics.restarted("join", {"total": 0.0})
    known = read(metrics)
    assert known.restarts == {"terminated": 2, "join": 1}
    assert known.phases["total"].sum == pytest.approx(500.0025)
    counts = known.phases["total"].cumulative()
    assert (counts[0], counts[BOUNDS.index(0.0025)], counts[-2], counts[-1]) == (1, 2, 2, 3)
    assert known.phases["abort"].cumulative()[-1] == 1
    assert Histogram().cumulative() == [0] * (len(BOUNDS) + 1)
