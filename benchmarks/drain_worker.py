"""The training of `drain.py`: two active ranks with live state, until there is a file."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from ft_wrapper import CallWrapper, LiveState, Wrapper, events

SLOT = int(os.environ["RANK"])  # which the wrapper changes


@Wrapper(rejoin=True, active_world_size=2)
def train(call_wrapper: CallWrapper = None) -> None:
    """Each rank adds its own gradients."""
    dist.init_process_group("gloo")

    def build() -> dict[str, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    live = LiveState(call_wrapper, build)
    for _ in live.steps(10**9):
        live["optimizer"].zero_grad()
        live["model"](torch.full((32, 64), 1.0 + dist.get_rank())).sum().backward()
        for parameter in live["model"].parameters():
            dist.all_reduce(parameter.grad)
        is_over = torch.tensor(float(os.path.exists(sys.argv[1])))
        dist.all_reduce(is_over)
        live.commit()
        events.emit("committed", slot=SLOT, step=live.step)
        if is_over:
            return


if __name__ == "__main__":
    train()
