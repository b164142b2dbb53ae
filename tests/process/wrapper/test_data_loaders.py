"""A worker of a data loader that is killed is a fault at once; one that does not answer is a hang."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import time
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
        seconds: how long it takes; None if its worker kills itself then.
        received: set once the items before it have been received. Otherwise the worker may hold what the
            other one needs to send an item, or be needed to receive one.
    """

    def __init__(self, seconds: float | None, received: Any) -> None:
        self.seconds = seconds
        self.received = received

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 2:
            assert self.received.wait(TIMEOUT)
            if self.seconds is None:
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                time.sleep(self.seconds)
        return index


def loads(rank: Rank, kind: str, seconds: float | None, soft_timeout: float) -> Any:
    """Rank 2 waits for its loader, the others in a collective for rank 2."""
    if kind == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader as Loader
    else:
        from torch.utils.data import DataLoader as Loader

    @Wrapper(**{**SETTINGS, "soft_timeout": soft_timeout})
    def train(call_wrapper: CallWrapper) -> list[Any]:
        dist.init_process_group("gloo")
        if call_wrapper.iteration == 0:
            received = torch.multiprocessing.get_context("fork").Event()
            shards = Shards(seconds, received)
            batches = iter(range(4))
            if dist.get_rank() == 2:
                batches = iter(Loader(shards, batch_size=1, num_workers=2, multiprocessing_context="fork"))
            for number in range(4):
                if number == 2:
                    received.set()
                next(batches)
                dist.barrier()
        kinds = [[record.rank, record.interruption.name] for record in call_wrapper.faults]
        return [call_wrapper.iteration, os.getpid(), kinds]

    value = train()
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


def values(job: Job) -> list[Any]:
    """What the ranks returned; torch's handler for SIGCHLD stays in them."""
    job.wait_for_end(leftovers=False)
    return [job[slot].value for slot in range(3)]


@pytest.mark.parametrize("kind", LOADERS)
def test_torchs_error_for_a_killed_worker_is_a_fault_of_its_rank(job: Job, kind: str) -> None:
    job.start(3, loads, kind, None, 20.0)
    assert [value[:2] for value in values(job)] == [[1, job[slot].pid] for slot in range(3)]
    logs = "".join(job[slot].log for slot in range(3))
    says = "raised RuntimeError: DataLoader worker"
    assert re.search(rf"restart 1: rank 2 \(slot 2 on \S+ pid {job[2].pid}\) {says}", logs)
    assert "soft_timeout" not in logs


def test_a_worker_that_does_not_answer_is_a_hang_and_no_process_is_ended(job: Job) -> None:
    job.start(3, loads, "torch", 1000.0, 1.5)
    ended = values(job)
    assert [value[:2] for value in ended] == [[1, job[slot].pid] for slot in range(3)]
    assert all([2, "SOFT_TIMEOUT"] in value[2] for value in ended)
    logs = "".join(job[slot].log for slot in range(3))
    assert re.search(r"restart 1: rank 2 \(.*?\) did not reach \w+ #\d+ of group 0, ", logs)
