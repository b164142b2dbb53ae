"""``LiveState.data_parallel``: the DDP object goes on where torch can give its group new peers."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_harness import SETTINGS, Job, Rank, with_limits
from torch import nn

from ft_wrapper import CallWrapper, LiveState, Wrapper

can_keep = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason=f"torch {torch.__version__} cannot give a group new peers"
)
STEPS = 5


class Sum(nn.Module):
    """Two parameters, whose gradients are what goes in; something may happen between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        self.between: Callable[[torch.Tensor], None] = lambda gradient: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first * x
        inner.register_hook(self.between)
        return inner + self.last * x


def build() -> dict[str, Any]:
    model = Sum()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.0)}


def trains(rank: Rank, faults: dict[str, str], keep: bool = True, **arguments: Any) -> list[Any]:
    """Trains through faults in the backward pass, behind the first bucket's reduction.

    Returns:
        The iteration, the number of ranks, and how many DDP objects there were in this process.
    """
    options = {"find_unused_parameters": True, "bucket_cap_mb": 1e-6, **arguments.pop("options", {})}
    seen: list[Any] = []

    @Wrapper(**with_limits(**SETTINGS, keep_groups=keep, **arguments))
    def train(call_wrapper: CallWrapper) -> list[int]:
        call_wrapper.process_group()
        live = LiveState(call_wrapper, build)
        ddp = live.data_parallel(**options)
        if not any(each() is ddp for each in seen):
            seen.append(weakref.ref(ddp))
        assert ddp.module is live["model"]
        size = dist.get_world_size()

        def fail(gradient: torch.Tensor) -> None:
            kind = faults.get(f"{call_wrapper.iteration}:{live.step}:{dist.get_rank()}")
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind is not None:
                ddp.eval()
                ddp.require_backward_grad_sync = False  # as an interrupt in no_sync() may leave it
                raise ValueError("as planned")

        for _ in live.steps(STEPS):
            live["optimizer"].zero_grad()
            assert ddp.training and ddp.module.training
            live["model"].between = fail
            ddp(torch.full((1,), dist.get_rank() + 1.0)).backward()
            for each in live["model"].parameters():
                assert each.grad == (size + 1) / 2, each.grad
            live.commit()
        live["model"].between = None  # no cycle, which the collector would not see behind a freeze
        return [call_wrapper.iteration, size, len(seen)]

    result = train()
    gc.collect()
    assert not any(each() for each in seen)
    return result


@can_keep
def test_one_object_goes_on_behind_exceptions(job: Job) -> None:
    job.start(3, trains, {"0:1:2": "raise", "1:3:0": "raise"})
    assert job.wait() == [[2, 3, 1]] * 3


@can_keep
def test_it_goes_on_with_fewer_ranks(job: Job) -> None:
    """And divides by their number, though a backward pass with more was begun."""
    job.start(3, trains, {"0:2:0": "kill"})
    assert job.wait(killed=(0,)) == [[1, 2, 1]] * 2


@can_keep
def test_it_goes_on_with_a_rank_that_has_made_its_own_now(job: Job) -> None:
    job.start(3, trains, {"0:2:1": "kill"}, active_world_size=2)
    assert job.wait(killed=(1,)) == [[1, 2, 1]] * 2


@can_keep
def test_what_lays_out_its_buckets_again_is_made_again(job: Job) -> None:
    for options in ({"find_unused_parameters": False}, {"static_graph": True}):
        job.start(2, trains, {"0:2:1": "raise"}, options=options)
        assert job.wait() == [[1, 2, 2]] * 2


def test_without_a_kept_group_it_is_made_again(job: Job) -> None:
    job.start(2, trains, {"0:2:1": "raise"}, keep=False)
    assert job.wait() == [[1, 2, 2]] * 2
