"""A rank is freed while it makes a process group that a peer does not join."""

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
from abort_ranks import MAKING, MOST_ABORTS, ONCE, Rank, run_ranks
from test_abort_torch_distributed import goes_on
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore


def init_waits_for_a_peer(rank: Rank) -> Any:
    rank.enter(0)
    if rank.last:
        rank.hang()
        return None
    return goes_on(rank, rank.freed(rank.init, *MAKING, again=ONCE))


def new_group_waits_for_a_peer(rank: Rank) -> Any:
    rank.init()
    dist.all_reduce(torch.ones(1))
    if rank.last:
        rank.hang()
        abort_ranks.leave()
        return None
    return goes_on(rank, rank.freed(dist.new_group, *MAKING, again=ONCE))


class StopsAfterItsAddress(Store):
    """A store whose user has published its address when it stops for ever."""

    def __init__(self, store: Store, stop: Callable[[], object]) -> None:
        super().__init__()
        self.store, self.stop = store, stop

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.stop()


def peer_hangs_after_its_address(rank: Rank) -> Any:
    return _peer_is_lost(rank, rank.hang)


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

    return goes_on(rank, rank.freed(joins, *MAKING, "all_reduce"))


@pytest.mark.parametrize("body", [init_waits_for_a_peer, new_group_waits_for_a_peer])
def test_a_group_that_a_peer_does_not_join(body: Callable[[Rank], Any]) -> None:
    for error, aborts, total in run_ranks(body)[:2]:
        assert issubclass(error, RuntimeError)
        assert 1 <= aborts <= MOST_ABORTS and total == 2


@pytest.mark.parametrize(
    "body", [peer_hangs_after_its_address, peer_stops_after_its_address, peer_dies_after_its_address]
)
def test_a_peer_is_lost_between_its_address_and_its_connections(body: Callable[[Rank], Any]) -> None:
    for error, _, total in run_ranks(body, lost=1):
        assert issubclass(error, RuntimeError)
        assert total == 2
