"""Process groups that are given new peers at a restart, where torch can; elsewhere they are made again."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_harness import SETTINGS, Job, Rank, with_limits

from ft_wrapper import CallWrapper, Limits, Wrapper

can_keep = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason=f"torch {torch.__version__} cannot give a group new peers"
)
MAKES_AGAIN = "process groups are made again in each iteration"


def total(group: Any = None) -> int:
    tensor = torch.ones(1) * (dist.get_rank(group) + 1)
    dist.all_reduce(tensor, group=group)
    return int(tensor)


def reduces(rank: Rank, restarts: int, kills: int, **settings: Any) -> list[int]:
    """Fails on each rank in turn, in a collective of others; slot 0 is killed in an iteration.

    Returns:
        The iteration, the ranks, and how many groups there were in this process.
    """
    groups: list[Any] = []  # held, or a new one might get an old one's address

    @Wrapper(**with_limits(**{**SETTINGS, **settings}, max_same_faults=None))
    def train(call_wrapper: CallWrapper) -> list[int]:
        group = call_wrapper.process_group()
        if not any(group is each for each in groups):
            groups.append(group)
        iteration, size = call_wrapper.iteration, dist.get_world_size()
        assert dist.get_rank() == call_wrapper.state.active_rank
        expected = size * (size + 1) // 2
        assert total() == expected
        others = dist.new_group(list(range(size)))
        assert total(others) == expected
        if iteration == restarts:
            return [iteration, size, len(groups)]
        if iteration == kills and rank.slot == 0:
            with rank.collective:
                dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        if iteration == kills:
            with rank.collective:
                dist.barrier()
            rank.train()
        if dist.get_rank() == iteration % size:
            raise ValueError("as planned")
        while True:
            total(others)

    result = train()
    assert not dist.is_initialized()
    groups.clear()
    gc.collect()
    return result


@pytest.mark.skipif(hasattr(dist, "_reconfigure"), reason="this torch can keep them")
def test_where_torch_cannot_keep_them_the_log_says_so_once(job: Job) -> None:
    job.start(2, reduces, 3, -1, keep_groups=True)
    assert job.wait() == [[3, 2, 4]] * 2
    assert job[0].log.count(MAKES_AGAIN) == 1
    assert "2.15 can" in job[0].log


@can_keep
def test_one_group_gets_new_peers(job: Job) -> None:
    job.start(3, reduces, 7, -1, keep_groups=True)
    assert job.wait() == [[7, 3, 1]] * 3


@can_keep
def test_a_group_outlives_the_first_iterations_rank_0(job: Job) -> None:
    job.start(3, reduces, 4, 0, keep_groups=True)
    assert job.wait(killed=(0,)) == [[4, 2, 1]] * 2


def asks(rank: Rank, how: str) -> str:
    @Wrapper(**SETTINGS, limits=Limits(keep_groups=True))
    def train(call_wrapper: CallWrapper) -> str:
        try:
            if how == "own":
                call_wrapper.process_group(rank=3)
            else:
                call_wrapper.process_group("gloo")
                call_wrapper.process_group("gloo", group_desc="another")
        except TypeError as error:
            said = str(error)
        if how == "own":
            dist.init_process_group("gloo")
            assert call_wrapper.process_group() is dist.group.WORLD
        return said

    return train()


def test_the_wrapper_chooses_ranks_and_a_group_of_the_users_own_is_used(job: Job) -> None:
    job.start(1, asks, "own")
    (said,) = job.wait()
    assert said.startswith("process_group(rank=…): the wrapper chooses store, rank, world_size")
    assert "that group is used, and is not kept over a restart" in job[0].log


@can_keep
def test_another_group_than_the_kept_one(job: Job) -> None:
    job.start(1, asks, "another")
    (said,) = job.wait()
    assert "pass the same in each iteration" in said
