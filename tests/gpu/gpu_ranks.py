"""Ranks of the tests on a GPU: processes of their own, since pytest's must not have a CUDA context.

``FT_WRAPPER_TEST_DEVICE=cpu pytest tests/gpu`` runs on CPUs, with gloo, those tests that CUDA itself is not
needed for. That shows that the tests work, and nothing of a GPU.

Two ranks share a GPU where there is only one: `share_gpus`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from ft_wrapper.store import TCPStoreServer

TIMEOUT = 90.0
"""Seconds after which a wait of these tests counts as a hang."""

DEVICE = os.environ.get("FT_WRAPPER_TEST_DEVICE", "cuda")
IS_CUDA = DEVICE == "cuda"
BACKEND = "nccl" if IS_CUDA else "gloo"
GPUS = torch.cuda.device_count()  # asks NVML: is_available() would initialize CUDA in pytest's process
CYCLES_OF_A_SECOND = 2_000_000_000  # of a GPU, roughly; a slower one takes longer for them

_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
_NO_GPU = pytest.mark.skipif(IS_CUDA and not GPUS, reason="needs a GPU: there is none")
_NO_NCCL = pytest.mark.skipif(IS_CUDA and not dist.is_nccl_available(), reason="needs a torch with NCCL")

needs_gpu = [_NO_GPU, _NO_NCCL]
"""Marks of tests that one GPU is enough for; they run on CPUs, too."""
needs_cuda = pytest.mark.skipif(not IS_CUDA, reason="needs CUDA itself")
needs_new_peers = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"),
    reason=f"needs torch 2.15: torch {torch.__version__} cannot give a group new peers",
)
each_nccl = pytest.mark.parametrize(
    "nccl",
    [
        "ProcessGroupNCCL",
        pytest.param(
            "ProcessGroupNCCL2",
            marks=[
                pytest.mark.skipif(
                    _TORCH < (2, 15), reason=f"needs torch 2.15: torch {torch.__version__} has no NCCL2"
                ),
                needs_cuda,
            ],
        ),
    ],
)
"""Runs a test on both of torch's backends for NCCL: `choosing` is the environment for that."""


def choosing(nccl: str) -> dict[str, str]:
    """Variables with which ``nccl`` is this backend of torch's."""
    return {"TORCH_DIST_USE_NCCL2": "1" if nccl == "ProcessGroupNCCL2" else "0"}


def is_chosen(nccl: str, name: str) -> bool:
    """Whether the class of a backend that a rank had is the one that was chosen."""
    return not IS_CUDA or (name == "ProcessGroupNCCL") == (nccl == "ProcessGroupNCCL")


# NCCL refuses two ranks on one GPU of one host, and compares hosts by NCCL_HOSTID (2.28.9: src/init.cc:903,
# src/misc/utils.cc:87). It connects different hosts by sockets. The GPU switches between the processes whose
# kernels wait for each other: a collective takes milliseconds.
_ONE_GPU = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
    "NCCL_ALGO": "Ring",  # with Simple the fastest where processes take turns
    "NCCL_PROTO": "Simple",
}


def share_gpus(world_size: int) -> None:
    """Lets ranks share a GPU under NCCL if there are more ranks than GPUs.

    Call it in each rank before its first process group: NCCL reads the variables once.
    """
    if IS_CUDA and world_size > GPUS:
        os.environ.update(_ONE_GPU, NCCL_HOSTID=f"process {os.getpid()}")


# ---- in a rank ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rank:
    """What a body is given. The environment is that of a rank with a store for the wrapper.

    Args:
        rank: its number.
        world_size: how many there are.
        control: a store by which the ranks tell each other something.
    """

    rank: int
    world_size: int
    control: TCPStore

    def use_gpu(self) -> None:
        """Makes this rank's GPU, which it may share, the current one. Does nothing on CPUs."""
        if IS_CUDA:
            torch.cuda.set_device(self.rank % GPUS)


def total(group: dist.ProcessGroup | None = None) -> int:
    """The number of ranks, by a collective on the device."""
    tensor = torch.ones(8, device=DEVICE)
    dist.all_reduce(tensor, group=group)
    return int(tensor[0])


def backend_name() -> str:
    """The class of the default group's backend."""
    group: Any = dist.group.WORLD
    return type(group._get_backend(torch.device(DEVICE))).__name__


def settle() -> None:
    """Waits for all that is queued on the device, collectives too. Does nothing on CPUs."""
    if IS_CUDA:
        torch.cuda.synchronize()


def keep_busy(seconds: float) -> None:
    """Puts a kernel of so many seconds, roughly, before all that is queued next. Does nothing on CPUs.

    A collective of one rank never waits for a peer: behind this kernel it is pending.
    """
    if IS_CUDA:
        torch.cuda._sleep(int(seconds * CYCLES_OF_A_SECOND))  # type: ignore[no-untyped-call]


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on the device.

    Args:
        allocated: of tensors.
        reserved: held by torch.
        own: the process's by NVML; where NVML does not tell, all that is in use on the device.
    """

    allocated: int
    reserved: int
    own: int

    @classmethod
    def now(cls) -> Memory:
        """Looks; nothing on CPUs."""
        if not IS_CUDA:
            return cls(0, 0, 0)
        torch.cuda.synchronize()
        return cls(torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), _own_memory())


def _own_memory() -> int:
    free, whole = torch.cuda.mem_get_info()
    try:
        import pynvml
    except ImportError:
        return whole - free
    pynvml.nvmlInit()
    try:
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    finally:
        pynvml.nvmlShutdown()
    # In a container NVML may name other pids than the process sees, and may not tell the memory.
    own = [each.usedGpuMemory for each in processes if each.pid == os.getpid()]
    return int(own[0]) if own and own[0] is not None else whole - free


def main(fd: int) -> None:
    """All of a rank's process; at the end it waits for the test."""
    with Connection(fd) as connection:
        rank, control_port, body, arguments = connection.recv()
        share_gpus(rank.world_size)
        try:
            control = TCPStore(
                "127.0.0.1", control_port, None, False, timedelta(seconds=TIMEOUT), wait_for_workers=False
            )
            connection.send((True, body(dataclasses.replace(rank, control=control), *arguments)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        with contextlib.suppress(EOFError):
            connection.recv()


# ---- in the test --------------------------------------------------------------------------------------


def run(
    body: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
) -> list[Any]:
    """Runs a function in so many processes; returns what it returned in each.

    Args:
        body: a function of a module, called with a `Rank` and
        world_size: the number of processes.
        arguments: these.
        environment: what the processes find beside what we have.
        timeout: seconds for all of it.
    """
    deadline = time.monotonic() + timeout
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=TIMEOUT), wait_for_workers=False)
    wrappers = TCPStoreServer(0, "127.0.0.1")
    processes: list[tuple[subprocess.Popen[bytes], Connection]] = []
    try:
        for number in range(world_size):
            rank = Rank(number, world_size, control=None)  # type: ignore[arg-type]  # made there
            process, here = _start({**_as_rank(rank, wrappers.port), **(environment or {})})
            processes.append((process, here))
            here.send((rank, server.port, body, arguments))
        return [_result(number, *each, deadline) for number, each in enumerate(processes)]
    finally:
        _end(processes)
        wrappers.close()


def _start(environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], Connection]:
    here, there = Pipe()
    # Not by multiprocessing, which leaves a process and a pipe behind in pytest's.
    command = [sys.executable, "-c", f"import gpu_ranks; gpu_ranks.main({there.fileno()})"]
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with there:
        process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path, **environment}, pass_fds=[there.fileno()]
        )
    return process, here


def _end(processes: Sequence[tuple[subprocess.Popen[bytes], Connection]]) -> None:
    """Ends the ranks, then waits for what they have started: their monitors use the store until then."""
    below = []
    for process, _ in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            below += psutil.Process(process.pid).children(recursive=True)
    for process, here in processes:
        here.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    psutil.wait_procs(below, timeout=TIMEOUT)


def _as_rank(rank: Rank, store_port: int) -> dict[str, str]:
    return {
        "RANK": str(rank.rank),
        "LOCAL_RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store_port),
        "FT_WRAPPER_STORE": f"127.0.0.1:{store_port}",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for the same bits
    }


def _result(number: int, process: subprocess.Popen[bytes], here: Connection, deadline: float) -> Any:
    assert here.poll(max(0.0, deadline - time.monotonic())), f"rank {number} hangs"
    try:
        fine, result = here.recv()
    except EOFError:
        raise AssertionError(f"rank {number} ended with exit code {process.wait(TIMEOUT)}") from None
    assert fine, f"rank {number}: {result}"
    return result
