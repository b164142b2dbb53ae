"""A rank of a job with live state, with which something happens once.

    gpu_training_rank.py BACKEND clean|kill|assert

In step 4 of its first process rank 1 is killed, or one of its kernels has an assertion that fails. All ranks
may be on one GPU.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from gpu_ranks import DEVICE, IS_CUDA
from torch.nn.parallel import DistributedDataParallel

from ft_wrapper import CallWrapper, LiveState, Wrapper

STEPS = 10


def build() -> dict[str, Any]:
    """A model and its optimizer, on the device."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(DEVICE)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}


def batch(step: int, rank: int) -> torch.Tensor:
    """Depends on the step and the rank alone."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, 32, generator=generator).to(DEVICE)


def digest(objects: LiveState) -> str:
    """Of all bits of the weights, and of what the optimizer keeps."""
    found = hashlib.sha256()
    states = [*objects["optimizer"].state_dict()["state"].values()]
    for tensor in [*objects["model"].parameters(), *(each[name] for each in states for name in sorted(each))]:
        found.update(tensor.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def fail(how: str) -> None:
    """Has happen to this process what is to happen."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    beyond = torch.tensor([1 << 20], device=DEVICE)
    torch.zeros(4, device=DEVICE)[beyond]
    torch.cuda.synchronize()
    raise AssertionError("the kernel did not notice")


@Wrapper(use_global_iteration=True, min_world_size=2)
def train(backend: str, how: str, call_wrapper: CallWrapper) -> str:
    """Trains; returns the state's digest."""
    rank = call_wrapper.state.active_rank
    assert rank is not None
    dist.init_process_group(backend)
    live = LiveState(call_wrapper, build, seed=0)
    ddp = DistributedDataParallel(live["model"], init_sync=False)
    for step in live.steps(STEPS):
        live["optimizer"].zero_grad()
        loss = (ddp(batch(step, rank)) - 1).square().mean()
        if how != "clean" and rank == 1 and step == 4 and os.environ["FT_WRAPPER_INCARNATION"] == "0":
            fail(how)
        loss.backward()
        live.commit()
    return digest(live)


def main() -> None:
    """Trains under ftrun."""
    if IS_CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.use_deterministic_algorithms(True)
    print(f"final state {train(*sys.argv[1:])}\n", end="")


if __name__ == "__main__":
    main()
