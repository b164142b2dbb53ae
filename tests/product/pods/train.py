"""What the pods train: a ledger of steps, in live state, of which each rank writes down every update.

    train.py FOLDER

It goes on until there is a file ``finish`` in the folder, where rank 0 also keeps a checkpoint every few
steps, and when there is a notice. What the ledger holds does not depend on the number of ranks. Other files
do harm: ``greedy`` makes the last rank take memory until the kernel ends it; ``orphans`` makes rank 0 leave
processes without a parent, which end; ``hold`` keeps all ranks in their step as long as it is there.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ft_wrapper import CallWrapper, Limits, LiveState, Wrapper

SAMPLES = 12
CHECKPOINT_EVERY = 20
ORPHANS = 10
_MODULUS = 2**31 - 1


def portion(step: int, sample: int) -> int:
    """What a sample adds in a step."""
    return (step + 1) * (sample + 7) ** 3 % 10_007


class Ledger:
    """What all steps so far amount to."""

    def __init__(self) -> None:
        self.steps, self.sum = 0, 1

    def add(self, total: int) -> None:
        """A step's update."""
        self.steps, self.sum = self.steps + 1, (31 * self.sum + total) % _MODULUS

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps, "sum": self.sum}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps, self.sum = state["steps"], state["sum"]


def expected(steps: int) -> int:
    """The sum after so many steps, none of which was left out or done twice."""
    ledger = Ledger()
    for step in range(steps):
        ledger.add(sum(portion(step, sample) for sample in range(SAMPLES)))
    return ledger.sum


def say(**what: Any) -> None:
    """One line, in one write: the ranks of a pod share its output."""
    os.write(1, f"train {json.dumps(what)}\n".encode())


def build() -> dict[str, Any]:
    """The state: the ledger, and a model for which there is something to commit."""
    model = torch.nn.Linear(2, 1)
    return {"ledger": Ledger(), "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3)}


def update(objects: dict[str, Any], total: int) -> None:
    """A step's update, which is written down."""
    objects["optimizer"].step()
    objects["ledger"].add(total)
    say(step=objects["ledger"].steps, pid=os.getpid())


@Wrapper(heartbeat_timeout=60, limits=Limits(join_window=0.3))
def train(call_wrapper: CallWrapper, folder: Path) -> None:
    """Trains until it is asked to finish."""
    dist.init_process_group("gloo")
    rank, size, checkpoint = dist.get_rank(), dist.get_world_size(), folder / "checkpoint"

    def restore(objects: dict[str, Any]) -> int:
        kept = [json.loads(checkpoint.read_text()) if rank == 0 and checkpoint.exists() else None]
        dist.broadcast_object_list(kept, 0)
        if kept[0] is None:
            return 0
        objects["ledger"].load_state_dict(kept[0])
        return int(kept[0]["steps"])

    def save(objects: dict[str, Any], step: int) -> None:
        """All ranks call it at the same step when there is a notice."""
        if rank == 0:
            checkpoint.with_suffix(".part").write_text(json.dumps(objects["ledger"].state_dict()))
            os.replace(checkpoint.with_suffix(".part"), checkpoint)
            say(saved=step)

    live = LiveState(call_wrapper, build, seed=0, update=update, restore=restore, on_notice=save)
    ddp = live.data_parallel("model", find_unused_parameters=True)
    say(begins=live["ledger"].steps, size=size, iteration=call_wrapper.iteration, host=os.uname().nodename)
    for step in live.steps(1_000_000):
        live["optimizer"].zero_grad()
        ddp(torch.ones(1, 2)).sum().backward()
        mine = sum(portion(step, sample) for sample in range(rank, SAMPLES, size))
        total = torch.tensor([mine, rank == 0 and (folder / "finish").exists()])
        dist.all_reduce(total)
        live.commit(int(total[0]))
        if rank == 0 and step % CHECKPOINT_EVERY == 0:
            with call_wrapper.atomic():
                save({"ledger": live["ledger"]}, step)
        if rank == size - 1 and (folder / "greedy").exists():
            (folder / "greedy").rename(folder / "fed")
            data = [bytearray(b"x" * (1 << 26)) for _ in range(1000)]
            say(held=len(data))
        if rank == 0 and (folder / "orphans").exists():
            (folder / "orphans").unlink()
            leave_orphans()
        if total[1]:
            break
        time.sleep(0.02)  # the processors are the other ranks', too
        while (folder / "hold").exists():
            time.sleep(0.02)
    say(ended=live["ledger"].steps, sum=live["ledger"].sum)


def leave_orphans() -> None:
    """Starts processes whose parent ends at once, and which end then."""
    read, write = os.pipe()
    for _ in range(ORPHANS):
        if (child := os.fork()) == 0:
            parent = os.pidfd_open(os.getpid())
            if os.fork() == 0:
                select.select([parent], [], [])  # it ends once it is an orphan
            os._exit(0)
        os.waitpid(child, 0)
    os.close(write)
    os.read(read, 1)  # all of them have ended
    say(orphans=ORPHANS)


if __name__ == "__main__":
    train(Path(sys.argv[1]))
