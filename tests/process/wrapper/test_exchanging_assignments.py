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
    """Stops slot 1 when the rank assignment of iteration 1 runs, or ends it, its monitor first."""

    def __init__(self, is_host_lost: bool) -> None:
        self.is_host_lost = is_host_lost

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        if ctx.state.iteration == 1 and ctx.state.initial_rank == 1:
            for child in psutil.Process().children() if self.is_host_lost else ():
                child.kill()
            os.kill(os.getpid(), signal.SIGKILL if self.is_host_lost else signal.SIGSTOP)
            time.sleep(0.1)  # a stop may come a moment later
        return ctx


def trains(rank: Rank, is_host_lost: bool) -> list[int]:
    settings = {**SETTINGS, "heartbeat_timeout": 2.0}
    assignment: Any = Compose(ActivateAllRanks(), ShiftRanks(), MeetsOnTheStore())
    if not is_host_lost:
        settings.update(soft_timeout=2.0, hard_timeout=4.0)
        assignment = Tree([Layer()])

    @Wrapper(**settings, rank_assignment=Compose(assignment, Stops(is_host_lost)))
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


@pytest.mark.parametrize("is_host_lost", [False, True])
def test_the_others_go_on_without_a_rank_that_is_lost_in_a_rank_assignment(
    job: Job, is_host_lost: bool
) -> None:
    """It is stopped in a tree's exchange; or its host is lost in a user's own, and nothing reports it.

    Then its neighbour hears no heartbeat, long before the exchange times out.
    """
    job.start(3, trains, is_host_lost)
    assert job.wait(killed=(1,)) == [[0, 2], [1, 2]]
