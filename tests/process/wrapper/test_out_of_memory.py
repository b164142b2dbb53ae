"""A device without memory left is a kind of fault of its own, and the process gives back what it can."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import torch
from rank_harness import SETTINGS, Job, Rank

from ft_wrapper import CallWrapper, RestartReport, Wrapper
from ft_wrapper.attribution import Interruption, InterruptionRecord, by_blame, out_of_memory

# What torch's allocator says.
CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 3 has a total capacity of 79.11 GiB of which 3.20 "
    "GiB is free. Including non-PyTorch memory, this process has 75.90 GiB memory in use. Of the allocated "
    "memory 74.00 GiB is allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to "
    "avoid fragmentation. See documentation for Memory Management"
)


def test_an_error_that_was_raised_from_it_is_one() -> None:
    error = RuntimeError("the forward pass failed")
    assert out_of_memory(error) is None
    error.__context__ = torch.OutOfMemoryError(CUDA)  # it was handled, and then something else failed
    assert out_of_memory(error) is None
    error.__cause__ = cause = torch.OutOfMemoryError(CUDA)
    assert out_of_memory(error) is cause and out_of_memory(cause) is cause
    error.__cause__ = error  # as bad as it gets
    assert out_of_memory(error) is None


def test_the_others_fail_in_its_wake() -> None:
    ranks = {0: Interruption.EXCEPTION, 1: Interruption.OUT_OF_MEMORY, 2: Interruption.SOFT_TIMEOUT}
    records = [InterruptionRecord(rank, kind) for rank, kind in ranks.items()]
    assert [record.rank for record in by_blame(records)] == [1, 2, 0]


class Model:
    """Refers to itself, as many models do: only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def runs_out(rank: Rank) -> Any:
    """Slot 1 has no memory left, then slot 0 fails otherwise; they look what is freed, and when."""
    models: list[weakref.ref[Model]] = []

    def empty_cache() -> None:
        rank.say("gave back", alive=[each() is not None for each in models])

    def on_restart(report: RestartReport) -> None:
        rank.say("report", fields=json.loads(report.to_json()))

    torch.cuda.empty_cache = empty_cache
    gc.disable()

    def step(model: Model) -> None:
        models.append(weakref.ref(model))
        raise RuntimeError("the forward pass failed") from torch.OutOfMemoryError(CUDA)

    @Wrapper(**{**SETTINGS, "on_restart": on_restart})
    def train(call_wrapper: CallWrapper) -> int:
        n = call_wrapper.iteration
        rank.say("in", n=n, faults=[(fault.rank, fault.interruption.name) for fault in call_wrapper.faults])
        if n < 2 and rank.slot == (1, 0)[n]:
            rank.hear()
            if n == 0:
                step(Model())
            raise ValueError("told to")
        return rank.hang() if n < 2 else n

    return train()


def test_it_is_a_kind_of_fault_of_its_own_and_what_it_held_is_given_back(job: Job) -> None:
    job.start(3, runs_out)
    job.expect("in", n=0)
    job.tell("run out", 1)
    job.expect("in", n=1, faults=[[1, "OUT_OF_MEMORY"]])
    job.tell("raise", 0)
    assert job.wait() == [2] * 3
    for slot in range(3):
        report = job[slot].said("report")[0]["fields"]
        assert report["interruption"] == "OUT_OF_MEMORY"
        assert report["cause"].startswith("rank 1 (slot 1 on ")
        assert report["cause"].endswith(f") raised torch.OutOfMemoryError: {CUDA}")
    [line] = [line for slot in range(3) for line in job[slot].log.splitlines() if "restart 1: " in line]
    assert f"raised torch.OutOfMemoryError: {CUDA}; no spare" in line
    # Once all of it is free. Other exceptions give nothing back, nor do other ranks.
    assert [message["alive"] for message in job[1].said("gave back")] == [[False]]
    assert not job[0].said("gave back") and not job[2].said("gave back")
