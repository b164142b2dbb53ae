"""A worker of a data loader that is slow is no hang; one that is dead, or stopped, is a fault at once."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.data
from rank_harness import SETTINGS, Job, Rank

from ft_wrapper import CallWrapper, Wrapper

NEEDS_TORCHDATA = pytest.mark.skipif(
    importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed: pip install torchdata"
)
TIMEOUT = 60.0
LOADERS = ["torch", pytest.param("torchdata", marks=NEEDS_TORCHDATA)]


class Shards(torch.utils.data.Dataset[int]):
    """Its third item takes its time, in a worker.

    Args:
        does: what the worker does then: ``sleep`` for some seconds, or ``stop``, ``kill`` or ``exit`` itself.
        seconds: how long it sleeps.
        received: set once the items before it have been received. Otherwise the worker may hold what the
            other one needs to send an item, or be needed to receive one.
    """

    def __init__(self, does: str, seconds: float, received: Any) -> None:
        self.does = does
        self.seconds = seconds
        self.received = received

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 2:
            self.read_shard()
        return index

    def read_shard(self) -> None:
        assert self.received.wait(TIMEOUT)
        if self.does == "exit":
            os._exit(0)
        if self.does in ("stop", "kill"):
            os.kill(os.getpid(), {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}[self.does])
        time.sleep(self.seconds)


def loader(kind: str, data: Shards, start_method: str) -> Any:
    if kind == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader as Loader
    else:
        from torch.utils.data import DataLoader as Loader
    return Loader(data, batch_size=1, num_workers=2, multiprocessing_context=start_method)


def loads(
    rank: Rank,
    settings: dict[str, float],
    kind: str,
    does: str,
    seconds: float,
    pings: bool,
    method: str = "fork",
) -> Any:
    """Rank 2 waits for its loader, the others in a collective for rank 2."""
    torch.multiprocessing.set_forkserver_preload([__name__])  # type: ignore[attr-defined]

    @Wrapper(**{**SETTINGS, **settings})
    def train(call_wrapper: CallWrapper) -> list[Any]:
        dist.init_process_group("gloo")
        if call_wrapper.iteration == 0:
            received = torch.multiprocessing.get_context(method).Event()
            shards = Shards(does, seconds, received)
            batches = loader(kind, shards, method) if dist.get_rank() == 2 else range(4)
            rank.say("in")
            for number, _ in enumerate(batches):
                if number == 1:
                    received.set()
                if pings:
                    call_wrapper.ping()
                dist.barrier()
        kinds = [[record.rank, record.interruption.name] for record in call_wrapper.faults]
        return [call_wrapper.iteration, os.getpid(), kinds]

    value = train()
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


def values(job: Job) -> list[Any]:
    """What the ranks returned; torch's handler for SIGCHLD and multiprocessing's server stay in them."""
    job.wait_for_end(leftovers=False)
    return [job[slot].value for slot in range(3)]


SOON = {"soft_timeout": 3.0}
LINE = r"rank 2 waits for its loader's worker \d+, which stands in read_shard \(test_slow_loaders.py:\d+\)"


@pytest.mark.parametrize("pings", [True, False])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_slow_worker_is_no_hang(job: Job, kind: str, pings: bool) -> None:
    job.start(3, loads, SOON, kind, "sleep", 8.0, pings)
    assert [value[0] for value in values(job)] == [0, 0, 0]
    assert len(re.findall(LINE, job[2].log)) == 1
    assert "waits for its loader's" not in job[0].log


@pytest.mark.tcp_only("the store has no part in it")
def test_a_worker_that_cannot_be_asked_is_named(job: Job) -> None:
    job.start(3, loads, SOON, "torch", "sleep", 8.0, True, method="forkserver")
    assert [value[0] for value in values(job)] == [0, 0, 0]
    assert re.search(r"rank 2 waits for its loader's worker \d+$", job[2].log, re.MULTILINE)


@pytest.mark.parametrize("pings", [True, False])
def test_a_worker_that_never_answers_ends_the_iteration_at_the_hard_timeout(job: Job, pings: bool) -> None:
    job.start(3, loads, {"soft_timeout": 2.0, "hard_timeout": 6.0}, "torch", "sleep", 1000.0, pings)
    assert [value[:2] for value in values(job)] == [
        [1, job[slot].pid] for slot in range(3)
    ]  # no process was ended
    lines = "".join(
        re.findall("^.*restart 1: .*$", "".join(job[slot].log for slot in range(3)), re.MULTILINE)
    )
    assert "made no progress for hard_timeout=6 s" in lines
    assert re.search(r"rank 2 \(.*?\) did not come to \w+ #\d+ of group 0, ", lines)
    assert re.search(r"waited for its loader's worker \d+, which stood in read_shard \(test_slow_lo", lines)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(
    ("does", "method", "says"),
    [
        ("stop", "fork", r"waited for its loader's worker \d+, which is stopped by a signal"),
        pytest.param(
            *("stop", "forkserver", r"waited for its loader's worker \d+, which is stopped by a signal"),
            marks=pytest.mark.nightly("a slow one that another process started is named in every run"),
        ),
        ("exit", "fork", r"waited for its loader's worker \d+, which is dead"),
        pytest.param(
            *("kill", "forkserver", r"waited for its loader's worker \d+, which is dead"),
            marks=pytest.mark.nightly("one that the rank forked is killed in every run"),
        ),
        ("kill", "fork", "raised RuntimeError: DataLoader worker"),
    ],
)
@pytest.mark.tcp_only("the store has no part in it")
def test_a_dead_or_stopped_worker_is_a_fault(job: Job, kind: str, does: str, method: str, says: str) -> None:
    job.start(3, loads, {}, kind, does, 1000.0, True, method=method)
    assert [value[0] for value in values(job)] == [1, 1, 1]
    logs = "".join(job[slot].log for slot in range(3))
    assert re.search(rf"restart 1: rank 2 \(slot 2 on \S+ pid {job[2].pid}\) {says}", logs)
    assert "soft_timeout" not in logs


def test_torch_has_what_is_looked_at() -> None:
    source = Path(torch.utils.data.dataloader.__file__).read_text()
    for name in ("_task_info", "_rcvd_idx", "_in_order", "def _get_data", "def _try_get_data", "_workers"):
        assert name in source
