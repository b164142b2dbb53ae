"""Trains with `LiveState`; rank 1 raises once, after a stranger has had its time."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ft_wrapper import CallWrapper, LiveState, Wrapper

STEPS, FAULT = 60, 30
FOLDER = Path(sys.argv[1])


def build() -> dict[str, object]:
    model = torch.nn.Linear(8, 1)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}


@Wrapper(rejoin=True, barrier_timeout=150, soft_timeout=100, hard_timeout=120)  # a stranger is slow
def train(call_wrapper: CallWrapper) -> float:
    """Returns the last loss."""
    dist.init_process_group("gloo")
    live = LiveState(call_wrapper, build, seed=0)
    model = live.data_parallel()
    loss = torch.zeros(())
    for step in live.steps(STEPS):
        live["optimizer"].zero_grad()
        draw = torch.Generator().manual_seed(2 * step + dist.get_rank())
        loss = (model(torch.randn(16, 8, generator=draw)) - 1).square().mean()
        loss.backward()
        live.commit()
        if step == FAULT - 1 and dist.get_rank() == 1 and not (FOLDER / "failed").exists():
            (FOLDER / "half").touch()
            (FOLDER / "go_on").open().close()  # waits for the stranger
            (FOLDER / "failed").touch()
            raise RuntimeError("in the middle")
    print(f"rank {dist.get_rank()} done in iteration {call_wrapper.iteration}: {loss.item():.9f}", flush=True)
    return loss.item()


if __name__ == "__main__":
    train()
