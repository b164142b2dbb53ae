"""Calls of torch's at the end of a function that wait for peers: freed at a limit, and named."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_harness import SETTINGS, Job, Rank, with_limits
from torch.distributed import rpc

from ft_wrapper import CallWrapper, Wrapper

#: How each is named in the restart's line.
WAITS = {
    "monitored_barrier": "monitored_barrier #",
    "save": "gather_object #",
    "async_save": "in wait, called at test_torchs_waits.py:",
    "rpc": "in wait, called at test_torchs_waits.py:",
}


def waits(rank: Rank, whats: list[str], folder: str, soft_timeout: float) -> Any:
    """In each iteration rank 0 waits, or is about to, for rank 1, which hangs, in one of some calls."""

    @Wrapper(**with_limits(**{**SETTINGS, "soft_timeout": soft_timeout, "max_same_faults": None}))
    def train(call_wrapper: CallWrapper) -> int:
        if call_wrapper.iteration == len(whats):
            return call_wrapper.iteration
        what = whats[call_wrapper.iteration]
        if what == "rpc":
            rpc.init_rpc(f"worker{rank.slot}", rank=rank.slot, world_size=2)
        else:
            dist.init_process_group("gloo")
        if rank.slot == 1:
            rank.say("ready")
            rank.hang()
        rank.hear()
        rank.say("waits")
        state = {"a": torch.ones(1)}
        if what == "monitored_barrier":
            dist.monitored_barrier(wait_all_ranks=True)
        elif what == "save":
            dcp.save(state, checkpoint_id=folder)
        elif what == "async_save":
            dcp.async_save(state, checkpoint_id=folder).result()
        else:
            rpc.shutdown()
        raise AssertionError("it did not wait")

    return train()


def test_who_waits_for_a_rank_that_hangs_is_freed_and_named(job: Job, tmp_path: Path) -> None:
    job.start(2, waits, list(WAITS), str(tmp_path), 2.5)
    for _ in WAITS:
        job.expect("ready", 1)
        job.tell("go", 0)
        job.expect("waits", 0)
    job.wait_for_end(leftovers=False)  # torch has no way to end its agent of rpc and to begin another one
    assert [job[slot].value for slot in (0, 1)] == [len(WAITS)] * 2
    logs = [line for slot in (0, 1) for line in job[slot].log.splitlines()]
    for n, what in enumerate(WAITS, start=1):
        (line,) = [line for line in logs if f"restart {n}:" in line]
        assert "rank 1 (slot 1" in line and "made no progress for soft_timeout=2.5 s" in line
        assert " in hang" in line and WAITS[what] in line


def test_who_waits_for_a_rank_that_has_died_is_freed(job: Job, tmp_path: Path) -> None:
    job.start(2, waits, ["rpc"], str(tmp_path), 20.0)
    job.expect("ready", 1)
    job.tell("go", 0)
    job.expect("waits", 0)
    job.send_signal(1, signal.SIGKILL)
    job.wait_for_end(leftovers=False)  # torch's own threads
    assert (job[0].value, job[1].code) == (1, -signal.SIGKILL)
    assert "HARD_TIMEOUT" not in job[0].log and "hard_timeout" not in job[0].log
