"""Restarts of a wrapped function in one CUDA context: memory, graphs, pinned memory, time."""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import (
    BACKEND,
    DEVICE,
    IS_CUDA,
    TIMEOUT,
    Memory,
    Rank,
    backend_name,
    choosing,
    each_nccl,
    is_chosen,
    keep_busy,
    needs_cuda,
    needs_gpu,
    run,
    settle,
    total,
)
from torch.nn.parallel import DistributedDataParallel

from ft_wrapper import CallWrapper, Limits, Wrapper
from ft_wrapper.health_check import CudaHealthCheck

pytestmark = needs_gpu
RESTARTS = 200
# What a process has of the device may move a little; 200 leaks of any communicator are far more.
SLACK = 16 << 20


class Planned(Exception):
    """A fault that a test wants."""


# ---- memory -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Restarted:
    """What a rank had after many restarts.

    Args:
        memory: in each iteration, at the same place.
        kept: of what was on the device before.
        backend: its class.
    """

    memory: list[Memory]
    kept: int
    backend: str


def restarts(rank: Rank) -> Restarted:
    """Two groups, a model, a step and a fault in each iteration."""
    kept = torch.arange(1000, device=DEVICE)
    memory: list[Memory] = []
    backends: list[str] = []

    @Wrapper(limits=Limits(max_same_faults=None))
    def train(call_wrapper: CallWrapper) -> None:
        dist.init_process_group(BACKEND)
        dist.new_group([0])
        model = DistributedDataParallel(torch.nn.Linear(512, 512).to(DEVICE))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(64, 512, device=DEVICE)).square().mean().backward()
        optimizer.step()
        assert total() == 1
        memory.append(Memory.now())
        backends.append(backend_name())
        if call_wrapper.iteration < RESTARTS:
            raise Planned

    train()
    return Restarted(memory, int(kept.sum()), backends[-1])


def grown(sizes: list[int]) -> int:
    """By how many bytes the largest of the last fifty is larger than the largest soon after the start."""
    return max(sizes[-50:]) - max(sizes[10:60])


@each_nccl
@pytest.mark.timeout(900)
def test_device_memory_is_flat(nccl: str, seen: Callable[[str], None]) -> None:
    """200 restarts in one CUDA context: device memory is flat"""
    (result,) = run(restarts, 1, environment=choosing(nccl), timeout=800)
    assert len(result.memory) == RESTARTS + 1
    assert is_chosen(nccl, result.backend) and result.kept == 499500
    allocated, reserved, own = (
        grown([getattr(each, name) for each in result.memory]) for name in ("allocated", "reserved", "own")
    )
    figures = f"grown by {allocated} B allocated, {reserved} B reserved, {own / 2**20:.1f} MiB of the process"
    assert allocated <= 0 and reserved <= 0 and own <= SLACK, figures
    seen(figures if IS_CUDA else "nothing: there is no device memory")


# ---- a collective that is pending when the fault comes ---------------------------------------------------


def faults_before_it_ends(rank: Rank) -> tuple[bool, float, int]:
    """A fault while a collective waits behind a long kernel; the context is looked at before the restart."""
    fault_at, was_pending = 0.0, False

    @Wrapper(health_check=CudaHealthCheck(timeout=timedelta(seconds=TIMEOUT)))
    def train(call_wrapper: CallWrapper) -> tuple[float, int]:
        nonlocal fault_at, was_pending
        back_after = time.monotonic() - fault_at
        dist.init_process_group(BACKEND)
        result = total()
        if call_wrapper.iteration > 0:
            return back_after, result
        keep_busy(3.0)
        work = dist.all_reduce(torch.ones(8, device=DEVICE), async_op=True)
        was_pending = not work.is_completed()
        fault_at = time.monotonic()
        raise Planned

    back_after, result = train()
    return was_pending, back_after, result


@each_nccl
def test_a_fault_with_a_pending_collective(nccl: str, seen: Callable[[str], None]) -> None:
    """A fault while a collective is pending behind a kernel of some 3 s: back in the function"""
    ((was_pending, back_after, result),) = run(faults_before_it_ends, 1, environment=choosing(nccl))
    assert was_pending or not IS_CUDA, "the kernel before it was too short"
    assert result == 1
    seen(f"after {back_after:.2f} s")


# ---- groups that go while there is work in flight --------------------------------------------------------


def goes_with_work_in_flight(rank: Rank) -> list[int]:
    """Work in flight, a model, two groups, which the function destroys; then those that it leaves behind."""

    def begin() -> tuple[dist.ProcessGroup, list[torch.Tensor]]:
        dist.init_process_group(BACKEND)
        group = dist.new_group([0])
        model = DistributedDataParallel(torch.nn.Linear(512, 512).to(DEVICE), process_group=group)
        model(torch.ones(64, 512, device=DEVICE)).square().mean().backward()
        tensors = [torch.ones(1 << 20, device=DEVICE) for _ in range(10)]
        for tensor in tensors:
            dist.all_reduce(tensor, async_op=True)
        return group, tensors

    def sum_of(tensors: list[torch.Tensor]) -> int:
        return sum(int(tensor.sum()) for tensor in tensors)

    @Wrapper
    def train(call_wrapper: CallWrapper) -> tuple[int, list[torch.Tensor]]:
        group, tensors = begin()
        dist.destroy_process_group(group)
        dist.destroy_process_group()
        assert not dist.is_initialized()
        return sum_of(tensors), begin()[1]

    sums = []
    for _ in range(3):
        first, tensors = train()
        assert not dist.is_initialized()
        sums += [first, sum_of(tensors)]
    return sums


@each_nccl
def test_work_in_flight_comes_to_its_end(nccl: str, seen: Callable[[str], None]) -> None:
    """Work in flight comes to its end when the function destroys its groups, and at a normal return"""
    (sums,) = run(goes_with_work_in_flight, 1, environment=choosing(nccl))
    assert sums == [10 << 20] * 6
    seen("3 calls of 2 rounds")


# ---- CUDA graphs ----------------------------------------------------------------------------------------


def replays(rank: Rank) -> list[int]:
    """A graph that was captured before the call is replayed in each iteration."""
    given = torch.zeros(64, device=DEVICE)
    stream = torch.cuda.Stream()  # capturing wants a run before it, on another stream
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        (given * 2).sum()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = (given * 2).sum()
    results: list[int] = []

    @Wrapper(limits=Limits(max_same_faults=None))
    def train(call_wrapper: CallWrapper) -> None:
        dist.init_process_group(BACKEND)
        assert total() == 1
        given.fill_(call_wrapper.iteration + 1)
        graph.replay()
        results.append(int(made))
        if call_wrapper.iteration < 5:
            raise Planned

    train()
    return results


@needs_cuda
def test_cuda_graphs_outlive_restarts() -> None:
    """A CUDA graph captured before five restarts is replayed after each"""
    assert run(replays, 1) == [[128 * (iteration + 1) for iteration in range(6)]]


# ---- pinned memory --------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Tensors that hold their index."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= len(self):
            raise IndexError(index)
        return torch.full((64,), index)


def pins(rank: Rank) -> list[tuple[bool, int, int, int]]:
    """A pinned tensor from before the call, and a loader that pins, which a fault ends half-way.

    Returns:
        For each iteration: whether the tensor was pinned, the sum of its copy on the device, that of what was
        loaded, and how many threads of earlier loaders were left.
    """
    host = torch.arange(1 << 16)
    if IS_CUDA:
        host = host.pin_memory()
    results: list[tuple[bool, int, int, int]] = []

    @Wrapper(limits=Limits(max_same_faults=None))
    def train(call_wrapper: CallWrapper) -> None:
        threads = sum("pin_memory" in thread.name for thread in threading.enumerate())
        dist.init_process_group(BACKEND)
        copied = int(host.to(DEVICE, non_blocking=True).sum())
        loader: Any = torch.utils.data.DataLoader(Numbers(), 4, num_workers=2, pin_memory=IS_CUDA)
        loaded = 0
        for number, batch in enumerate(loader):
            assert batch.is_pinned() == IS_CUDA
            loaded += int(batch.to(DEVICE, non_blocking=True).sum())
            if number == 1 and call_wrapper.iteration < 5:
                results.append((host.is_pinned() == IS_CUDA, copied, loaded, threads))
                raise Planned
        results.append((host.is_pinned() == IS_CUDA, copied, loaded, threads))

    train()
    return results


def test_pinned_memory_outlives_restarts() -> None:
    """Pinned memory from before five restarts; a data loader that pins, ended half-way by each"""
    (results,) = run(pins, 1)
    copied, half, whole = sum(range(1 << 16)), 64 * sum(range(8)), 64 * sum(range(16))
    assert results == [(True, copied, half, 0)] * 5 + [(True, copied, whole, 0)]


# ---- time -----------------------------------------------------------------------------------------------


def comes_back(rank: Rank) -> tuple[list[float], list[float]]:
    """From a fault to the first kernel, and to the first all-reduce, both waited for; in seconds."""
    kernels: list[float] = []
    collectives: list[float] = []
    fault_at = 0.0

    @Wrapper(limits=Limits(max_same_faults=None))
    def train(call_wrapper: CallWrapper) -> None:
        nonlocal fault_at
        torch.ones(1, device=DEVICE).add_(1).item()
        kernels.append(time.monotonic() - fault_at)
        dist.init_process_group(BACKEND)
        total()
        collectives.append(time.monotonic() - fault_at)
        if call_wrapper.iteration < 20:
            fault_at = time.monotonic()
            raise Planned

    train()
    return kernels[1:], collectives[1:]


@each_nccl
def test_time_from_a_fault_to_the_first_kernel(nccl: str, seen: Callable[[str], None]) -> None:
    """From an exception to the first kernel of the next iteration, one rank, median of 20"""
    ((kernels, collectives),) = run(comes_back, 1, environment=choosing(nccl))
    assert len(kernels) == len(collectives) == 20
    kernel, collective = (1000 * statistics.median(each) for each in (kernels, collectives))
    seen(f"{kernel:.1f} ms; to the first all-reduce {collective:.1f} ms")


# ---- two ranks ------------------------------------------------------------------------------------------


def misses(rank: Rank, absent: int, how: str, pending: int) -> tuple[int, int]:
    """One rank fails or hangs while the other waits for it on the device.

    Args:
        rank: this one.
        absent: the rank that fails.
        how: ``exception`` or ``hang``.
        pending: the groups in which the other waits; 0: it waits in the first collective, which makes the
            communicator.
    """
    rank.use_gpu()

    @Wrapper(soft_timeout=5, hard_timeout=60)
    def train(call_wrapper: CallWrapper) -> tuple[int, int]:
        dist.init_process_group(BACKEND)
        groups = [dist.new_group() for _ in range(pending)]
        for group in groups:
            total(group)
        if call_wrapper.iteration > 0:
            return call_wrapper.iteration, total()
        call_wrapper.ping()
        if rank.rank == absent:
            rank.control.wait(["waits"])
            time.sleep(0.2)  # so that the other rank waits indeed; without that the test holds, too
            while how == "hang":
                time.sleep(0.01)
            raise Planned
        rank.control.set("waits", "1")
        works = [
            dist.all_reduce(torch.ones(8, device=DEVICE), group=group, async_op=True)
            for group in groups or [None]
        ]
        for work in works:
            work.wait()
        settle()
        raise AssertionError(f"rank {absent} was not there")

    result: tuple[int, int] = train()
    return result


@each_nccl
def test_a_hang_is_left_at_soft_timeout(nccl: str) -> None:
    """A rank hangs, the other waits for it in a collective: both go on after soft_timeout"""
    results = run(misses, 2, 1, "hang", 1, environment=choosing(nccl), timeout=2 * TIMEOUT)
    assert results == [(1, 2)] * 2


@each_nccl
@pytest.mark.parametrize("absent", [0, 1])
def test_a_fault_before_the_first_collective(nccl: str, absent: int) -> None:
    """A rank fails, the other waits for it to make the communicator: both go on in their processes"""
    results = run(misses, 2, absent, "exception", 0, environment=choosing(nccl), timeout=2 * TIMEOUT)
    assert results == [(1, 2)] * 2


@each_nccl
@pytest.mark.parametrize("pending", [2, 8])
def test_a_fault_while_several_groups_wait(nccl: str, pending: int) -> None:
    """A rank fails, the other waits for it in several groups at once: both go on in their processes"""
    results = run(misses, 2, 1, "exception", pending, environment=choosing(nccl), timeout=2 * TIMEOUT)
    assert results == [(1, 2)] * 2
