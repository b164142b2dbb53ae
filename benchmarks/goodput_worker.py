"""One rank of a job of ``goodput.py``: the same training with live state, and with checkpoints."""

# No postponed annotations here: both wrappers find their argument by its annotation.
import contextlib
import ctypes
import dataclasses
import datetime
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

# The first optimizer would import it. NVRx may interrupt that, and it stays half imported in that process.
import torch._dynamo
import torch.distributed as dist
from lost_work_worker import NEVER, Checkpoint, pinging
from restart_worker import Log
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, BATCH = 64, 4, 8


@dataclasses.dataclass(frozen=True)
class Task:
    """One job.

    Args:
        module: what is imported and whose ``Wrapper`` is used; empty for none (torchrun).
        settings: durations of the wrapper, in seconds, by argument name.
        store: ``host:port`` of the driver's store, which also has the faults.
        folder: of the job: the checkpoint, and a file of each rank with its steps.
        limit: whole seconds after which a worker ends itself, should the driver be gone.
        ranks: that train.
        step: seconds of a training step.
        every: steps between two checkpoints.
        live: whether the state lives on in the survivors; else all load the newest checkpoint.
        own_group_store: whether the process group uses the driver's store (NVRx).
        collective_timeout: of the process group, in seconds; 0: torch's default.
    """

    module: str
    settings: dict[str, float]
    store: str
    folder: str
    limit: int
    ranks: int
    step: float
    every: int
    live: bool = False
    own_group_store: bool = False
    collective_timeout: float = 0.0

    def to_json(self) -> str:
        """Returns the task as one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Task":
        """Reads what `to_json` wrote."""
        return cls(**json.loads(line))


def build() -> dict[str, Any]:
    """Makes the training state."""
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def batch(step: int, rank: int, ranks: int) -> torch.Tensor:
    """Returns the data of a step, the same however often it is done."""
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step * ranks + rank))


def block_for_ever() -> None:
    """Blocks in C. No exception that is raised in this thread gets it out; SIGTERM ends the process."""
    libc = ctypes.CDLL(None)  # which lets go of the GIL
    mutex = (ctypes.c_long * 16)()  # zeros are PTHREAD_MUTEX_INITIALIZER
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


class Train:
    """Trains until the driver ends the process.

    Args:
        task: the job.
        count: a client of the driver's store.
    """

    def __init__(self, task: Task, count: Store) -> None:
        self.task, self.count = task, count
        self.checkpoint = Checkpoint(task.folder)
        self.logs: dict[int, Log] = {}

    def __call__(self, iteration: int, ping: Callable[[], None], call_wrapper: Any = None) -> None:
        """The wrapped function.

        Args:
            iteration: number of this entry of the function.
            ping: reports progress.
            call_wrapper: of ft_wrapper and NVRx.
        """
        task, rank = self.task, int(os.environ["RANK"])
        if rank not in self.logs:
            self.logs[rank] = Log(os.path.join(task.folder, f"rank-{rank}.jsonl"), rank)
        self.logs[rank].write("enter", time.monotonic(), pid=os.getpid(), iteration=iteration)
        self.begin_group(rank, iteration)
        torch.manual_seed(0)
        objects: Any
        if task.live:
            from ft_wrapper import LiveState

            objects = live = LiveState(call_wrapper, build, restore=self.checkpoint.load, seed=0)
            ddp = live.data_parallel()
            steps, commit = live.steps(NEVER), live.commit
        else:
            objects = build()
            steps, commit = pinging(self.checkpoint.load(objects), ping), objects["optimizer"].step
            ddp = DistributedDataParallel(objects["model"])
        atomic = call_wrapper.atomic if call_wrapper else contextlib.nullcontext
        due = time.monotonic()
        trains = False
        for step in steps:
            if trains:
                self.meet_fault(rank)
            objects["optimizer"].zero_grad()
            loss = (ddp(batch(step, rank, task.ranks)) - 1).square().mean()
            # The rest of the step: the CPU is idle while a GPU computes. A late step is not made up for.
            due = max(due + task.step, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            loss.backward()
            commit()
            self.logs[rank].write("step", time.monotonic(), step=step)
            if not trains:
                trains = True
                self.tell(rank)
            if rank == 0 and (step + 1) % task.every == 0:
                with atomic():
                    self.checkpoint.save(objects, step + 1)

    def begin_group(self, rank: int, iteration: int) -> None:
        """Makes the process group."""
        options: dict[str, Any] = {}
        if self.task.collective_timeout:
            options["timeout"] = datetime.timedelta(seconds=self.task.collective_timeout)
        if self.task.own_group_store:
            launch = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}/{os.environ['MASTER_PORT']}"
            options["store"] = PrefixStore(f"group/{launch}/{iteration}", self.count)
            options |= {"rank": rank, "world_size": int(os.environ["WORLD_SIZE"])}
        dist.init_process_group("gloo", **options)

    def tell(self, rank: int) -> None:
        """Tells the driver that this rank trains, and in which process."""
        entry = self.count.add(f"entries/{rank}", 1)
        self.count.set(f"entry/{rank}/{entry}", str(os.getpid()))
        if self.count.add("begun", 1) == self.task.ranks:
            self.count.set("all begun", "")

    def meet_fault(self, rank: int) -> None:
        """Lets a fault happen that the driver has put down for this rank."""
        if not self.count.check([f"fault/{rank}"]):
            return
        index, kind = self.count.get(f"fault/{rank}").decode().split()
        self.count.set(f"happened/{index}", str(time.monotonic()))
        self.count.delete_key(f"fault/{rank}")
        if kind == "exception":
            raise RuntimeError("a fault of the benchmark")
        block_for_ever()


def wrapper_settings(task: Task, inprocess: Any) -> dict[str, Any]:
    """Returns the wrapper's arguments: as many active ranks as there were, after each fault."""
    settings: dict[str, Any] = {
        name: datetime.timedelta(seconds=value) for name, value in task.settings.items()
    }
    if not task.own_group_store:
        return {
            **settings,
            "rejoin": True,
            "active_world_size": task.ranks,
            "min_world_size": task.ranks,
        }
    assignment = importlib.import_module(f"{task.module}.rank_assignment")
    initialize = importlib.import_module(f"{task.module}.initialize")
    active = assignment.MaxActiveWorldSize(task.ranks)
    return {
        **settings,
        "rank_assignment": inprocess.Compose(active, assignment.ShiftRanks()),
        # With fewer ranks it gives up, so that the launcher starts all of them.
        "initialize": initialize.RetryController(min_world_size=task.ranks),
        # As in NVRx's examples: the launcher has MASTER_PORT, and the function the next one.
        "store_kwargs": {"port": int(os.environ["MASTER_PORT"]) + 2},
    }


def main() -> None:
    """Runs the job that the command line holds."""
    task = Task.from_json(sys.argv[1])
    signal.alarm(task.limit)
    torch.set_num_threads(1)
    host, port = task.store.rsplit(":", 1)
    count = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    train = Train(task, count)
    if not task.module:
        train(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), lambda: None)
        return
    inprocess = importlib.import_module(task.module)

    @inprocess.Wrapper(**wrapper_settings(task, inprocess))  # type: ignore[untyped-decorator]
    def call(call_wrapper: inprocess.CallWrapper = None) -> None:  # type: ignore[name-defined]
        train(call_wrapper.iteration, call_wrapper.ping, call_wrapper)

    call()


if __name__ == "__main__":
    main()
