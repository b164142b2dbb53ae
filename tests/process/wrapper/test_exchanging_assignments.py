"""A rank that is lost, or stopped, while the ranks wait for each other in a rank assignment."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import psutil
import pytest
from rank_harness import SETTINGS, Job, Rank

from ft_wrapper import CallWrapper, Compose, Wrapper
from ft_wrapper.rank_assignment import (
    ActivateAllRanks,
    FilterCountGroupedByKey,
    Layer,
    RankAssignment,
    RankAssignmentCtx,
    ShiftRanks,
    Tree,
)

# Longer than what ends a rank that is stopped, shorter than the tests' timeout.
EXCHANGE_TIMEOUT = timedelta(seconds=60)


class MeetsOnTheStore(RankAssignment):
    """A user's own: each rank waits for a key of every other one."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        assert ctx.state.rank is not None and ctx.state.world_size is not None
        ctx.store.set(f"here/{ctx.state.rank}", "1")
        others = set(range(ctx.state.world_size)) - ctx.terminated_ranks
        ctx.store.wait([f"here/{rank}" for rank in sorted(others)], EXCHANGE_TIMEOUT)
        return ctx


class Stops(RankAssignment):
    """Ends or stops its process when the rank assignment of iteration 1 runs; ``host``: its monitor first."""

    def __init__(self, victim: int, how: str) -> None:
        self.victim, self.how = victim, how

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        if ctx.state.iteration == 1 and ctx.state.initial_rank == self.victim:
            for child in psutil.Process().children() if self.how == "host" else ():
                child.kill()
            os.kill(os.getpid(), signal.SIGSTOP if self.how == "stop" else signal.SIGKILL)
            time.sleep(0.1)  # a stop may come a moment later
        return ctx


ASSIGNMENTS: dict[str, Any] = {
    "tree": lambda: Tree([Layer()]),
    "filter": lambda: Compose(
        ActivateAllRanks(), ShiftRanks(), FilterCountGroupedByKey("all", bool, timedelta(seconds=12))
    ),
    "own": lambda: Compose(ActivateAllRanks(), ShiftRanks(), MeetsOnTheStore()),
}


def trains(rank: Rank, which: str, victim: int, how: str) -> list[int]:
    assignment = Compose(ASSIGNMENTS[which](), Stops(victim, how))
    settings = {**SETTINGS, "heartbeat_timeout": 2.0}
    if how == "stop":
        settings.update(soft_timeout=2.0, hard_timeout=4.0)

    @Wrapper(**settings, rank_assignment=assignment)
    def train(call_wrapper: CallWrapper) -> list[int]:
        n = call_wrapper.iteration
        rank.say("in", n=n)
        if n == 0:
            if rank.slot == 0:
                raise ValueError("the first restart")
            while True:
                call_wrapper.ping()
                time.sleep(0.02)
        return [int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])]

    return train()


@pytest.mark.parametrize(("which", "victim"), [("tree", 0), ("filter", 1), ("own", 0)])
def test_the_others_go_on_without_a_rank_that_dies_in_a_rank_assignment(
    job: Job, which: str, victim: int
) -> None:
    job.start(3, trains, which, victim, "kill")
    values = job.wait(killed=(victim,))
    assert values == [[0, 2], [1, 2]]


def test_the_others_go_on_without_a_rank_that_stops_in_a_rank_assignment(job: Job) -> None:
    job.start(3, trains, "tree", 1, "stop")
    assert job.wait(killed=(1,)) == [[0, 2], [1, 2]]


def test_the_others_go_on_without_a_host_that_is_lost_in_a_rank_assignment(job: Job) -> None:
    # Nothing reports it. Its neighbour hears no heartbeat, long before the exchange times out.
    job.start(3, trains, "own", 1, "host")
    assert job.wait(killed=(1,)) == [[0, 2], [1, 2]]
