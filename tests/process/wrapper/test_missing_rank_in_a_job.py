"""The restart's line names the rank that did not come, in jobs that hang, on gloo and the stand-in."""

from __future__ import annotations

import os
import random

import pytest
import torch
import torch.distributed as dist
from rank_harness import SETTINGS, Job, Rank

from ft_wrapper import CallWrapper, Wrapper
from ft_wrapper.testing import blocking_backend

SIZE = 4
WHY = {
    "another group": "did not come to all_reduce #{} of group 0",
    "elsewhere": "did not come to all_reduce #{} of group 0",
    "another operation": "was in barrier instead of all_reduce #{} of group 0",
    "further": "was 1 further than the others, who were in all_reduce #{} of group 0",
}
NIGHTLY = pytest.mark.nightly("another seed runs always")
SEEDS = [0, *(pytest.param(seed, marks=NIGHTLY) for seed in [7])]


def hangs(rank: Rank, backend: str, kind: str, odd: int, begun: int) -> None:
    """After some collectives one rank does not do as the others."""
    is_odd, ones = rank.slot == odd, torch.ones(1)

    @Wrapper(**{**SETTINGS, "soft_timeout": 1.5})
    def train(call_wrapper: CallWrapper) -> None:
        if call_wrapper.iteration > 0:
            return
        if backend == "gloo":
            dist.init_process_group("gloo")
            other = dist.new_group()
        else:
            dist.init_process_group(blocking_backend(passes=begun + (is_odd and kind == "further")))
            other = dist.new_group(backend=blocking_backend())
        for _ in range(begun):
            dist.all_reduce(ones)
        if is_odd and kind == "another group":
            dist.all_reduce(ones, group=other)
        if is_odd and kind == "elsewhere":
            rank.hang()
        if is_odd and kind == "further":
            dist.broadcast(ones.clone(), src=odd, async_op=True)
        if is_odd and kind != "another group":
            dist.barrier()
        dist.all_reduce(ones)
        raise AssertionError("it never returns")

    train()


@pytest.mark.tcp_only
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("backend", ["gloo", "stand-in"])
@pytest.mark.parametrize("kind", WHY)
def test_the_line_names_the_rank_that_did_not_come(job: Job, kind: str, backend: str, seed: int) -> None:
    choose = random.Random(f"{kind} {backend} {seed}")
    odd, begun = choose.randrange(SIZE), choose.randrange(4)
    job.start(SIZE, hangs, backend, kind, odd, begun)
    job.wait()
    logs = "".join(job[slot].log for slot in range(SIZE))
    (line,) = [line for line in logs.splitlines() if "restart 1:" in line]
    who = f"restart 1: rank {odd} (slot {odd} on {os.uname().nodename} pid {job[odd].pid})"
    assert f"{who} {WHY[kind].format(begun + 1)}, " in line
    assert f" stood in all_reduce #{begun + 1} of group 0, called at test_missing_rank_in_a_job.py:" in line
