"""The restart's line names the rank that did not come, in jobs that hang, on gloo and the stand-in."""

from __future__ import annotations

import os
import random

import pytest
import torch
import torch.distributed as dist
from rank_harness import SETTINGS, Job, Rank, with_limits

from ft_wrapper import CallWrapper, Wrapper
from ft_wrapper.testing import blocking_backend

SIZE = 4
WHY = {
    "another group": "did not reach all_reduce #{} of group 0",
    "elsewhere": "did not reach all_reduce #{} of group 0",
    "another operation": "was in barrier instead of all_reduce #{} of group 0",
    "further": "was 1 ahead of the other ranks, which were in all_reduce #{} of group 0",
}


def drawn(backend: str, kind: str) -> tuple[int, int]:
    """Which rank does not come, and after how many collectives."""
    choose = random.Random(f"{kind} {backend}")
    return choose.randrange(SIZE), choose.randrange(4)


def hangs(rank: Rank, backend: str) -> None:
    """In each iteration, after some collectives, one rank does not do as the others."""
    ones = torch.ones(1)

    @Wrapper(**with_limits(**{**SETTINGS, "soft_timeout": 1.5, "max_same_faults": None}))
    def train(call_wrapper: CallWrapper) -> None:
        if call_wrapper.iteration == len(WHY):
            return
        kind = [*WHY][call_wrapper.iteration]
        odd, begun = drawn(backend, kind)
        is_odd = rank.slot == odd
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


@pytest.mark.parametrize("backend", ["gloo", "stand-in"])
def test_the_line_names_the_rank_that_did_not_come(job: Job, backend: str) -> None:
    job.start(SIZE, hangs, backend)
    job.wait()
    lines = [line for slot in range(SIZE) for line in job[slot].log.splitlines()]
    for n, kind in enumerate(WHY, start=1):
        odd, begun = drawn(backend, kind)
        (line,) = [line for line in lines if f"restart {n}:" in line]
        who = f"restart {n}: rank {odd} (slot {odd} on {os.uname().nodename} pid {job[odd].pid})"
        assert f"{who} {WHY[kind].format(begun + 1)}, " in line
        place = f" stood in all_reduce #{begun + 1} of group 0, called at test_missing_rank_in_a_job.py:"
        assert place in line
