"""A training job whose faults and repeated steps are known, for the tests of goodput.

    ftrun … goodput_job.py FOLDER --faults exception:17,sigkill:28 …

One active rank has the faults, each once, at its step. Active rank 0 writes down now and then where the
next iteration goes on. Beside the events, and before them, every rank notes in a file of its own which steps
have begun: what the report says is held against that.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ft_wrapper import CallWrapper, Limits, Wrapper

arguments = argparse.ArgumentParser()
arguments.add_argument("folder", type=Path)
arguments.add_argument("--active", type=int, default=2)
arguments.add_argument("--faulty", type=int, default=1, help="the active rank that has the faults")
arguments.add_argument("--steps", type=int, default=60)
arguments.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
arguments.add_argument("--faults", default="", help="kind:step,…; kinds: exception, sigkill, hang")
arguments.add_argument(
    "--gate", action="store_true", help="after the last step, wait for FOLDER/gate, a FIFO"
)
args = arguments.parse_args()
faults = [spec.split(":") for spec in args.faults.split(",") if spec]


def happens(kind: str, step: int) -> bool:
    """Whether a fault is to happen here that has not happened yet."""
    for number, (its_kind, its_step) in enumerate(faults):
        if (its_kind, int(its_step)) == (kind, step):
            fired = args.folder / f"fault-{number}"
            if not fired.exists():
                fired.touch()
                return True
    return False


def wait(rank: int, call_wrapper: CallWrapper) -> None:
    """Until somebody opens the gate; all steps are done."""
    with call_wrapper.disable_hang_protection():
        if rank == 0:
            (args.folder / "at the gate").touch()
            (args.folder / "gate").read_text()
        dist.barrier()


@Wrapper(
    active_world_size=args.active,
    rejoin=True,
    soft_timeout=1.5,
    hard_timeout=3.0,
    heartbeat_timeout=20.0,
    barrier_timeout=30.0,
    progress_watchdog_interval=0.2,
    monitor_process_interval=0.2,
    monitor_thread_interval=0.2,
    limits=Limits(max_same_faults=None),
)
def train(call_wrapper: CallWrapper = None) -> None:  # type: ignore[assignment]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    checkpoint = args.folder / "checkpoint"
    first = torch.tensor(int(checkpoint.read_text()) if rank == 0 and checkpoint.exists() else 0)
    dist.broadcast(first, 0)
    time.sleep(0.05)
    begun = os.open(args.folder / f"begun-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for step in range(int(first), args.steps):
            with call_wrapper.atomic():
                os.write(begun, f"{call_wrapper.iteration} {step}\n".encode())
                call_wrapper.ping(step)
            if rank == args.faulty:
                if happens("exception", step):
                    raise RuntimeError("as it was asked for")
                if happens("sigkill", step):
                    os.kill(os.getpid(), 9)
                if happens("hang", step):
                    time.sleep(1000)
            time.sleep(0.01)
            dist.all_reduce(torch.ones(1))
            if rank == 0 and (step + 1) % args.every == 0:
                unfinished = args.folder / "unfinished"
                unfinished.write_text(str(step + 1))
                unfinished.replace(checkpoint)
        if args.gate:
            wait(rank, call_wrapper)
    finally:
        os.close(begun)


if __name__ == "__main__":
    train()
