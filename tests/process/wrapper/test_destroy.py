"""``destroy_process_group`` in the function, as the last line of most scripts has it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_harness import SETTINGS, Job, Rank
from torch.distributed import destroy_process_group  # by its name, before the call
from torch.nn.parallel import DistributedDataParallel

from ft_wrapper import CallWrapper, Limits, Wrapper

CALLS = 2
RANKS = 3


def train_once(group: Any = None) -> torch.nn.Module:
    """A model whose reducer holds the group."""
    model = DistributedDataParallel(torch.nn.Linear(64, 64), process_group=group)
    for _ in range(3):
        model(torch.randn(4, 64)).sum().backward()
    return model


def last_line() -> None:
    dist.init_process_group("gloo")
    model = train_once()  # noqa: F841  # the frame frees it behind the last line
    destroy_process_group()


def some_groups() -> None:
    dist.init_process_group("gloo")
    groups = [dist.new_group(list(range(RANKS))) for _ in range(2)]
    models = [train_once(group) for group in groups]
    destroy_process_group(groups[0])
    models.pop(0)
    dist.all_reduce(torch.ones(1))
    destroy_process_group()


def outlives_the_wait() -> None:
    """The groups' threads have ended before the model goes."""
    dist.init_process_group("gloo")
    model = train_once()
    destroy_process_group()
    for thread in threading.enumerate():
        if thread.name == "ft_wrapper: release-groups":
            thread.join(60)
    del model


def in_flight() -> None:
    dist.init_process_group("gloo")
    tensors = [torch.ones(100_000) for _ in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    destroy_process_group()
    for work, tensor in zip(works, tensors, strict=True):
        work.wait()
        assert tensor.eq(RANKS).all()


def again() -> None:
    """New groups in the same call, on the same store; one of them by its ranks' hash."""
    for _ in range(3):
        dist.init_process_group("gloo")
        group = dist.new_group(list(range(RANKS)), use_local_synchronization=True)
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        assert tensor == RANKS
        train_once()
        destroy_process_group()
        assert not dist.is_initialized()
        with pytest.raises((AssertionError, ValueError)):
            destroy_process_group()


ENDS = (last_line, some_groups, outlives_the_wait, in_flight, again)


def ends_so(rank: Rank) -> list[int]:
    code = destroy_process_group.__code__
    iterations = []

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper, end: Callable[[], None]) -> None:
        iterations.append(call_wrapper.iteration)
        end()

    for end in ENDS * CALLS:
        train(end=end)
    assert destroy_process_group.__code__ is code
    return iterations


def test_the_function_destroys_its_groups(job: Job) -> None:
    job.start(RANKS, ends_so)
    assert job.wait() == [[0] * CALLS * len(ENDS)] * RANKS  # nothing failed, and no process was ended


def fails_behind_it(rank: Rank) -> list[int]:
    """One rank fails when it has destroyed its groups, others may be about to; and they hold a model."""
    seen = []

    @Wrapper(**SETTINGS, limits=Limits(max_same_faults=None))
    def train(call_wrapper: CallWrapper) -> None:
        dist.init_process_group("gloo")
        model = train_once()  # noqa: F841
        destroy_process_group()
        seen.append(call_wrapper.iteration)
        if call_wrapper.state.active_rank == call_wrapper.iteration % RANKS and call_wrapper.iteration < 9:
            raise ValueError("behind the last line")

    train()
    gc.collect()
    return seen


def test_a_fault_behind_the_last_line(job: Job) -> None:
    job.start(RANKS, fails_behind_it)
    for seen in job.wait():
        assert seen[-1] == 9


def keeps_many(rank: Rank) -> tuple[int, int]:
    """Groups that are made and destroyed in a loop do not pile up until the function ends."""

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> tuple[int, int]:
        dist.init_process_group("gloo")
        counts = []
        for _ in range(4):
            for _ in range(5):
                group = dist.new_group(list(range(RANKS)))
                dist.all_reduce(torch.ones(1), group=group)
                destroy_process_group(group)
            for thread in threading.enumerate():
                if thread.name == "ft_wrapper: release-groups":
                    thread.join(60)
            dist.barrier()
            counts.append(len(os.listdir("/proc/self/task")))
        return counts[0], min(counts[1:])  # a thread that has been joined may be there for a moment

    return train()


def test_destroyed_groups_do_not_pile_up(job: Job) -> None:
    job.start(RANKS, keeps_many)
    for first, last in job.wait():
        assert last <= first
