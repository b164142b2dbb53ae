"""What a fault costs in work: the time until the first new step, and steps done again.

    python benchmarks/lost_work.py            # everything
    python benchmarks/lost_work.py --quick    # one job of each kind, and a short look at commit

Three ranks train with DistributedDataParallel and AdamW, a fourth one is a spare; under torchrun, which
replaces a killed rank, there are three. Rank 0 writes a checkpoint every 100 steps. Exceptions and a SIGKILL
come at random steps between two checkpoints, the same for all. With live state the survivors go on where they
are; with checkpoints, under ft_wrapper, NVRx 0.4.1 and torchrun, all go back. And what live state costs
without faults: the time of steps that end with ``commit``, and of steps that end with ``optimizer.step``.
Figures are medians; times are of this machine, the ratios are what to compare.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # each wait that times out would print two warnings

import psutil
from figures import duration, median, ratio, spread, table
from jobs import Job, job, own_all_descendants
from lost_work_worker import EVERY, PERFORMED, PIECE, Size, Task
from overhead import quartiles
from peers import NVRX_50MS, NVRX_DEFAULTS, OURS, TORCHRUN, Implementation, add_arguments, chosen
from restart_latency import PHASES, await_key
from torch._C._distributed_c10d import TCPStore

from ft_wrapper import events

WORKER = Path(__file__).resolve().parent / "lost_work_worker.py"
FORMATION_TIMEOUT = 120.0  # seconds for all ranks to have trained a step
PATIENCE = {"": 30.0, TORCHRUN: 90.0}  # seconds for a new step after a fault
LIVE, CHECKPOINTS = "live state", "checkpoints"
# What a process does at its first restart it need not do again, so that one is a case of its own.
FIRST, EXCEPTION, KILL = "first exception", "exception", "sigkill"
ACTIVE = 3
# 13 layers of 256 are 3.4 MB of parameters, 10 MB with AdamW's moments. 1 GB: few of its parameters are
# trained, because gloo's all_reduce of all gradients would take longer than the step.
SIZES = {"10 MB": Size(256, 13), "1 GB": Size(64, 4, frozen=1_000_000_000 // (PIECE * 3 * 4))}
PRICED = (4, 2)  # ranks
SMALL = Size(64, 4)  # so that four ranks do not fight for the cores while they do not sleep
NEW, AGAIN, FUNCTION, STATE = "first new step done", "steps done again", "back in the function", "state there"
MEASURED = (FUNCTION, STATE, NEW, AGAIN)
# What the last rank meets after the fault, in this order, in jobs of stamps.
STAMPS = (*PHASES, "function", "group", *PERFORMED, "state", "ddp", "forward", "backward", "new step")


@dataclasses.dataclass(frozen=True)
class Way:
    """How a job goes on after a fault.

    Args:
        implementation: what restarts it.
        live: whether from living peers; else from the newest checkpoint.
        task: further fields of the task.
    """

    implementation: Implementation
    live: bool
    task: dict[str, bool] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name in tables."""
        if self.live:
            return LIVE
        name = self.implementation.name
        return CHECKPOINTS if name == OURS else f"{name}, {CHECKPOINTS}"


@dataclasses.dataclass
class Loss:
    """What a fault cost.

    Args:
        kind: of the fault.
        figures: by what was measured: seconds until the last rank was there, or a number of steps; empty if
            there was no new step in time.
        stamps: seconds from the fault until the last rank had each event, in a job of stamps.
    """

    kind: str
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    stamps: dict[str, float] = dataclasses.field(default_factory=dict)


def loss_of(job_: Job, task: Task, index: int) -> Loss:
    """Reads from the stamps what a fault cost.

    Args:
        job_: the job.
        task: what it does.
        index: the fault's number.
    """
    kind, _, new = task.faults[index]
    records = job_.records()
    at = next(r["monotonic"] for r in records if r["event"] == "fault" and r["index"] == index)
    after = [r for r in records if r["event"] != "fault" and r["index"] == index + 1]
    done = max(r["monotonic"] for r in after if r["event"] == "step" and r["step"] == new)
    again: dict[int, int] = defaultdict(int)
    last: dict[str, float] = {}
    for record in after:
        event, moment = record["event"], record["monotonic"]
        if event == "step":
            again[record["slot"]] += record["step"] < new
        elif moment <= done:
            last[event] = max(last.get(event, 0.0), moment - at)
    result = Loss(kind)
    result.figures = {
        FUNCTION: last["function"],
        STATE: last["state"],
        NEW: done - at,
        AGAIN: max(again.values()),
    }
    if task.stamps:
        for record in events.load(str(job_.events)):
            if at <= record["monotonic"] <= at + last["function"] and record["event"] in PHASES:
                last[record["event"]] = max(last.get(record["event"], 0.0), record["monotonic"] - at)
        result.stamps = {**last, "new step": done - at}
    return result


def run(
    folder: Path, way: Way, size: Size, faults: list[tuple[str, int, int]], stamps: bool = False
) -> list[Loss]:
    """Runs one job through its faults.

    Args:
        folder: for the job's files.
        way: how it goes on.
        size: of the state.
        faults: kind, rank and step of each.
        stamps: whether the parts of a restart and a recovery are stamped, which takes some time.

    Returns:
        One for each fault up to the first that the job did not survive.

    Raises:
        RuntimeError: the job did not even start; the message holds the end of its output.
    """
    implementation = way.implementation
    torchrun = implementation.name == TORCHRUN
    patience = PATIENCE[TORCHRUN if torchrun or way.task.get("compiled") else ""]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with job(folder) as job_:
        task = Task(
            module=implementation.module,
            settings=implementation.settings,
            store=f"127.0.0.1:{store.port}",
            folder=str(job_.folder),
            log=str(job_.log),
            limit=round(FORMATION_TIMEOUT + len(faults) * patience) + 60,
            size=size,
            active=ACTIVE,
            live=way.live,
            own_group_store=implementation.own_group_store,
            faults=tuple(faults),
            stamps=stamps,
            **way.task,
        )
        worker = [str(WORKER), task.to_json()]
        if torchrun:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
            launcher += [f"--nproc-per-node={ACTIVE}", f"--max-restarts={len(faults)}"]
            # Without it torch 2.13 reuses the store of the attempt before, and some restarts fail or hang.
            job_.start([implementation.python, *launcher, *worker], TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        else:
            job_.start_ranks([implementation.python, *worker], ACTIVE + 1, stamps)
        if not await_key(store, "back/0", FORMATION_TIMEOUT, job_):
            raise RuntimeError(f"{way.name} did not start:\n{job_.complaint()}")
        losses: list[Loss] = []
        for index, (kind, _, step) in enumerate(faults):
            if not await_key(store, f"back/{index + 1}", patience, job_):
                print(f"{way.name}: no new step {patience:.0f} s after {kind} in step {step}")
                print(job_.complaint(), flush=True)
                return [*losses, Loss(kind)]
            losses.append(loss_of(job_, task, index))
        return losses


def faults_of(seed: int) -> list[tuple[str, int, int]]:
    """Returns the faults of a job, the same for all: three exceptions, and a SIGKILL of the last rank.

    Never of rank 0, which hosts NVRx's store. Each is so far from a checkpoint that this one is there.
    """
    chance = random.Random(seed)
    victims = [*((FIRST if i == 0 else EXCEPTION, (seed + i) % ACTIVE) for i in range(3)), (KILL, ACTIVE - 1)]
    return [
        (kind, rank, EVERY * (i + 1) + chance.randint(EVERY // 20, EVERY - 2))
        for i, (kind, rank) in enumerate(victims)
    ]


class Samples:
    """All that was measured."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
        self.lost: dict[tuple[str, str, str], int] = defaultdict(int)
        self.stamps: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)

    def add(self, name: str, size: str, losses: list[Loss]) -> None:
        """Adds what a job showed.

        Args:
            name: of the way.
            size: of the state.
            losses: one a fault.
        """
        for loss in losses:
            if loss.stamps:
                self.stamps[size, loss.kind].append(loss.stamps)
                continue
            if not loss.figures:
                self.lost[name, size, loss.kind] += 1
            for what, figure in loss.figures.items():
                self.values[name, size, loss.kind, what].append(figure)

    def is_lost(self, name: str, size: str, kind: str) -> bool:
        """Returns whether such a job did not come back before: another would only take time."""
        exceptions = (FIRST, EXCEPTION)
        alike = exceptions if kind in exceptions else (kind,)
        return any((name, size, each) in self.lost for each in alike)

    def cell(self, name: str, size: str, kind: str, what: str, middle: float | None) -> str:
        """Returns a median for people, or that there was no new step."""
        lost = self.lost.get((name, size, kind), 0)
        if middle is None:
            return "not back" if lost else "not tried" if self.is_lost(name, size, kind) else "-"
        text = f"{middle:g}" if what == AGAIN else duration(middle)
        return f"{text} ({lost} not back)" if lost else text

    def print_details(self) -> None:
        """Prints least, median and greatest of everything."""
        rows = []
        for (name, size, kind, what), values in sorted(self.values.items()):
            low, middle, high = min(values), median(values) or 0.0, max(values)
            shown = f"{middle:g} ({low:g} .. {high:g}, n={len(values)})" if what == AGAIN else spread(values)
            rows.append([f"{size}, {kind}: {what}", name, shown])
        print("\nAll figures: median (least .. greatest)\n" + table(["", "", ""], rows))

    def print_stamps(self) -> None:
        """Prints where the time of live state goes."""
        kinds = list(self.stamps)
        rows = []
        for name in STAMPS:
            cells = []
            for kind in kinds:
                middle = median([one[name] for one in self.stamps[kind] if name in one])
                cells.append(duration(middle))
            if any(cell != "-" for cell in cells):
                rows.append([name, *cells])
        if rows:
            print(
                "\nLive state, from the fault until the last rank had, in jobs that stamp all of it: medians"
            )
            print(table(["", *(f"{size}, {kind}" for size, kind in kinds)], rows))

    def print_comparison(self, names: list[str]) -> None:
        """Prints the table of medians and ratios."""
        peers = names[1:]
        cases = dict.fromkeys((size, kind) for _, size, kind, *_ in (*self.values, *self.lost))
        rows = []
        for size, kind in cases:
            for what in MEASURED:
                middles = {name: median(self.values.get((name, size, kind, what), [])) for name in names}
                cells = [self.cell(name, size, kind, what, middle) for name, middle in middles.items()]
                cells += [ratio(middles[peer], middles[names[0]]) for peer in peers]
                rows.append([f"{size}, {kind}: {what}", *cells])
        print("\nFrom the fault until the last rank: medians, and how many times more the others take")
        print(table(["", *names, *(f"{peer} /" for peer in peers)], rows))


def measure_faults(arguments: argparse.Namespace, ways: list[Way], folder: Path) -> Samples:
    """Runs all jobs, in turn, and prints a line for each."""
    samples = Samples()
    for size in arguments.sizes:
        if SIZES[size].frozen and psutil.virtual_memory().available < 10 << 30:
            print(f"less than 10 GB available: no jobs of {size}")
            continue
        for seed in range(arguments.repeats):
            jobs = [(way, False) for way in ways] + [(way, True) for way in ways if way.live]
            for way, stamps in jobs[:: 1 if seed % 2 else -1]:
                faults = faults_of(seed)
                while faults := [one for one in faults if not samples.is_lost(way.name, size, one[0])]:
                    losses = run(folder, way, SIZES[size], faults, stamps)
                    samples.add(way.name, size, losses)
                    shown = ", ".join(f"{each.kind} {duration(each.figures.get(NEW))}" for each in losses)
                    print(f"{size}, {way.name}{', stamped' if stamps else ''}: {shown}", flush=True)
                    faults = faults[len(losses) :]
    return samples


def measure_price(arguments: argparse.Namespace, folder: Path, ranks: int) -> dict[str, Any]:
    """Steps with and without ``commit``, in blocks that take turns in the same processes."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = 60 + arguments.rounds * arguments.block
    with job(folder) as job_:
        task = Task(
            module=OURS,
            settings={},
            store=f"127.0.0.1:{store.port}",
            folder=str(job_.folder),
            log=str(job_.log),
            limit=limit,
            size=SMALL,
            active=ranks,
            rounds=arguments.rounds,
            block=arguments.block,
        )
        job_.start_ranks([sys.executable, str(WORKER), task.to_json()], ranks)
        if not await_key(store, "back/0", limit, job_):
            raise RuntimeError(f"no price of commit after {limit} s:\n{job_.complaint()}")
        said: dict[str, Any] = json.loads((job_.folder / "price.json").read_text())
        return said


def print_price(said: dict[str, Any], ranks: int) -> None:
    """Prints what ``commit`` costs, and its parts."""
    times = said["times"]
    rows = [[f"step, {name}", spread(values)] for name, values in times.items()]
    for title, name in (("live / plain", "live"), ("noise: plain / plain", "plain again")):
        ratios = [one / base for one, base in zip(times[name], times["plain"], strict=True)]
        rows.append([title, quartiles(ratios)])
    rows += [[name, duration(seconds)] for name, seconds in said["parts"].items()]
    rows.append(["all_reduce of three numbers, in a row", duration(said["ballot"])])
    print(f"\nWithout faults, {ranks} ranks: medians; then parts of a commit, in steps of their own")
    print(table(["", ""], rows))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    add = parser.add_argument
    add("--sizes", nargs="+", choices=SIZES, default=list(SIZES), metavar="SIZE", help=f"of {list(SIZES)}")
    add("--repeats", type=int, default=5, metavar="N", help="jobs of each kind (default: 5)")
    add("--rounds", type=int, default=20, metavar="N", help="of blocks of steps (default: 20)")
    add("--block", type=int, default=50, metavar="N", help="steps in a block (default: 50)")
    add("--quick", action="store_true", help="one job of each kind, 5 rounds")
    add("--skip", nargs="+", default=[], choices=["faults", "price"], help="what not to measure")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeats, arguments.rounds = 1, 5
    if arguments.rounds < 2:
        parser.error(f"--rounds {arguments.rounds}: at least 2, for there is a spread to show")
    own_all_descendants()
    folder = Path(tempfile.mkdtemp(prefix="lost_work-"))
    begin = time.monotonic()
    trouble, samples, names, prices = "", None, [], {}
    try:
        if "price" not in arguments.skip and OURS in arguments.only:
            prices = {ranks: measure_price(arguments, folder, ranks) for ranks in PRICED}
        if "faults" not in arguments.skip:
            try:
                implementations = chosen(arguments)
            except RuntimeError as error:
                trouble = f"without NVRx, which could not be installed: {error}"
                arguments.only = [n for n in arguments.only if n not in (NVRX_DEFAULTS, NVRX_50MS)]
                implementations = chosen(arguments)
            ways = [Way(each, live=True) for each in implementations if each.name == OURS]
            ways += [Way(each, live=False) for each in implementations]
            names = [way.name for way in ways]
            samples = measure_faults(arguments, ways, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{time.monotonic() - begin:.0f} s in all")
    for ranks, said in prices.items():
        print_price(said, ranks)
    if samples:
        samples.print_details()
        samples.print_stamps()
        samples.print_comparison(names)
    if trouble:
        print(f"\n{trouble}")


if __name__ == "__main__":
    main()
