"""A training as a user of SLURM writes it: live state, and checkpoints in a shared folder.

ftrun job.py FOLDER STEPS SECONDS_PER_STEP

With PLAIN=1 there is no live state, but the same checkpoints. At step HELD it waits as long as FOLDER/../hold
exists.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ft_wrapper import CallWrapper, LiveState, Wrapper
from ft_wrapper.checkpoints import Checkpoints

HUNGRY = "HUNGRY" in os.environ  # rank 1 takes all memory in step 20
PLAIN = "PLAIN" in os.environ
EVERY = 20  # steps from one checkpoint to the next
HELD = 60


def build():
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}


def digest(model) -> str:
    """The same for the same weights, bit for bit."""
    weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.sha256(weights).hexdigest()[:16]


def say(what: str) -> None:
    """One write for one line: several ranks share the file."""
    os.write(1, f"{what}\n".encode())


@Wrapper(soft_timeout=60, hard_timeout=90)
def train(call_wrapper: CallWrapper, folder: str, steps: int, pause: float) -> str:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    checkpoints = Checkpoints(call_wrapper, folder, keep=2)

    def save(objects, step):
        if checkpoints.is_sealed(step):
            return  # for a notice in this very step
        if rank == 0:
            path = Path(f"{checkpoints.path(step)}.pt")
            unfinished = path.with_name(f"{path.name}.unfinished")
            with open(unfinished, "wb") as file:
                torch.save({name: value.state_dict() for name, value in objects.items()}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
            say(f"SAVED step {step}")
        checkpoints.seal(step)

    def restore(objects):
        newest = checkpoints.newest()
        if newest is None:
            return 0
        state = torch.load(newest.path, weights_only=True)
        for name, value in objects.items():
            value.load_state_dict(state[name])
        return newest.step

    def entered(step):
        say(f"ENTER rank {rank} of {dist.get_world_size()} on {socket.gethostname()} at step {step}")

    def done(step):
        say(f"STEP {step} rank {rank} pid {os.getpid()}")
        time.sleep(pause)  # what a real step takes
        while step == HELD and Path(folder).with_name("hold").exists():
            call_wrapper.ping()
            time.sleep(0.1)

    if PLAIN:
        torch.manual_seed(0)
        objects, saved = build(), None
        first = restore(objects)
        # Without rebuilt buckets, which would be added up in another order after a restart.
        ddp = DistributedDataParallel(objects["model"], find_unused_parameters=True)
        entered(first)
        for step in range(first, steps):
            call_wrapper.ping(step)
            objects["optimizer"].zero_grad()
            data = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
            (ddp(data) - 1).square().mean().backward()
            objects["optimizer"].step()
            done(step)
            notice = call_wrapper.notice
            if (step + 1) % EVERY == 0 or (notice is not None and notice.id != saved):
                save(objects, step + 1)
                saved = notice and notice.id
        return digest(objects["model"])

    live = LiveState(call_wrapper, build, restore=restore, on_notice=save, seed=0)
    ddp = live.data_parallel(find_unused_parameters=True)
    entered(live.step)
    for step in live.steps(steps):
        live["optimizer"].zero_grad()
        (ddp(torch.randn(16, 32)) - 1).square().mean().backward()
        live.commit()
        if HUNGRY and step == 20 and (rank, call_wrapper.iteration) == (1, 0):
            hog = [bytearray(os.urandom(1 << 20) * 16)]
            while True:  # until the kernel ends it
                hog.append(bytearray(hog[0]))
        done(step)
        if (step + 1) % EVERY == 0:
            save({name: live[name] for name in ("model", "optimizer")}, step + 1)
    return digest(live["model"])


if __name__ == "__main__":
    result = train(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    say(f"RESULT rank {os.environ['RANK']}: {result}")
