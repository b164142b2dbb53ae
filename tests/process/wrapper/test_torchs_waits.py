"""Calls of torch's at the end of a function that wait for peers: freed at a limit, and named."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_harness import SETTINGS, Job, Rank
from torch.distributed import rpc

from ft_wrapper import CallWrapper, Wrapper

#: How each is named in the restart's line.
WAITS = {
    "monitored_barrier": "monitored_barrier #",
    "save": "gather_object #",
    "async_save": "in wait, called at test_torchs_waits.py:",
    "rpc": "in wait, called at test_torchs_waits.py:",
}


def waits(rank: Rank, what: str, folder: str, soft_timeout: float) -> Any:
    @Wrapper(**{**SETTINGS, "soft_timeout": soft_timeout})
    def train(call_wrapper: CallWrapper) -> int:
        if call_wrapper.iteration > 0:
            return call_wrapper.iteration
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


def start(job: Job, what: str, folder: Path, soft_timeout: float) -> None:
    """Rank 0 waits, or is about to, for rank 1, which hangs."""
    job.start(2, waits, what, str(folder), soft_timeout)
    job.expect("ready", 1)
    job.tell("go", 0)
    job.expect("waits", 0)


@pytest.mark.tcp_only("they are torch's own waits")
@pytest.mark.parametrize("what", WAITS)
def test_who_waits_for_a_rank_that_hangs_is_freed_and_named(job: Job, what: str, tmp_path: Path) -> None:
    start(job, what, tmp_path, 4.0)
    job.wait_for_end(leftovers=what != "rpc")  # torch has no way to end its agent and to begin another one
    assert [job[slot].value for slot in (0, 1)] == [1, 1]
    (line,) = [line for slot in (0, 1) for line in job[slot].log.splitlines() if "restart 1:" in line]
    assert "rank 1 (slot 1" in line and "made no progress for soft_timeout=4 s" in line
    assert " in hang" in line and WAITS[what] in line


@pytest.mark.tcp_only("they are torch's own waits")
@pytest.mark.parametrize("what", WAITS)
def test_who_waits_for_a_rank_that_has_died_is_freed(job: Job, what: str, tmp_path: Path) -> None:
    start(job, what, tmp_path, 20.0)
    job.send_signal(1, signal.SIGKILL)
    job.wait_for_end(leftovers=what not in ("rpc", "async_save"))  # torch's own threads
    assert (job[0].value, job[1].code) == (1, -signal.SIGKILL)
    assert "HARD_TIMEOUT" not in job[0].log and "hard_timeout" not in job[0].log
