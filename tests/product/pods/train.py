"""What the pods train: a ledger of steps, of which each rank writes down every update.

    train.py FOLDER

It goes on until there is a file ``finish`` in the folder, where rank 0 also keeps a checkpoint every few
steps, and when there is a notice. What the ledger holds does not depend on the number of ranks. It is in live
state, unless there is a file ``plain``. A file ``pause`` says how many seconds there are between steps. Other
files do harm: ``greedy`` makes the last rank take memory until the kernel ends it; ``orphans`` makes rank 0
leave processes without a parent, which end; ``hold`` keeps all ranks in their step as long as it is there.
"""

from __future__ import annotations

import dataclasses
import itertools
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


@dataclasses.dataclass
class Training:
    """What both kinds of training have in common.

    Args:
        call_wrapper: of the call.
        folder: where the checkpoint is, and the files that say what to do.
    """

    call_wrapper: CallWrapper
    folder: Path

    def __post_init__(self) -> None:
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.checkpoint, pause = self.folder / "checkpoint", self.folder / "pause"
        self.pause = float(pause.read_text()) if pause.exists() else 0.02

    def restore(self, objects: dict[str, Any]) -> int:
        """Reads the checkpoint."""
        there = self.rank == 0 and self.checkpoint.exists()
        kept = [json.loads(self.checkpoint.read_text()) if there else None]
        dist.broadcast_object_list(kept, 0)
        if kept[0] is None:
            return 0
        objects["ledger"].load_state_dict(kept[0])
        return int(kept[0]["steps"])

    def save(self, ledger: Ledger) -> None:
        """Writes it, on rank 0."""
        if self.rank == 0:
            part = self.checkpoint.with_suffix(".part")
            part.write_text(json.dumps(ledger.state_dict()))
            os.replace(part, self.checkpoint)
            say(saved=ledger.steps)

    def noticed(self, objects: dict[str, Any], step: int) -> None:
        """All ranks call it at the same step when there is a notice."""
        self.save(objects["ledger"])
        say(noticed=step)

    def begins(self, ledger: Ledger) -> None:
        """An iteration begins."""
        host = os.uname().nodename
        say(begins=ledger.steps, size=self.size, iteration=self.call_wrapper.iteration, host=host)

    def total(self, step: int) -> torch.Tensor:
        """What all ranks add in a step; and whether it is the last one."""
        mine = sum(portion(step, sample) for sample in range(self.rank, SAMPLES, self.size))
        total = torch.tensor([mine, self.rank == 0 and (self.folder / "finish").exists()])
        dist.all_reduce(total)
        return total

    def end_step(self, ledger: Ledger, step: int) -> None:
        """Saves if it is time to, and does what files ask for."""
        if self.rank == 0 and step % CHECKPOINT_EVERY == 0:
            with self.call_wrapper.atomic():
                self.save(ledger)
        if self.rank == self.size - 1 and (self.folder / "greedy").exists():
            (self.folder / "greedy").rename(self.folder / "fed")
            data = [bytearray(b"x" * (1 << 26)) for _ in range(1000)]
            say(held=len(data))
        if self.rank == 0 and (self.folder / "orphans").exists():
            (self.folder / "orphans").unlink()
            leave_orphans()
        time.sleep(self.pause)  # the processors are the other ranks', too
        while (self.folder / "hold").exists():
            time.sleep(0.02)


def train_live(training: Training) -> Ledger:
    """Trains in live state."""
    call_wrapper = training.call_wrapper
    live = LiveState(
        call_wrapper, build, seed=0, update=update, restore=training.restore, on_notice=training.noticed
    )
    ddp = live.data_parallel("model", find_unused_parameters=True)
    training.begins(live["ledger"])
    for step in live.steps(1_000_000):
        live["optimizer"].zero_grad()
        ddp(torch.ones(1, 2)).sum().backward()
        total = training.total(step)
        live.commit(int(total[0]))
        training.end_step(live["ledger"], step)
        if total[1]:
            break
    return live["ledger"]


def train_plain(training: Training) -> Ledger:
    """Trains with checkpoints alone."""
    call_wrapper, objects, saved = training.call_wrapper, build(), None
    ledger = objects["ledger"]
    training.restore(objects)
    training.begins(ledger)
    for step in itertools.count(ledger.steps):
        call_wrapper.ping(step)
        total = training.total(step)
        update(objects, int(total[0]))
        notice = call_wrapper.notice
        if notice is not None and notice.id != saved:
            training.noticed(objects, ledger.steps)
            saved = notice.id
        training.end_step(ledger, step)
        if total[1]:
            break
    return ledger


@Wrapper(heartbeat_timeout=60, limits=Limits(join_window=0.3))
def train(call_wrapper: CallWrapper, folder: Path) -> None:
    """Trains until it is asked to finish."""
    training = Training(call_wrapper, folder)
    ledger = (train_plain if (folder / "plain").exists() else train_live)(training)
    say(ended=ledger.steps, sum=ledger.sum)


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
