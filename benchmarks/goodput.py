"""Goodput with a fault every 20 s: useful steps x step time / wall time.

    python benchmarks/goodput.py --at-once           # ten minutes of all systems, side by side
    python benchmarks/goodput.py --minutes 2         # one after the other

Four ranks train with DistributedDataParallel and AdamW in a gloo group; a step takes 100 ms, most of which is
sleep. Rank 0 writes a checkpoint every 50 steps. Exceptions, SIGKILLs and hangs in C come at random, at
the same moments for all systems: ``--seed`` determines the schedule. With live state no step is lost; with
checkpoints, under ft_wrapper, NVRx 0.4.1 and torchrun, the steps since the last one are repeated. A step
counts once, when all ranks have done it. Each system's step time comes from the same run, before the first
fault.
"""

from __future__ import annotations

import argparse
import bisect
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # each wait that times out would print two warnings

import psutil
from figures import duration, median, ratio, table
from goodput_worker import Task
from jobs import Job, free_port_pair, job, own_all_descendants
from peers import NVRX_50MS, OURS, TORCHRUN, Implementation, add_arguments, chosen
from restart_latency import await_key
from torch._C._distributed_c10d import Store, TCPStore

WORKER = Path(__file__).resolve().parent / "goodput_worker.py"
FORMATION_TIMEOUT = 180.0  # seconds for all ranks to have trained a step
KILL = "sigkill"
KINDS = ("exception", KILL, "hang")
COUNTS = ("useful", "again", "faults", "restarts", "processes")
HEADERS = (
    *("system", "goodput", "first / this", "step", "useful steps", "done again", "faults", "restarts"),
    *("new processes", *(f"lost by {kind}" for kind in KINDS), "ended by itself"),
)
RESTARTS = 1000  # more than there are faults: no launcher gives up


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault of the schedule.

    Args:
        at: seconds after the begin of what counts.
        kind: ``exception``, ``sigkill`` or ``hang``.
        rank: the rank that it happens on, as numbered then.
    """

    at: float
    kind: str
    rank: int


@dataclasses.dataclass(frozen=True)
class System:
    """One of those compared.

    Args:
        implementation: what restarts the job.
        live: whether the state lives on in the survivors.
        spares: ranks beyond those that train.
    """

    implementation: Implementation
    live: bool
    spares: int = 0

    @property
    def name(self) -> str:
        """Its name in tables."""
        spare = ", a warm spare" if self.spares else ""
        return f"{self.implementation.name}, {'live state' if self.live else 'checkpoints'}{spare}"


@dataclasses.dataclass
class Outcome:
    """What a job has done.

    Args:
        step: seconds of a step before the first fault.
        useful: steps done after that, each counted once.
        again: steps done again, on the rank with most of them.
        goodput: useful steps x step time / wall time.
        faults: how many happened.
        restarts: how often the function was entered again, on the rank that did so most.
        processes: how many processes entered the function, beyond the first ones.
        lost: by kind of fault, seconds without useful steps from each one to the next.
        ended: whether the job ended by itself.
    """

    step: float
    useful: int
    again: int
    goodput: float
    faults: int
    restarts: int
    processes: int
    lost: dict[str, list[float]]
    ended: bool


def schedule(seed: int, seconds: float, every: float, ranks: int) -> list[Fault]:
    """Returns the faults: one in each ``every`` seconds, at a random moment in it, as many of each kind.

    Args:
        seed: decides all of it.
        seconds: for how long.
        every: seconds for one fault.
        ranks: that they happen on.
    """
    chance = random.Random(seed)
    number = int(seconds / every)
    kinds = [KINDS[i % len(KINDS)] for i in range(number)]
    chance.shuffle(kinds)
    return [
        Fault((i + chance.random()) * every, kind, chance.randrange(ranks)) for i, kind in enumerate(kinds)
    ]


# A job ---------------------------------------------------------------------------------------------------


class Records:
    """What the ranks of a job have written.

    Args:
        folder: of the job.
        ranks: how many there are.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self.entries: dict[int, list[int]] = defaultdict(list)  # pids by rank
        self.steps: dict[int, list[tuple[float, int]]] = defaultdict(list)  # moments and steps by rank
        for rank in range(ranks):
            path = folder / f"rank-{rank}.jsonl"
            for line in path.read_text().splitlines() if path.exists() else ():
                record = json.loads(line)
                if record["event"] == "enter":
                    self.entries[rank].append(record["pid"])
                else:
                    self.steps[rank].append((record["monotonic"], record["step"]))
        # The most that each rank had done at each moment. A step is done once all ranks have done it, or have
        # gone on behind it: with live state a new process need not have done the last one itself.
        self.moments = {rank: [moment for moment, _ in self.steps[rank]] for rank in range(ranks)}
        self.reached = {
            rank: list(itertools.accumulate((step + 1 for _, step in self.steps[rank]), max))
            for rank in range(ranks)
        }

    def useful(self, moment: float) -> int:
        """Returns how many steps were done by a moment, each counted once."""
        counts = []
        for rank, moments in self.moments.items():
            lines = bisect.bisect_right(moments, moment)
            counts.append(self.reached[rank][lines - 1] if lines else 0)
        return min(counts)

    def when(self, steps: int) -> float:
        """Returns the moment at which so many steps were done."""
        return max(
            self.moments[rank][bisect.bisect_left(reached, steps)] for rank, reached in self.reached.items()
        )

    def again(self, begin: float, end: float) -> int:
        """Returns how many steps were done again between two moments, on the rank with most of them."""
        most = 0
        for rank, steps in self.steps.items():
            reached, count = 0, 0
            for (moment, step), after in zip(steps, self.reached[rank], strict=True):
                count += step < reached and begin < moment <= end
                reached = after
            most = max(most, count)
        return most


def commands(system: System, ranks: int, worker: list[str]) -> list[list[str]]:
    """Returns the command of each launcher of a job."""
    python, name = system.implementation.python, system.implementation.name
    if name == OURS:
        options = [
            f"--nproc-per-node={ranks + system.spares}",
            f"--max-rank-restarts={RESTARTS}",
            f"--max-restarts={RESTARTS}",
        ]
        return [[python, "-m", "ft_wrapper.run", *options, *worker]]
    if name == TORCHRUN:
        options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
        return [[python, "-m", "torch.distributed.run", *options, f"--max-restarts={RESTARTS}", *worker]]
    # NVRx's launcher leaves the ranks to its wrapper until too few agents have all of theirs, and starts all
    # ranks then. So there is an agent for each rank, as its documentation advises. There is no spare: four
    # ranks that wait for ever for the store of a killed rank 0 would be enough for the launcher.
    endpoint = f"127.0.0.1:{free_port_pair()}"
    launcher = [python, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher"]
    options = [f"--nnodes={ranks}", "--nproc-per-node=1", f"--max-restarts={RESTARTS}"]
    options += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=goodput"]
    options += ["--local-addr=127.0.0.1", "--monitor-interval=0.5", "--ft-restart-policy=min-healthy"]
    options += ["--ft-enable-nic-monitor=False"]
    return [[*launcher, *options, f"--rdzv-conf=is_host={int(i == 0)}", *worker] for i in range(ranks)]


def settings(system: System, hang: float) -> tuple[dict[str, float], float]:
    """Returns the wrapper's settings and the process group's timeout, in seconds; 0: torch's default.

    Args:
        system: whose.
        hang: seconds after which a rank that hangs is ended, by whatever notices it.
    """
    name = system.implementation.name
    if name == TORCHRUN:
        return {}, hang
    if name == OURS:
        return {}, 0.0  # hangs are found by evidence
    timeouts = {"soft_timeout": hang / 2, "hard_timeout": hang}
    # NVRx does not free what waits in a gloo collective. Its examples give gloo a timeout, which does.
    return {**system.implementation.settings, **timeouts}, hang / 2


def ends_before(job_: Job, moment: float) -> bool:
    """Waits until a moment; returns whether all launchers of the job have ended before it."""
    for process in job_.started:
        try:
            process.wait(timeout=max(0.0, moment - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
    return True


def deliver(fault: Fault, index: int, store: Store, job_: Job, end: float) -> float | None:
    """Lets a fault happen. One that comes while its rank does not train waits until it has done a step.

    Args:
        fault: what.
        index: its number.
        store: the driver's.
        job_: the job.
        end: when to give up.

    Returns:
        The moment at which it happened; None if it did not.
    """
    rank = fault.rank
    if fault.kind != KILL:
        store.set(f"fault/{rank}", f"{index} {fault.kind}")
        if await_key(store, f"happened/{index}", end - time.monotonic(), job_):
            return float(store.get(f"happened/{index}"))
        return None
    entry = store.add(f"entries/{rank}", 0)
    while await_key(store, f"entry/{rank}/{entry}", end - time.monotonic(), job_):
        try:
            process = psutil.Process(int(store.get(f"entry/{rank}/{entry}")))
            if process in job_.processes() and process.status() != psutil.STATUS_ZOMBIE:
                at = time.monotonic()
                process.send_signal(signal.SIGKILL)
                return at
        except psutil.NoSuchProcess:
            pass
        entry += 1  # that process is gone: the next one
    return None


def run(folder: Path, system: System, faults: list[Fault], arguments: argparse.Namespace) -> Outcome:
    """Runs one job through its faults.

    Args:
        folder: for the job's files.
        system: what restarts it.
        faults: the schedule.
        arguments: the command line's.

    Raises:
        RuntimeError: the job did not even start; the message holds the end of its output.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    durations, collective_timeout = settings(system, arguments.hang_timeout)
    seconds = arguments.minutes * 60
    with job(folder) as job_:
        task = Task(
            module=system.implementation.module,
            settings=durations,
            store=f"127.0.0.1:{store.port}",
            folder=str(job_.folder),
            limit=round(FORMATION_TIMEOUT + arguments.calm + seconds) + 60,
            ranks=arguments.ranks,
            step=arguments.step,
            every=arguments.checkpoint_every,
            live=system.live,
            own_group_store=system.implementation.own_group_store,
            collective_timeout=collective_timeout,
        )
        for command in commands(system, arguments.ranks, [str(WORKER), task.to_json()]):
            # Without it torch 2.13 reuses the store of the attempt before, and some restarts fail or hang.
            job_.start(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        if not await_key(store, "all begun", FORMATION_TIMEOUT, job_):
            raise RuntimeError(f"{system.name} did not start:\n{job_.complaint()}")
        calm = time.monotonic()
        begin = calm + arguments.calm
        end = begin + seconds
        happened: list[tuple[float, str]] = []
        ended = ends_before(job_, begin)
        for index, fault in enumerate(faults):
            ended = ended or ends_before(job_, begin + fault.at)
            at = None if ended else deliver(fault, index, store, job_, end)
            if at is not None:
                happened.append((at, fault.kind))
        ended = ended or ends_before(job_, end)
        if ended:
            print(f"{system.name} has ended by itself:\n{job_.complaint()}", flush=True)
    records = Records(job_.folder, arguments.ranks)
    return outcome(records, calm, begin, end, happened, ended)


def outcome(
    records: Records, calm: float, begin: float, end: float, happened: list[tuple[float, str]], ended: bool
) -> Outcome:
    """Reads from the records what a job has done.

    Args:
        records: of its ranks.
        calm: when all ranks were training.
        begin: when the time began that counts, with faults.
        end: of that time.
        happened: moment and kind of each fault, in order.
        ended: whether the job ended by itself.
    """
    first, last = records.useful(calm), records.useful(begin)
    step = (records.when(last) - records.when(first)) / max(1, last - first)
    useful = records.useful(end) - last
    lost: dict[str, list[float]] = defaultdict(list)
    nexts = [moment for moment, _ in happened[1:]] + [end]
    for (moment, kind), later in zip(happened, nexts, strict=True):
        lost[kind].append(later - moment - step * (records.useful(later) - records.useful(moment)))
    entries = records.entries
    return Outcome(
        step=step,
        useful=useful,
        again=records.again(begin, end),
        goodput=useful * step / (end - begin),
        faults=len(happened),
        restarts=max(map(len, entries.values())) - 1,
        processes=len({pid for pids in entries.values() for pid in pids}) - len(entries),
        lost=lost,
        ended=ended,
    )


# All of them ---------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace, systems: list[System], folder: Path) -> dict[str, list[Outcome]]:
    """Runs all jobs, and prints a line for each."""
    outcomes: dict[str, list[Outcome]] = {system.name: [] for system in systems}
    for number in range(arguments.runs):
        faults = schedule(arguments.seed + number, arguments.minutes * 60, arguments.every, arguments.ranks)
        with concurrent.futures.ThreadPoolExecutor(len(systems) if arguments.at_once else 1) as threads:
            running = {
                system.name: threads.submit(run, folder, system, faults, arguments) for system in systems
            }
            try:
                for name, future in running.items():
                    try:
                        one = future.result()
                    except RuntimeError as error:  # it did not start: still measure the others
                        print(error, flush=True)
                        continue
                    outcomes[name].append(one)
                    print(f"{name}: {one.goodput:.1%}, {one.faults} of {len(faults)} faults", flush=True)
            except BaseException:  # Ctrl-C, or SIGTERM: the threads wait for what ends here
                threads.shutdown(wait=False, cancel_futures=True)
                for process in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                raise
    return outcomes


def rows(outcomes: dict[str, list[Outcome]]) -> list[list[str]]:
    """Returns the table's rows: medians of the runs."""

    def middle(name: str, what: str) -> float:
        return median([getattr(one, what) for one in outcomes[name]]) or 0.0

    first = next(iter(outcomes))
    found = []
    for name, all_ in outcomes.items():
        if not all_:
            found.append([name, "not started", *["-"] * (len(HEADERS) - 2)])
            continue
        lost = [median([each for one in all_ for each in one.lost.get(kind, [])]) for kind in KINDS]
        found.append(
            [
                name,
                f"{middle(name, 'goodput'):.1%}",
                ratio(middle(first, "goodput"), middle(name, "goodput")),
                duration(middle(name, "step")),
                *(f"{middle(name, what):g}" for what in COUNTS),
                *map(duration, lost),
                "yes" if any(one.ended for one in all_) else "no",
            ]
        )
    return found


def print_comparison(arguments: argparse.Namespace, outcomes: dict[str, list[Outcome]]) -> None:
    """Prints the table."""
    order = "all at once" if arguments.at_once else "one after the other"
    print(
        f"\nA fault every {arguments.every:g} s for {arguments.minutes:g} min, {arguments.ranks} ranks, seed "
        f"{arguments.seed}, {order}: medians of {arguments.runs} run{'s' * (arguments.runs > 1)}"
    )
    print(table(HEADERS, rows(outcomes)))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.set_defaults(only=[OURS, NVRX_50MS, TORCHRUN])
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, metavar="M", help="of training with faults (default: 10)")
    add("--every", type=float, default=20.0, metavar="S", help="seconds for one fault (default: 20)")
    add("--calm", type=float, default=20.0, metavar="S", help="seconds without faults before (default: 20)")
    add("--seed", type=int, default=0, help="decides the faults (default: 0)")
    add("--runs", type=int, default=1, metavar="N", help="with seeds one after the other (default: 1)")
    add("--ranks", type=int, default=4, metavar="N", help="(default: 4)")
    add("--step", type=float, default=0.1, metavar="S", help="seconds of a step (default: 0.1)")
    add("--checkpoint-every", type=int, default=50, metavar="N", help="steps (default: 50)")
    add("--hang-timeout", type=float, default=10.0, metavar="S", help="a hung rank is ended (default: 10)")
    add("--at-once", action="store_true", help="all systems side by side, not one after the other")
    add("--keep", type=Path, metavar="DIR", help="keep the steps and outputs of all jobs here")
    arguments = parser.parse_args()
    if arguments.ranks < 2 or arguments.runs < 1:
        parser.error(f"--ranks {arguments.ranks} --runs {arguments.runs}: at least 2 ranks and 1 run")
    for name in ("minutes", "every", "calm", "step", "checkpoint_every", "hang_timeout"):
        if getattr(arguments, name) <= 0:
            option = name.replace("_", "-")
            parser.error(f"--{option} {getattr(arguments, name)}: has to be more than 0")
    own_all_descendants()
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="goodput-"))
    try:
        implementations = chosen(arguments)
        ours = [each for each in implementations if each.name == OURS]
        systems = [System(each, live=True, spares=spares) for spares in (1, 0) for each in ours]
        systems += [System(each, live=False) for each in implementations]
        outcomes = measure(arguments, systems, folder)
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print_comparison(arguments, outcomes)


if __name__ == "__main__":
    main()
