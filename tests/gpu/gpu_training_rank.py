"""A rank of a job with live state, with which something happens once.

    gpu_training_rank.py BACKEND clean|exception|kill|hang|assert STEP

Rank 1 fails in that step; in -1 before its group's first collective, while the other rank makes the
communicator. All ranks may be on one GPU.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from gpu_ranks import DEVICE, IS_CUDA, share_gpus
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
    """Makes this process fail."""
    time.sleep(0.2)  # so that the other rank waits in a collective; without that the test holds, too
    if how == "exception":
        raise RuntimeError("a fault that a test wants")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while how == "hang":
        time.sleep(0.01)
    beyond = torch.tensor([1 << 20], device=DEVICE)
    torch.zeros(4, device=DEVICE)[beyond]
    torch.cuda.synchronize()
    raise AssertionError("the kernel did not notice")


@Wrapper(rejoin=True, min_world_size=2, soft_timeout=5, hard_timeout=60)
def train(backend: str, how: str, at: int, call_wrapper: CallWrapper) -> str:
    """Trains; returns the state's digest."""
    rank = call_wrapper.state.active_rank
    assert rank is not None
    fails_at = at if how != "clean" and (rank, call_wrapper.iteration) == (1, 0) else None
    dist.init_process_group(backend)
    if fails_at == -1:
        fail(how)
    dist.all_reduce(torch.ones(1, device=DEVICE))
    live = LiveState(call_wrapper, build, seed=0)
    ddp = DistributedDataParallel(live["model"], init_sync=False)
    for step in live.steps(STEPS):
        live["optimizer"].zero_grad()
        loss = (ddp(batch(step, rank)) - 1).square().mean()
        if step == fails_at:
            fail(how)
        loss.backward()
        live.commit()
    return digest(live)


def main() -> None:
    """Trains under ftrun."""
    share_gpus(int(os.environ["WORLD_SIZE"]))
    if IS_CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.use_deterministic_algorithms(True)
    backend, how, at = sys.argv[1:]
    print(f"final state {train(backend, how, int(at))}\n", end="")


if __name__ == "__main__":
    main()
