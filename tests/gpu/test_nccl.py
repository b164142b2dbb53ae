"""Aborting NCCL, and starting again with the CUDA context that is there."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import TCPStore

from ft_wrapper.abort import AbortTorchDistributed, release_process_groups, wait_for_released_groups
from ft_wrapper.health_check import CudaHealthCheck
from ft_wrapper.state import FrozenState

TIMEOUT = 90.0

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False"
    ),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch built with NCCL"),
]
two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL takes one rank on each"
)


def enter(rank: int, world_size: int, ports: list[int], iteration: int) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(ports[iteration]),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    dist.init_process_group("nccl", timeout=timedelta(seconds=4 * TIMEOUT))


def total(rank: int) -> int:
    tensor = torch.ones(8, device="cuda")
    dist.all_reduce(tensor)
    return int(tensor[0])


def state(rank: int, world_size: int) -> FrozenState:
    return FrozenState(rank=rank, world_size=world_size)


def restarts_with_a_live_context(rank: int, world_size: int, ports: list[int], control: TCPStore) -> Any:
    """World of one: abort, release and a new group, again and again, in one CUDA context."""
    kept = torch.arange(1000, device="cuda")
    totals = []
    for iteration in range(len(ports)):
        enter(rank, world_size, ports, iteration)
        dist.new_group([0])
        totals.append(total(rank))
        AbortTorchDistributed()(state(rank, world_size))
        AbortTorchDistributed()(state(rank, world_size))
        release_process_groups(aborted=True)
        assert not dist.is_initialized()
        assert wait_for_released_groups(TIMEOUT)
        CudaHealthCheck(timeout=timedelta(seconds=TIMEOUT))(state(rank, world_size))
    return totals, int(kept.sum())


def work_in_flight_comes_to_its_end(rank: int, world_size: int, ports: list[int], control: TCPStore) -> Any:
    """A normal return does not abort what the GPU has not finished."""
    enter(rank, world_size, ports, 0)
    tensors = [torch.ones(1 << 22, device="cuda") for _ in range(20)]
    for tensor in tensors:
        dist.all_reduce(tensor)
    release_process_groups()
    assert wait_for_released_groups(TIMEOUT)
    return [int(tensor.sum()) for tensor in tensors]


def stuck_behind_a_peer(rank: int, world_size: int, ports: list[int], control: TCPStore) -> Any:
    """Rank 0 waits for a collective that rank 1 never enters; the abort frees it, both start again."""
    torch.cuda.set_device(rank)
    enter(rank, world_size, ports, 0)
    totals = [total(rank)]
    if rank == 1:
        control.wait(["freed"])
    else:
        begun = threading.Event()

        def abort() -> None:
            begun.wait()
            AbortTorchDistributed()(state(rank, world_size))

        thread = threading.Thread(target=abort)
        thread.start()
        try:
            dist.all_reduce(torch.ones(8, device="cuda"))
            begun.set()
            torch.cuda.synchronize()  # waits for NCCL's kernel, which waits for the peer
        except RuntimeError:
            pass  # torch may say that the communicator was aborted
        thread.join()
        control.set("freed", "1")
    AbortTorchDistributed()(state(rank, world_size))
    release_process_groups(aborted=True)
    CudaHealthCheck(timeout=timedelta(seconds=TIMEOUT))(state(rank, world_size))
    enter(rank, world_size, ports, 1)
    totals.append(total(rank))
    release_process_groups()
    assert wait_for_released_groups(TIMEOUT)
    return totals


def init_waits_for_a_peer(rank: int, world_size: int, ports: list[int], control: TCPStore) -> Any:
    """Rank 0's first collective waits for rank 1 in the store, to make the communicator."""
    torch.cuda.set_device(rank)
    enter(rank, world_size, ports, 0)
    if rank == 0:
        control.wait(["freed"])
    else:
        begun = threading.Event()

        def abort() -> None:
            begun.wait()
            while not freed.is_set():
                AbortTorchDistributed()(state(rank, world_size))
                freed.wait(0.5)

        freed = threading.Event()
        thread = threading.Thread(target=abort)
        thread.start()
        begun.set()
        with pytest.raises(RuntimeError):
            total(rank)
        freed.set()
        thread.join()
        control.set("freed", "1")
    release_process_groups(aborted=True)
    enter(rank, world_size, ports, 1)
    result = total(rank)
    release_process_groups()
    assert wait_for_released_groups(TIMEOUT)
    return result


def main(
    rank: int,
    connection: Any,
    body: Callable[[int, int, list[int], TCPStore], Any],
    world_size: int,
    ports: list[int],
) -> None:
    try:
        control = TCPStore(
            "127.0.0.1", ports[0], None, False, timedelta(seconds=TIMEOUT), wait_for_workers=False
        )
        connection.send((True, body(rank, world_size, ports[1:], control)))
    except BaseException:
        connection.send((False, traceback.format_exc()))


def run(
    body: Callable[[int, int, list[int], TCPStore], Any], world_size: int, iterations: int = 2
) -> list[Any]:
    """Runs a function in so many processes of their own: this one must not have a CUDA context."""
    context = mp.get_context("spawn")
    servers = [
        TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=TIMEOUT), wait_for_workers=False)
        for _ in range(iterations + 1)
    ]
    ranks = []
    try:
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            ports = [server.port for server in servers]
            process = context.Process(target=main, args=(rank, there, body, world_size, ports))
            process.start()
            there.close()
            ranks.append((process, here))
        results = []
        for rank, (_, here) in enumerate(ranks):
            assert here.poll(TIMEOUT), f"rank {rank} hangs"
            fine, result = here.recv()
            assert fine, f"rank {rank}: {result}"
            results.append(result)
        return results
    finally:
        for process, here in ranks:
            here.close()
            process.join(5)
            process.kill()
            process.join()


def test_restart_with_a_live_cuda_context() -> None:
    assert run(restarts_with_a_live_context, 1, iterations=4) == [([1] * 4, 499500)]


def test_a_normal_return_finishes_what_is_in_flight() -> None:
    assert run(work_in_flight_comes_to_its_end, 1) == [[1 << 22] * 20]


@two_gpus
def test_a_stuck_collective_is_freed() -> None:
    assert run(stuck_behind_a_peer, 2) == [[2, 2], [2, 2]]


@two_gpus
def test_a_communicator_being_made_is_freed() -> None:
    assert run(init_waits_for_a_peer, 2) == [2, 2]
