"""A rank stuck behind a living, hung peer is freed, and the survivors go on in a new group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import abort_ranks
import pytest
import torch
import torch.distributed as dist
from abort_ranks import MOST_ABORTS, ONCE, Rank, run_ranks


def all_reduce(rank: Rank) -> None:
    dist.all_reduce(torch.ones(4))


def large_all_reduce(rank: Rank) -> None:
    dist.all_reduce(torch.ones(20_000_000))


def async_work(rank: Rank) -> None:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    assert work is not None
    work.wait()


def barrier(rank: Rank) -> None:
    dist.barrier()


def recv_from_a_rank(rank: Rank) -> None:
    dist.recv(torch.ones(4), src=rank.world_size - 1)


def subgroup(rank: Rank) -> None:
    dist.all_reduce(torch.ones(4), group=rank.group)


def ddp_backward(rank: Rank) -> None:
    # Many buckets: when the first one raises, others are still in flight.
    layers = [torch.nn.Linear(100, 100) for _ in range(20)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.1)
    model(torch.ones(2, 100)).sum().backward()


def stuck_in(rank: Rank, stuck: Callable[[Rank], None], where: str) -> Any:
    rank.init()
    dist.all_reduce(torch.ones(1))
    rank.group = dist.new_group([0, 2])
    if rank.last:
        if stuck is ddp_backward:  # making it is a collective, too
            joined = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(20)])
            torch.nn.parallel.DistributedDataParallel(joined, bucket_cap_mb=0.1)
        rank.hang()
        abort_ranks.leave()
        return None
    if stuck is subgroup and rank.rank == 1:
        stuck, where = barrier, "barrier"
    error = rank.freed(lambda: stuck(rank), where, again=ONCE)
    return goes_on(rank, error)


def goes_on(rank: Rank, error: BaseException) -> Any:
    """The survivors make a new group on the next iteration's store."""
    abort_ranks.leave()
    rank.init(1, rank.world_size - 1)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.new_group([0, 1])
    abort_ranks.leave()
    rank.through()
    return type(error), rank.aborts, int(total)


class Case:
    """A picklable call of ``stuck_in``."""

    def __init__(self, stuck: Callable[[Rank], None], where: str) -> None:
        self.stuck, self.where = stuck, where

    def __call__(self, rank: Rank) -> Any:
        return stuck_in(rank, self.stuck, self.where)


@pytest.mark.parametrize(
    ("stuck", "where"),
    [
        (all_reduce, "all_reduce"),
        (large_all_reduce, "all_reduce"),
        (async_work, "async_work"),
        (barrier, "barrier"),
        (recv_from_a_rank, "recv"),
        (subgroup, "all_reduce"),
        (ddp_backward, "_engine_run_backward"),
    ],
)
def test_an_operation_behind_a_hung_peer_is_freed(stuck: Callable[[Rank], None], where: str) -> None:
    results = run_ranks(Case(stuck, where))[:2]
    # The first to abort may free the other as well.
    assert 1 <= max(aborts for _, aborts, _ in results) <= MOST_ABORTS
    for error, _, total in results:
        assert issubclass(error, RuntimeError)
        assert total == 2
