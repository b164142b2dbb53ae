"""The same script, wrapped: it survives faults.

ftrun --nproc-per-node 2 examples/ddp_after.py FOLDER
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ft_wrapper import CallWrapper, Wrapper


@Wrapper
def train(call_wrapper: CallWrapper, path, steps):
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    begin = load(path, model, optimizer)
    ddp = DistributedDataParallel(model)
    for step in range(begin, steps):
        call_wrapper.ping()
        optimizer.zero_grad()
        loss = (ddp(batch(step)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        if (step + 1) % 20 == 0 and dist.get_rank() == 0:
            with call_wrapper.atomic():
                save(path, model, optimizer, step + 1)
    with torch.no_grad():  # not the loop's loss: after a late fault no step is left to do
        return (model(batch(steps)) - 1).square().mean().item()


def batch(step):
    """What this rank sees in a step: it depends on step and rank alone."""
    return torch.randn(
        16, 8, generator=torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    )


def load(path, model, optimizer):
    """Takes the state of the newest checkpoint, if there is one; returns the step to begin with."""
    if not os.path.exists(path):
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def save(path, model, optimizer, step):
    """Writes a checkpoint; a reader sees the old one or the new one, never a part."""
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{path}.part"
    )
    os.replace(f"{path}.part", path)


if __name__ == "__main__":
    loss = train(os.path.join(sys.argv[1], "checkpoint.pt"), 100)
    if os.environ["RANK"] == "0":
        print(f"loss {loss:.6f}")
