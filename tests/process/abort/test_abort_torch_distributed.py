"""A rank stuck behind a living, hung peer is freed, and the survivors go on in a new group."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import abort_ranks
import pytest
import torch
import torch.distributed as dist
from abort_ranks import MAKING, MOST_ABORTS, ONCE, Rank, RunRanks
from support.nightly import at_night
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore


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


def new_group(rank: Rank) -> None:
    dist.new_group()


OPERATIONS: list[tuple[Callable[[Rank], None], tuple[str, ...]]] = [
    (all_reduce, ("all_reduce",)),
    (large_all_reduce, ("all_reduce",)),
    (async_work, ("async_work",)),
    (barrier, ("barrier",)),
    (recv_from_a_rank, ("recv",)),
    (subgroup, ("all_reduce",)),
    (ddp_backward, ("_engine_run_backward",)),
    (new_group, MAKING),
]


def stuck_in_each(rank: Rank) -> list[Any]:
    """The last rank hangs, in one iteration after the other; what became of the others' operations."""
    return [stuck_in(rank, n, *operation) for n, operation in enumerate(OPERATIONS)]


def stuck_in(rank: Rank, n: int, stuck: Callable[[Rank], None], where: tuple[str, ...]) -> Any:
    rank.init(2 * n)
    dist.all_reduce(torch.ones(1))
    rank.group = dist.new_group([0, 2])
    if rank.last:
        if stuck is ddp_backward:  # making it is a collective, too
            joined = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(20)])
            torch.nn.parallel.DistributedDataParallel(joined, bucket_cap_mb=0.1)
        rank.hang(n)
        abort_ranks.leave()
        return None
    if stuck is subgroup and rank.rank == 1:
        stuck, where = barrier, ("barrier",)
    rank.aborts = 0
    error = rank.freed(lambda: stuck(rank), *where, again=ONCE)
    ended = goes_on(rank, error, 2 * n + 1)
    rank.through(n)
    return ended


def goes_on(rank: Rank, error: BaseException, iteration: int) -> Any:
    """The survivors make a new group on the next iteration's store."""
    abort_ranks.leave()
    rank.init(iteration, rank.world_size - 1)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.new_group([0, 1])
    abort_ranks.leave()
    return isinstance(error, RuntimeError), rank.aborts, int(total)


def test_operations_behind_a_hung_peer_are_freed(run_ranks: RunRanks) -> None:
    ended = run_ranks(stuck_in_each, iterations=2 * len(OPERATIONS))[:2]
    for (stuck, _), *each in zip(OPERATIONS, *ended, strict=True):
        # The first to abort may free the other as well.
        assert 1 <= max(aborts for _, aborts, _ in each) <= MOST_ABORTS, stuck
        assert [(is_error, total) for is_error, _, total in each] == [(True, 2)] * 2, stuck


# ---- a peer that is lost while a group is made


class StopsAfterItsAddress(Store):
    """A store whose user has published its address when it stops for ever."""

    def __init__(self, store: Store, stop: Callable[[], object]) -> None:
        super().__init__()
        self.store, self.stop = store, stop

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.stop()


def peer_stops_after_its_address(rank: Rank) -> Any:
    return _peer_is_lost(rank, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def peer_dies_after_its_address(rank: Rank) -> Any:
    return _peer_is_lost(rank, lambda: os._exit(0))


def _peer_is_lost(rank: Rank, stop: Callable[[], object]) -> Any:
    rank.enter(0)
    if rank.last:
        store = TCPStore("127.0.0.1", rank.master_ports[0], None, False, timedelta(seconds=60))
        stopping = StopsAfterItsAddress(PrefixStore("default_pg", store), stop)
        dist.init_process_group("gloo", store=stopping, rank=rank.rank, world_size=rank.world_size)
        return None

    def joins() -> None:
        rank.init()  # returns, if this rank is the one to open the connection
        dist.all_reduce(torch.ones(1))

    return goes_on(rank, rank.freed(joins, *MAKING, "all_reduce"), 1)


@pytest.mark.parametrize(
    "body",
    [peer_stops_after_its_address, *at_night("one that stops runs always", [peer_dies_after_its_address])],
)
def test_a_peer_is_lost_between_its_address_and_its_connections(
    run_ranks: RunRanks, body: Callable[[Rank], Any]
) -> None:
    ended = run_ranks(body, lost=1)
    assert [(is_error, total) for is_error, _, total in ended] == [(True, 2)] * 2
