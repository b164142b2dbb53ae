"""Ranks for the tests of abort: real processes with real gloo groups."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import rank_harness
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from ft_wrapper.abort import AbortTorchDistributed, release_process_groups, wait_for_released_groups
from ft_wrapper.state import FrozenState
from ft_wrapper.store import TCPStoreServer

TIMEOUT = 120.0
"""Seconds after which a wait of these tests counts as a hang."""

MOST_ABORTS = 1 if torch.torch_version.TorchVersion(torch.__version__) >= "2.13" else 3
"""So many free a rank that waits in gloo; the wrapper aborts again while a rank has not left."""

MAKING = ("_new_process_group_helper", "_create_gloo_process_group")
"""Names of the functions of torch, before 2.15 and since, in which a group's addresses are exchanged."""

ONCE = 30.0
"""Seconds before another abort where one must do, however busy the machine is."""


@dataclasses.dataclass
class Rank:
    """What a rank of a test is given."""

    rank: int
    world_size: int
    master_ports: list[int]
    control_port: int
    aborts: int = 0
    group: Any = None

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        self.control = self.connect()

    def connect(self) -> TCPStore:
        """Another client of the store that the ranks have in common."""
        limit = timedelta(seconds=TIMEOUT)
        return TCPStore("127.0.0.1", self.control_port, None, False, limit, wait_for_workers=False)

    @property
    def last(self) -> bool:
        """Whether this is the rank that hangs."""
        return self.rank == self.world_size - 1

    def enter(self, iteration: int, world_size: int | None = None) -> None:
        """Sets the environment as the wrapper does before the function is entered."""
        os.environ["MASTER_PORT"] = str(self.master_ports[iteration])
        os.environ["RANK"] = str(self.rank)
        os.environ["WORLD_SIZE"] = str(world_size or self.world_size)

    def init(self, iteration: int = 0, world_size: int | None = None) -> None:
        self.enter(iteration, world_size)
        dist.init_process_group("gloo", timeout=timedelta(seconds=4 * TIMEOUT))

    def hang(self, n: int = 0) -> None:
        """Waits, for the n-th time, until the others are done."""
        self.control.wait([f"through {n}"])

    def through(self, n: int = 0) -> None:
        if self.control.add(f"count {n}", 1) == self.world_size - 1:
            self.control.set(f"through {n}", "1")

    def all_have_left(self, iteration: int) -> None:
        """Waits until every rank has called it."""
        if self.control.add(f"left {iteration}", 1) == self.world_size:
            self.control.set(f"all left {iteration}", "1")
        self.control.wait([f"all left {iteration}"])

    def freed(self, stuck: Callable[[], object], *where: str, again: float = 0.5) -> BaseException:
        """Calls something that never returns by itself, and aborts once it is stuck.

        Args:
            stuck: what to call.
            where: names of the innermost Python functions that it may get stuck in.
            again: seconds after which, still inside, it is aborted once more.

        Returns:
            What it raised.
        """
        left = threading.Event()
        main = threading.get_ident(), threading.get_native_id()
        thread = threading.Thread(target=self._abort_until, args=(left, *main, where, again))
        thread.start()
        try:
            stuck()
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            return error.with_traceback(None)
        finally:
            left.set()
            thread.join()
        raise AssertionError("it returned, so it was not stuck")

    def _abort_until(
        self, left: threading.Event, ident: int, native: int, where: tuple[str, ...], again: float
    ) -> None:
        wait_until_stuck(ident, native, where, left)
        abort = AbortTorchDistributed()
        while not left.is_set():
            abort(FrozenState(rank=self.rank, world_size=self.world_size))
            self.aborts += 1
            left.wait(again)


def wait_until_stuck(ident: int, native: int, where: tuple[str, ...], give_up: threading.Event) -> None:
    """Waits until a thread is in a Python function and has slept there for a while."""
    before = None
    while not give_up.is_set():
        frame = sys._current_frames().get(ident)
        with open(f"/proc/self/task/{native}/stat") as stat:
            sleeps = stat.read().rpartition(")")[2].split()[0] == "S"
        now = id(frame) if frame is not None and frame.f_code.co_name in where and sleeps else None
        if now is not None and now == before:
            return
        before = now
        give_up.wait(0.05)


def fds() -> dict[str, str]:
    """This process's open files."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def leave() -> None:
    """What the wrapper does once an interrupted function has left."""
    release_process_groups(aborted=True)
    c10d = dist.distributed_c10d
    assert not dist.is_initialized()
    assert c10d._world.group_count == 0
    assert not c10d._world.pg_map


def run(rank: rank_harness.Rank, module: str, name: str, world_size: int, ports: list[int]) -> Any:
    """What a rank process runs: a function of a test file, which is given a `Rank`."""
    body = getattr(importlib.import_module(module), name)
    result = body(Rank(rank.slot, world_size, ports[1:], ports[0]))
    if not wait_for_released_groups(TIMEOUT):
        raise AssertionError("groups were not released")
    return result


class RunRanks:
    """Runs a function in rank processes.

    Args:
        job: of which the processes are.
        owned: closes the stores.
    """

    def __init__(self, job: rank_harness.Job, owned: contextlib.ExitStack) -> None:
        self.job, self.owned = job, owned

    def __call__(
        self, body: Callable[[Rank], object], world_size: int = 3, iterations: int = 2, lost: int = 0
    ) -> list[Any]:
        """Runs it in so many processes, each with a `Rank`.

        Args:
            body: what each rank does.
            world_size: how many ranks.
            iterations: how many stores there are for ``Rank.enter``.
            lost: so many of the last ranks give no answer, and are killed in the end.

        Returns:
            What each of the others returned, read from JSON.
        """
        servers = [TCPStoreServer(0, "127.0.0.1") for _ in range(iterations + 1)]
        for server in servers:
            self.owned.callback(server.close)
        ports = [server.port for server in servers]
        self.job.start(world_size, run, body.__module__, body.__name__, world_size, ports)
        answering = range(world_size - lost)
        self.job.wait_for_end(*answering, leftovers=False)
        return [self.job[slot].value for slot in answering]
