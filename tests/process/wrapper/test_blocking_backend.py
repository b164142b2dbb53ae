"""Restarts of ranks that are blocked where only an abort frees them, as in NCCL: on the stand-in backend."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_harness import SETTINGS, Job, Rank
from support import nccl_standin

from ft_wrapper import CallWrapper, Limits, Wrapper
from ft_wrapper.testing import BlockingGroup, OnAbort, blocking_backend


def blocks(rank: Rank, restarts: int, *kinds: OnAbort | str) -> list[int]:
    """Rank 0 blocks in a collective of the last group, and rank 1 fails, so many times."""
    backends = [blocking_backend(OnAbort(kind)) for kind in kinds]

    @Wrapper(**SETTINGS, limits=Limits(max_same_faults=None))
    def train(call_wrapper: CallWrapper) -> int:
        if call_wrapper.iteration == restarts:
            return call_wrapper.iteration
        dist.init_process_group(backends[0])
        groups = [dist.new_group(backend=name) for name in backends[1:]]
        if call_wrapper.state.rank == 1:
            raise ValueError("as planned")
        dist.all_reduce(torch.ones(1), group=([dist.group.WORLD, *groups])[-1])
        raise AssertionError("it never returns")

    iterations = train()
    gc.collect()
    return [iterations, sum(isinstance(each, BlockingGroup) for each in gc.get_objects())]


def test_many_restarts_leave_nothing(job: Job) -> None:
    job.start(2, blocks, 60, *["returns"] * 3)
    assert job.wait() == [[60, 0]] * 2


def test_aborts_of_other_kinds_free_the_rank(job: Job) -> None:
    job.start(2, blocks, 3, "is-slow", "raises", "depends", "depends")
    assert job.wait() == [[3, 0]] * 2
    assert "could not abort group" in job.ranks[0].log


def makes_a_communicator(rank: Rank, library: str) -> tuple[int, int]:
    """Rank 0 waits for a peer in making a communicator, and rank 1 fails before it comes to that."""
    backend = nccl_standin.register(nccl_standin.load(library), is_made_late=True)

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> int:
        if call_wrapper.iteration == 0:
            dist.init_process_group(backend)
            if call_wrapper.state.rank == 1:
                rank.hear()
                raise ValueError("as planned")
            rank.say("makes it")
            dist.all_reduce(torch.ones(1))
            raise AssertionError("it never returns")
        return call_wrapper.iteration

    return train(), os.getpid()


@pytest.mark.skipif(nccl_standin.COMPILER is None, reason="there is no C compiler: cc")
def test_who_makes_a_communicator_restarts_in_its_process(job: Job, tmp_path: Path) -> None:
    nccl_standin.build(tmp_path)
    job.start(2, makes_a_communicator, str(tmp_path / "standin0.so"))
    job.expect("makes it", 0)
    job.tell("fail", 1)
    assert job.wait() == [[1, rank.pid] for rank in job.ranks.values()]
