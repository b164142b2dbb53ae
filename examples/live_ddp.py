"""Trains through faults without losing a step: the surviving processes keep the state.

ftrun --nproc-per-node 4 --active-world-size 3 examples/live_ddp.py
"""

import os

import torch
import torch.distributed as dist

from ft_wrapper import CallWrapper, LiveState, Wrapper


def build():
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}


def batch(step):
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    return torch.randn(16, 32, generator=generator)


@Wrapper
def train(call_wrapper: CallWrapper, steps):
    dist.init_process_group("gloo")
    live = LiveState(call_wrapper, build, seed=0)
    ddp = live.data_parallel(find_unused_parameters=True)
    for step in live.steps(steps):
        live["optimizer"].zero_grad()
        loss = (ddp(batch(step)) - 1).square().mean()
        loss.backward()
        live.commit()
    with torch.no_grad():  # not the loop's loss: after a late fault no step is left to do
        return (live["model"](batch(steps)) - 1).square().mean().item()


if __name__ == "__main__":
    loss = train(100)
    if os.environ["RANK"] == "0":
        print(f"loss {loss:.6f}")
