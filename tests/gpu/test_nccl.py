"""Aborting NCCL, and starting again with the CUDA context that is there: without the wrapper."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import (
    DEVICE,
    IS_CUDA,
    TIMEOUT,
    Rank,
    backend_name,
    choosing,
    each_nccl,
    is_chosen,
    keep_busy,
    needs_gpu,
    run,
    settle,
    total,
)

pytestmark = needs_gpu
PENDING = 3.0  # seconds, roughly
STUCK = 1.0  # seconds until the abort of a collective that waits for a peer


def restarts_with_a_live_context(rank: Rank) -> tuple[list[int], int]:
    """World of one: abort, release and a new group, again and again, in one CUDA context."""
    kept = torch.arange(1000, device=DEVICE)
    totals = []
    for iteration in range(len(rank.ports)):
        rank.enter(iteration)
        dist.new_group([0])
        totals.append(total())
        rank.abort()
        rank.abort()
        rank.release(aborted=True)
        rank.check()
    return totals, int(kept.sum())


def work_in_flight_comes_to_its_end(rank: Rank) -> list[int]:
    """A normal return does not abort what the GPU has not finished."""
    rank.enter(0)
    tensors = [torch.ones(1 << 22, device=DEVICE) for _ in range(20)]
    for tensor in tensors:
        dist.all_reduce(tensor)
    rank.release(aborted=False)
    return [int(tensor.sum()) for tensor in tensors]


@dataclasses.dataclass(frozen=True)
class Aborted:
    """What came of an abort.

    Args:
        was_pending: whether the collective had not ended when the abort began.
        seconds: that the abort took.
        seconds_of_device: from there until the device had finished all that was queued.
        totals: before it, and with the group after it.
        kept: of what was on the device before.
        backend: its class.
    """

    was_pending: bool
    seconds: float
    seconds_of_device: float
    totals: list[int]
    kept: int
    backend: str


def aborts_what_is_pending(rank: Rank) -> Aborted:
    """Aborts a collective that is queued behind a long kernel."""
    rank.enter(0)
    totals, backend = [total()], backend_name()
    kept = torch.arange(1000, device=DEVICE)
    tensor = torch.ones(8, device=DEVICE)
    keep_busy(PENDING)
    work = dist.all_reduce(tensor, async_op=True)
    was_pending = not work.is_completed()
    began = time.monotonic()
    rank.abort()
    aborted = time.monotonic()
    del work
    rank.check()
    checked = time.monotonic()
    rank.release(aborted=True)
    rank.enter(1)
    totals.append(total())
    rank.release(aborted=False)
    return Aborted(was_pending, aborted - began, checked - aborted, totals, int(kept.sum()), backend)


def stuck_behind_a_peer(rank: Rank) -> list[int]:
    """Rank 0 waits for a collective that rank 1 never enters; the abort frees it, both start again."""
    rank.use_gpu()
    rank.enter(0)
    totals = [total()]
    if rank.rank == 1:
        rank.control.wait(["freed"])
    else:
        work = dist.all_reduce(torch.ones(8, device=DEVICE), async_op=True)
        assert not work.is_completed()
        thread = threading.Timer(STUCK, rank.abort)
        thread.start()
        with contextlib.suppress(RuntimeError):  # torch may say that the communicator was aborted
            work.wait()
            settle()  # waits for NCCL's kernel, which waits for the peer
        thread.join()
        del work
        rank.control.set("freed", "1")
    rank.abort()
    rank.release(aborted=True)
    rank.check()
    rank.enter(1)
    totals.append(total())
    rank.release(aborted=False)
    return totals


def init_waits_for_a_peer(rank: Rank) -> int:
    """Rank 1's first collective waits for rank 0 in the store, to make the communicator."""
    rank.use_gpu()
    rank.enter(0)
    if rank.rank == 0:
        rank.control.wait(["freed"])
    else:
        freed = threading.Event()

        def abort() -> None:
            while not freed.wait(0.5):  # the first may come too early
                rank.abort()

        thread = threading.Thread(target=abort)
        thread.start()
        try:
            with pytest.raises(RuntimeError):
                total()
        finally:
            freed.set()
            thread.join()
        rank.control.set("freed", "1")
    rank.release(aborted=True)
    rank.enter(1)
    result = total()
    rank.release(aborted=False)
    return result


@each_nccl
def test_restart_with_a_live_cuda_context(nccl: str) -> None:
    """Abort, release and a new group, four times in one CUDA context"""
    results = run(restarts_with_a_live_context, 1, iterations=4, environment=choosing(nccl))
    assert results == [([1] * 4, 499500)]


@each_nccl
def test_a_normal_return_finishes_what_is_in_flight(nccl: str) -> None:
    """Collectives in flight come to their end at a normal return"""
    assert run(work_in_flight_comes_to_its_end, 1, environment=choosing(nccl)) == [[1 << 22] * 20]


@each_nccl
def test_a_pending_collective_is_aborted(nccl: str, seen: Callable[[str], None]) -> None:
    """A pending collective is aborted, and the context works"""
    (result,) = run(aborts_what_is_pending, 1, environment=choosing(nccl))
    assert is_chosen(nccl, result.backend), result
    assert result.was_pending or not IS_CUDA, f"the kernel before it was too short: {result}"
    assert (result.totals, result.kept) == ([1, 1], 499500)
    seen(
        f"{result.backend}: the abort took {result.seconds * 1000:.1f} ms, "
        f"the device {result.seconds_of_device:.1f} s more"
    )


@each_nccl
def test_a_stuck_collective_is_freed(nccl: str) -> None:
    """A collective that waits for a peer is freed"""
    assert run(stuck_behind_a_peer, 2, environment=choosing(nccl), timeout=2 * TIMEOUT) == [[2, 2]] * 2


@each_nccl
def test_a_communicator_being_made_is_freed(nccl: str) -> None:
    """A rank that waits for a peer to make the communicator is freed"""
    assert run(init_waits_for_a_peer, 2, environment=choosing(nccl), timeout=2 * TIMEOUT) == [2, 2]
