"""One rank of a job of ``lost_work.py``: the same training with live state, and with checkpoints."""

# No postponed annotations here: both wrappers find their argument by its annotation.
import dataclasses
import datetime
import functools
import importlib
import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plan import Fault
from restart_worker import Log, happen
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.nn.parallel import DistributedDataParallel

STEP = 0.02  # seconds in which a step's forward pass sleeps: the CPU is idle while a GPU computes
PIECE = 2 << 20  # elements of a frozen parameter
NEVER = 1 << 40  # steps
EVERY = 100  # steps between two checkpoints
# What a recovery of live state does, in this order: stamped as each ends, if the job is one of stamps.
PERFORMED = ("build", "gather", "drop_step", "move", "rebind", "adopt", "differing", "finish", "seal")


@dataclasses.dataclass(frozen=True)
class Size:
    """How large the training state is.

    Args:
        width: of a layer.
        layers: those that are trained.
        frozen: parameters of `PIECE` elements that are not.
    """

    width: int
    layers: int
    frozen: int = 0


@dataclasses.dataclass(frozen=True)
class Task:
    """One job.

    Args:
        module: what is imported and whose ``Wrapper`` is used; empty for none (torchrun).
        settings: durations of the wrapper, in seconds, by argument name.
        store: ``host:port`` of the driver's store.
        folder: of the job: checkpoints, and what `Price` finds out.
        log: path of the file that workers append their stamps to.
        limit: whole seconds after which a worker ends itself, should the driver be gone.
        size: of the state.
        active: ranks that train; a further one is a spare.
        live: whether the state lives on in the survivors; else all load the newest checkpoint.
        own_group_store: whether the process group uses the driver's store (NVRx).
        faults: kind, rank and step of each.
        stamps: whether the parts of a recovery are stamped, which takes time.
        rounds: of blocks of steps, to find out what ``commit`` costs; 0: the job has faults instead.
        block: steps in a block.
        compares: whether DDP is made as one that stays has to be made.
        keep: whether the process group and DDP stay; needs torch 2.15.
        compiled: whether DDP is compiled.
    """

    module: str
    settings: dict[str, float]
    store: str
    folder: str
    log: str
    limit: int
    size: Size
    active: int
    live: bool = False
    own_group_store: bool = False
    faults: tuple[tuple[str, int, int], ...] = ()
    stamps: bool = False
    rounds: int = 0
    block: int = 0
    compares: bool = False
    keep: bool = False
    compiled: bool = False

    def to_json(self) -> str:
        """Returns the task as one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Task":
        """Reads what `to_json` wrote."""
        fields = json.loads(line)
        fields["faults"] = tuple(tuple(fault) for fault in fields["faults"])
        fields["size"] = Size(**fields["size"])
        return cls(**fields)


class Net(nn.Module):
    """Layers that are trained, and parameters that only belong to the state."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        layers = [part for _ in range(size.layers) for part in (nn.Linear(size.width, size.width), nn.ReLU())]
        self.layers = nn.Sequential(*layers)
        self.frozen = nn.ParameterList(
            nn.Parameter(torch.full((PIECE,), i / size.frozen), requires_grad=False)
            for i in range(size.frozen)
        )

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Sleeps for a step's time, too."""
        time.sleep(STEP)
        out: torch.Tensor = self.layers(batch)
        return out


def build(size: Size) -> dict[str, Any]:
    """Makes the training state."""
    model = Net(size)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def train_step(
    step: int, ddp: nn.Module, objects: Any, batch: torch.Tensor, forwarded: Callable[[], None]
) -> None:
    """A step without its end.

    In step 0 alone the frozen parameters have a gradient, of zeros: so AdamW makes their moments.
    """
    objects["optimizer"].zero_grad()
    if step == 0:
        for parameter in objects["model"].frozen:
            parameter.grad = torch.zeros_like(parameter)
    loss = ddp(batch).square().mean()
    forwarded()
    loss.backward()


class Checkpoint:
    """The job's newest checkpoint.

    Args:
        folder: where it is.
    """

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / "checkpoint.pt"

    def save(self, objects: Any, step: int) -> None:
        """Writes it, on one rank: the file is there as a whole, or not at all."""
        state = {name: objects[name].state_dict() for name in ("model", "optimizer")}
        torch.save({"step": step, **state}, new := self.path.with_suffix(".new"))
        os.replace(new, self.path)

    def load(self, objects: dict[str, Any]) -> int:
        """Loads it, and returns its step; 0 if there is none."""
        if not self.path.exists():
            return 0
        state = torch.load(self.path, mmap=True)  # no copy but the one into the objects
        for name, value in objects.items():
            value.load_state_dict(state[name])
        step: int = state["step"]
        return step


def begin_group(task: Task, count: Store, iteration: int, call_wrapper: Any) -> None:
    """Makes the process group."""
    if task.keep:
        call_wrapper.process_group("gloo")
        return
    if not task.own_group_store:
        dist.init_process_group("gloo")
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = PrefixStore(f"group/{iteration}", count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


class Train:
    """Trains until the next fault; after the last one, until the driver ends the process.

    Args:
        task: the job.
        count: a client of the driver's store.
        log: where the stamps go.
    """

    def __init__(self, task: Task, count: Store, log: Log) -> None:
        self.task, self.count, self.log = task, count, log
        self.checkpoint = Checkpoint(task.folder)
        self.index = 0

    def say(self, event: str, **fields: int) -> None:
        """Stamps an event; ``index`` is the number of faults before it."""
        self.log.write(event, time.monotonic(), index=self.index, **fields)

    def detail(self, event: str) -> None:
        """The same in a job of stamps."""
        if self.task.stamps:
            self.say(event)

    def __call__(self, iteration: int, ping: Callable[[], None], call_wrapper: Any = None) -> None:
        """The wrapped function.

        Args:
            iteration: number of this entry of the function.
            ping: reports progress.
            call_wrapper: for live state.
        """
        entered = time.monotonic()
        task = self.task
        self.index = self.count.add("faults", 0)
        self.log.write("function", entered, index=self.index)
        begin_group(task, self.count, iteration, call_wrapper)
        self.say("group")
        torch.manual_seed(0)
        objects: Any
        if task.live:
            from ft_wrapper import LiveState

            objects = live = LiveState(
                call_wrapper, functools.partial(build, task.size), restore=self.checkpoint.load, seed=0
            )
            steps, commit = live.steps(NEVER), live.commit
        else:
            objects = build(task.size)
            steps, commit = pinging(self.checkpoint.load(objects), ping), objects["optimizer"].step
        self.say("state")
        if task.keep:
            ddp = objects.data_parallel(find_unused_parameters=True)
        else:
            ddp = DistributedDataParallel(
                objects["model"], init_sync=False, find_unused_parameters=task.compares
            )
        if task.compiled:
            ddp = torch.compile(ddp)
        self.detail("ddp")
        self.train(steps, ddp, objects, commit)

    def train(self, steps: Iterator[int], ddp: nn.Module, objects: Any, commit: Callable[[], None]) -> None:
        """The training loop."""
        task, rank = self.task, dist.get_rank()
        batch = torch.ones(8, task.size.width)
        new = task.faults[self.index - 1][2] if self.index else 0  # the first step that no rank has done yet
        kind, victim, last = task.faults[self.index] if self.index < len(task.faults) else ("", -1, -1)

        def forwarded() -> None:
            if step == last and rank == victim:  # the others wait in backward()
                happen(Fault(kind.split()[-1], rank, 0.0), self.count, self.log, self.index)
            if step == new:
                self.detail("forward")

        for step in steps:
            train_step(step, ddp, objects, batch, forwarded)
            if step == new:
                self.detail("backward")
            commit()
            self.say("step", step=step)
            if step == new and self.count.add(f"new/{self.index}", 1) == task.active:
                self.count.set(f"back/{self.index}", "")
            if (step + 1) % EVERY == 0 and rank == 0:
                self.checkpoint.save(objects, step + 1)


def pinging(first: int, ping: Callable[[], None]) -> Iterator[int]:
    """Goes through the steps from the first one on, and reports progress at each."""
    for step in range(first, NEVER):
        ping()
        yield step


def stamp(train: Train) -> None:
    """Lets each part of a recovery stamp its end."""
    from ft_wrapper.live.performer import TorchPerformer

    def stamped(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(part)
        def replacement(*arguments: Any) -> Any:
            result = part(*arguments)
            train.say(name)
            return result

        return replacement

    for name in PERFORMED:
        setattr(TorchPerformer, name, stamped(name, getattr(TorchPerformer, name)))


class Price:
    """Steps that end with ``commit`` beside steps that end with ``optimizer.step``, in the same processes.

    Args:
        task: the job.
        count: a client of the driver's store.
        log: not used.
    """

    def __init__(self, task: Task, count: Store, log: Log) -> None:
        self.task, self.count = task, count
        self.parts: dict[str, list[float]] = {}

    def __call__(self, iteration: int, ping: Callable[[], None], call_wrapper: Any) -> None:
        """The wrapped function."""
        from ft_wrapper import LiveState

        begin_group(self.task, self.count, iteration, call_wrapper)
        size = self.task.size
        self.batch = torch.ones(8, size.width)
        self.ping = ping
        self.live = LiveState(call_wrapper, functools.partial(build, size), seed=0)
        self.live_ddp = DistributedDataParallel(self.live["model"], init_sync=False)
        torch.manual_seed(0)
        self.plain = build(size)
        self.plain_ddp = DistributedDataParallel(self.plain["model"])
        self.apply = self.plain["optimizer"].step
        kinds = {"plain": self.plain_steps, "plain again": self.plain_steps, "live": self.live_steps}
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(-1, self.task.rounds):
            names = list(kinds)
            shift = number % len(names)  # none has always the same one before it
            for kind in names[shift:] + names[:shift]:
                took = self.block(kinds[kind])
                if number >= 0:  # the first round warms up
                    times[kind].append(took)
        ballots = self.ballots()
        self.look_into()
        self.live_steps()
        for step in range(self.task.block):  # what the same update costs alone
            train_step(step + 1, self.plain_ddp, self.plain, self.batch, lambda: None)
            began = time.perf_counter()
            self.apply()
            self.note("optimizer.step() alone", began)
        parts = {name: statistics.median(values) for name, values in self.parts.items()}
        if dist.get_rank() == 0:
            said = {"times": times, "ballot": ballots, "parts": parts}
            path = Path(self.task.folder) / "price.json"
            path.write_text(json.dumps(said))
            self.count.set("back/0", "")

    def block(self, steps: Callable[[], list[float]]) -> float:
        """Does a block of steps; returns their median time."""
        dist.barrier()
        moments = steps()
        return statistics.median(b - a for a, b in itertools.pairwise(moments))

    def plain_steps(self) -> list[float]:
        """Returns the moments at which steps have begun."""
        moments = []
        for step in pinging(1, self.ping):
            moments.append(time.perf_counter())
            if step > self.task.block:
                break
            train_step(step, self.plain_ddp, self.plain, self.batch, lambda: None)
            self.apply()
        return moments

    def live_steps(self) -> list[float]:
        """The same with live state."""
        live, moments = self.live, []
        for step in live.steps(live.step + self.task.block):
            moments.append(time.perf_counter())
            train_step(step, self.live_ddp, live, self.batch, lambda: None)
            live.commit()
        return [*moments, time.perf_counter()]

    def ballots(self) -> float:
        """Returns the median time of an all_reduce of three numbers when all are there at once."""
        ballot, took = torch.zeros(3, dtype=torch.int64), []
        for _ in range(300):
            began = time.perf_counter()
            dist.all_reduce(ballot, dist.ReduceOp.MIN)
            took.append(time.perf_counter() - began)
        return statistics.median(took)

    def note(self, name: str, began: float) -> None:
        """Notes how long a part took."""
        self.parts.setdefault(name, []).append(time.perf_counter() - began)

    def look_into(self) -> None:
        """Lets the parts of ``commit`` note how long they take."""
        live, performer = self.live, self.live._performer

        def timed(owner: object, method: str, name: str) -> None:
            inner = getattr(owner, method)

            def replacement(*arguments: Any, **more: Any) -> Any:
                began = time.perf_counter()
                try:
                    return inner(*arguments, **more)
                finally:
                    self.note(name, began)

            setattr(owner, method, replacement)

        timed(live, "commit", "commit()")
        timed(live, "_check_commit", "checks")
        timed(performer, "make_ready", "buffers, device")
        timed(performer, "vote", "vote")
        timed(performer, "update", "update, with the seed")
        timed(live, "_seed_by", "a step's seed")


def main() -> None:
    """Runs the job that the command line holds."""
    task = Task.from_json(sys.argv[1])
    signal.alarm(task.limit)
    torch.set_num_threads(1)
    host, port = task.store.rsplit(":", 1)
    count = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    log = Log(task.log, slot=int(os.environ["RANK"]))
    if task.rounds:
        run: Any = Price(task, count, log)
    else:
        run = Train(task, count, log)
        if task.stamps:
            stamp(run)
    if not task.module:
        run(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), lambda: None)
        return
    inprocess = importlib.import_module(task.module)
    settings: dict[str, Any] = {
        name: datetime.timedelta(seconds=value) for name, value in task.settings.items()
    }
    if task.own_group_store:  # NVRx
        assignment = importlib.import_module(f"{task.module}.rank_assignment")
        active = assignment.MaxActiveWorldSize(task.active)
        settings["rank_assignment"] = inprocess.Compose(active, assignment.ShiftRanks())
    else:
        settings["active_world_size"] = task.active
        if task.keep:
            settings["limits"] = inprocess.Limits(keep_groups=True)

    @inprocess.Wrapper(**settings)  # type: ignore[untyped-decorator]
    def call(call_wrapper: inprocess.CallWrapper = None) -> None:  # type: ignore[name-defined]
        run(call_wrapper.iteration, call_wrapper.ping, call_wrapper)

    call()


if __name__ == "__main__":
    main()
