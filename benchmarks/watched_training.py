"""What the ranks of ``hangs.py`` and ``false_alarms.py`` share: a small training with a data loader.

The driver and all processes of a job share a `Board`. It holds the driver's orders, and moments of the ranks.
"""

# No postponed annotations here: the wrapper finds its argument by its annotation.
import dataclasses
import functools
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lost_work_worker import NEVER, Checkpoint, pinging
from restart_worker import Log
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ft_wrapper import CallWrapper, Limits, LiveState, Wrapper

WIDTH, LAYERS, BATCH = 64, 4, 8
PASSES = 20  # forward passes of an evaluation
SHARE = 0.25  # of a step's time that one of them takes
FINISH = -1.0  # the order to return from the function


@dataclasses.dataclass(frozen=True)
class Task:
    """One job.

    Args:
        settings: arguments of the wrapper, in seconds.
        folder: of the job: the board, the checkpoint, and a file of each rank with its steps.
        limit: whole seconds after which a rank ends itself, should the driver be gone.
        ranks: that train.
        step: seconds of a training step, most of which is sleep.
        live: whether the state lives on in the survivors; else all load the newest checkpoint.
        checkpoint_every: steps between two checkpoints.
        evaluate_every: steps between two evaluations.
        seed: decides all that is random.
        noise: kinds of disturbances in the ranks; for ``false_alarms.py``.
        seconds: how long the noise lasts.
        throttle: the cgroup that rank 0 joins, whose writes are slow; empty for none.
    """

    settings: dict[str, float]
    folder: str
    limit: int
    ranks: int
    step: float
    live: bool
    checkpoint_every: int
    evaluate_every: int
    seed: int
    noise: tuple[str, ...] = ()
    seconds: float = 0.0
    throttle: str = ""

    def to_json(self) -> str:
        """Returns the task as one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Task":
        """Reads what `to_json` wrote."""
        fields = json.loads(line)
        return cls(**{**fields, "noise": tuple(fields["noise"])})


class Board:
    """Numbers in memory that the driver and all processes of a job share: a row for each rank.

    Args:
        folder: of the job.
        ranks: how many there are.
    """

    FIELDS = (
        "order",  # what the driver wants of this rank: 0, or a number that both sides know
        "place",  # in a step, where it shall happen
        "loader",  # the same for its data loader's worker; negative while that worker does it
        "began",  # when it happened
        "slot",  # the rank's slot, which stays with the process
        "pid",
        "entry",  # number of the iteration in which it has done a step
        "stepped",  # when it did its first step in that iteration
        "last",  # when it did its last step
    )

    def __init__(self, folder: str | Path, ranks: int) -> None:
        size = ranks * len(self.FIELDS) * 8
        with open(Path(folder) / "board", "a+b") as file:
            os.truncate(file.fileno(), size)
            self.numbers = memoryview(mmap.mmap(file.fileno(), size)).cast("d")

    def get(self, rank: int, field: str) -> float:
        """Returns one number."""
        return self.numbers[rank * len(self.FIELDS) + self.FIELDS.index(field)]

    def set(self, rank: int, field: str, value: float) -> None:
        """Sets one number."""
        self.numbers[rank * len(self.FIELDS) + self.FIELDS.index(field)] = value


class Batches(torch.utils.data.Dataset[torch.Tensor]):
    """The data of a step: the same however often it is made.

    Args:
        task: the job.
        rank: whose data.
        before: is called in the loader's worker before it makes a batch, with the number of the step.
    """

    def __init__(self, task: Task, rank: int, before: Callable[[int], None]) -> None:
        self.task, self.rank, self.before = task, rank, before

    def __getitem__(self, step: int) -> torch.Tensor:
        self.before(step)
        seed = (self.task.seed * NEVER + step) * self.task.ranks + self.rank
        return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed % 2**63))


def build() -> dict[str, Any]:
    """Makes the training state."""
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


class Training:
    """Trains until the driver orders the end. Subclasses disturb it.

    Args:
        task: the job.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.board = Board(task.folder, task.ranks)
        self.checkpoint = Checkpoint(task.folder)

    # ---- what subclasses replace

    def begin(self) -> None:
        """Is called in each entry, when the process group is there."""

    def at(self, place: str, step: int) -> None:
        """Is called at the places of a step: loading, loaded, forward, backward, committed, evaluating."""

    def before_batch(self, rank: int, step: int) -> None:
        """Is called in the data loader's worker."""

    def agree(self) -> bool:
        """Ends a step's collectives; returns whether the function returns."""
        is_over = torch.tensor(float(self.board.get(self.rank, "order") == FINISH))
        dist.all_reduce(is_over)
        return bool(is_over)

    def save(self, step: int) -> None:
        """Saves the checkpoint after a step, on one rank."""
        if self.rank == 0:
            self.checkpoint.save(self.objects, step + 1)

    def leave(self) -> None:
        """Is called in a ``finally`` when the function is left."""

    # ---- the training

    def __call__(self, call_wrapper: CallWrapper) -> None:
        """The wrapped function."""
        task, board = self.task, self.board
        self.rank, iteration = call_wrapper.rank, call_wrapper.iteration
        slot = call_wrapper.state.initial_rank
        assert slot is not None
        board.set(self.rank, "slot", slot)
        board.set(self.rank, "pid", os.getpid())
        board.set(self.rank, "loader", max(0.0, board.get(self.rank, "loader")))  # its worker is a new one
        log = Log(os.path.join(task.folder, f"rank-{self.rank}.jsonl"), self.rank)
        try:
            dist.init_process_group("gloo")
            self.begin()
            torch.manual_seed(0)
            self.train(call_wrapper, log, iteration)
        finally:
            os.close(log.fd)
            self.leave()

    def prepare(self, call_wrapper: CallWrapper) -> tuple[nn.Module, Iterator[int], Callable[[], None]]:
        """Makes the state; returns what computes gradients, the steps, and what ends a step."""
        if self.task.live:
            live = LiveState(call_wrapper, build, restore=self.checkpoint.load, seed=0)
            self.objects: Any = live
            self.first = live.step
            return live.data_parallel(), live.steps(NEVER), live.commit
        self.objects = build()
        self.first = self.checkpoint.load(self.objects)
        steps = pinging(self.first, call_wrapper.ping)
        return DistributedDataParallel(self.objects["model"]), steps, self.objects["optimizer"].step

    def train(self, call_wrapper: CallWrapper, log: Log, iteration: int) -> None:
        """The training loop."""
        task, board = self.task, self.board
        ddp, steps, commit = self.prepare(call_wrapper)
        data = Batches(task, self.rank, functools.partial(self.before_batch, self.rank))
        batches = iter(
            torch.utils.data.DataLoader(data, None, sampler=range(self.first, NEVER), num_workers=1)
        )
        due = time.monotonic()
        for step in steps:
            self.at("loading", step)
            batch = next(batches)
            self.at("loaded", step)
            self.objects["optimizer"].zero_grad()
            loss = (ddp(batch) - 1).square().mean()
            # The rest of the step: the CPU is idle while a GPU computes. A late step is not made up for.
            due = max(due + task.step, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            self.at("forward", step)
            loss.backward()
            self.at("backward", step)
            is_over = self.agree()
            commit()
            now = time.monotonic()
            log.write("step", now, step=step, iteration=iteration, updates=self.updates())
            if board.get(self.rank, "entry") != iteration + 1:
                board.set(self.rank, "stepped", now)
                board.set(self.rank, "entry", iteration + 1)
            board.set(self.rank, "last", now)
            if is_over:
                return
            self.at("committed", step)
            if (step + 1) % task.evaluate_every == 0:
                self.evaluate(batch, step)
            if (step + 1) % task.checkpoint_every == 0:
                self.save(step)

    def updates(self) -> int:
        """Returns how many updates the parameters have had, by the optimizer's own count."""
        return int(next(iter(self.objects["optimizer"].state.values()))["step"])

    def evaluate(self, batch: torch.Tensor, step: int) -> None:
        """Passes without gradients, collectives and pings."""
        with torch.no_grad():
            for _ in range(PASSES):
                self.objects["model"](batch)
                time.sleep(self.task.step * SHARE)
                self.at("evaluating", step)


def run(training: type[Training]) -> None:
    """Runs the job that the command line holds."""
    task = Task.from_json(sys.argv[1])
    signal.alarm(task.limit)
    torch.set_num_threads(1)
    train = training(task)

    @Wrapper(
        rejoin=True,
        active_world_size=task.ranks,
        min_world_size=task.ranks,
        limits=Limits(max_same_faults=None),  # most faults are alike
        **task.settings,
    )
    def call(call_wrapper: CallWrapper = None) -> None:  # type: ignore[assignment]
        train(call_wrapper)

    call()
