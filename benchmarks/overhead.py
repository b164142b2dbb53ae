"""What a wrapper costs a job without faults.

    python benchmarks/overhead.py                 # a few minutes
    python benchmarks/overhead.py --minutes 10    # the monitor's memory after ten minutes of training
    python benchmarks/overhead.py --quick         # under two minutes

``ping``, ``atomic``, entering and leaving a wrapped call with one rank, a training step with and without the
wrapper, and what runs beside the ranks, memory and CPU time: for ft_wrapper, NVRx 0.4.1 with its defaults,
NVRx with every interval at 50 ms, and, where there is something to measure, torchrun.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from figures import duration, ratio, table
from jobs import Job, job, own_all_descendants
from overhead_worker import Measure
from peers import NAMES, OURS, TORCHRUN, Implementation, add_arguments, chosen

WORKER = Path(__file__).resolve().parent / "overhead_worker.py"
RANKS = 2  # of the job whose monitors are measured
NOTHING = "no wrapper"
MIB = 1 << 20


def measure_of(implementation: Implementation, what: str, result: Path, limit: float) -> Measure:
    """Returns what the processes of a job do, for an implementation."""
    return Measure(implementation.module, implementation.settings, what, str(result), round(limit))


def run_alone(folder: Path, implementation: Implementation, measure: Measure) -> dict[str, Any]:
    """Runs a job of one rank until it ends by itself, and returns its figures.

    Args:
        folder: for the job's files.
        implementation: whose interpreter runs it.
        measure: what it does; the result's path is filled in.

    Raises:
        RuntimeError: it failed or took too long; the message holds the end of its output.
    """
    with job(folder) as job_:
        result = job_.folder / "result.json"
        line = json.dumps(dataclasses.asdict(dataclasses.replace(measure, result=str(result))))
        job_.start_ranks([implementation.python, str(WORKER), line], 1, events=False)
        status = job_.started[0].wait(timeout=measure.limit + 10)
        if status != 0 or not result.exists():
            raise RuntimeError(
                f"{implementation.name}: {measure.what} ended with {status}:\n{job_.complaint()}"
            )
        figures: dict[str, Any] = json.loads(result.read_text())
        return figures


@dataclasses.dataclass
class Beside:
    """What runs beside the ranks, in sums over a job, by rank.

    Args:
        processes: how many.
        private: bytes that no other process shares.
        pss: bytes, of shared ones the process's part.
        cpu: seconds of CPU time in a second.
    """

    processes: float
    private: float
    pss: float
    cpu: float


def cpu_of(processes: list[psutil.Process]) -> float:
    """Returns the CPU seconds that some processes have used so far."""
    total = 0.0
    for process in processes:
        times = process.cpu_times()
        total += times.user + times.system
    return total


def train_and_look(folder: Path, implementations: list[Implementation], seconds: float) -> dict[str, Beside]:
    """Trains under all implementations at the same time, then measures what runs beside their ranks.

    Args:
        folder: for the jobs' files.
        implementations: whose jobs.
        seconds: to train for.

    Raises:
        RuntimeError: a job did not start, or did not last.
    """
    with ExitStack() as stack:
        jobs: dict[str, Job] = {}
        for implementation in implementations:
            job_ = jobs[implementation.name] = stack.enter_context(job(folder))
            measure = measure_of(implementation, "train", job_.folder / "result", seconds + 180)
            worker = [str(WORKER), json.dumps(dataclasses.asdict(measure))]
            if implementation.name == TORCHRUN:
                launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
                launcher += [f"--nproc-per-node={RANKS}"]
                job_.start([implementation.python, *launcher, *worker], events=False)
            else:
                job_.start_ranks([implementation.python, *worker], RANKS, events=False)
        for name, job_ in jobs.items():
            await_training(name, job_)
        beside = {name: beside_the_ranks(name, job_) for name, job_ in jobs.items()}
        before = {name: cpu_of(processes) for name, processes in beside.items()}
        began = time.monotonic()
        print(f"training for {seconds:.0f} s under {', '.join(jobs)}", flush=True)
        time.sleep(seconds)
        took = time.monotonic() - began
        result = {}
        for name, processes in beside.items():
            if not all(process.is_running() for process in processes):
                raise RuntimeError(f"{name}: what ran beside the ranks has ended:\n{jobs[name].complaint()}")
            memory = [process.memory_full_info() for process in processes]
            result[name] = Beside(
                len(processes) / RANKS,
                sum(m.uss for m in memory) / RANKS,
                sum(m.pss for m in memory) / RANKS,
                (cpu_of(processes) - before[name]) / took / RANKS,
            )
        return result


def await_training(name: str, job_: Job, timeout: float = 120.0) -> None:
    """Waits until all ranks of a job train.

    Raises:
        RuntimeError: they do not, in time.
    """
    deadline = time.monotonic() + timeout
    result = job_.folder / "result"
    while not result.exists() or len(result.read_text().splitlines()) < RANKS:
        if time.monotonic() > deadline or not job_.processes():
            raise RuntimeError(f"{name}: not all ranks train after {timeout:.0f} s:\n{job_.complaint()}")
        time.sleep(0.1)


def beside_the_ranks(name: str, job_: Job) -> list[psutil.Process]:
    """Returns the processes of a job that are no ranks: monitors, or torchrun itself."""
    if name == TORCHRUN:
        return [psutil.Process(job_.started[0].pid)]
    return job_.helpers()


def quartiles(values: list[float]) -> str:
    """Returns the median of some ratios, and the range that holds the middle half of them."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} .. {high:.3f})"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--minutes", type=float, default=1.0, help="of training before memory is measured")
    parser.add_argument("--pairs", type=int, default=10, help="of blocks of training steps (default: 10)")
    parser.add_argument("--block", type=float, default=1.5, help="seconds that a block takes (default: 1.5)")
    parser.add_argument("--quick", action="store_true", help="shorter: 15 s of training, 4 pairs")
    parser.add_argument(
        "--skip", nargs="+", default=[], choices=["calls", "steps", "beside"], help="what not to measure"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.minutes, arguments.pairs, arguments.block = 0.25, 4, 0.7
    if arguments.pairs < 2:
        parser.error(f"--pairs {arguments.pairs}: at least 2, for there is a spread to show")
    own_all_descendants()
    implementations = chosen(arguments)
    folder = Path(tempfile.mkdtemp(prefix="overhead-"))
    began = time.monotonic()
    try:
        rows, names = measure_all(arguments, implementations, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{time.monotonic() - began:.0f} s in all\n")
    peers = [name for name in names if name != OURS]
    print(table(["", *names, *(f"{peer} /" for peer in peers)], rows))


def measure_all(
    arguments: argparse.Namespace, implementations: list[Implementation], folder: Path
) -> tuple[list[list[str]], list[str]]:
    """Measures everything; returns the rows of the table and the names of its columns."""
    names = [name for name in NAMES if name in {i.name for i in implementations}]
    wrappers = [i for i in implementations if i.name != TORCHRUN]
    rows: list[list[str]] = []

    def add(title: str, values: dict[str, float], show: Any) -> None:
        peers = [name for name in names if name != OURS]
        cells = [show(values[name]) if name in values else "-" for name in names]
        ratios = [ratio(values.get(peer), values.get(OURS)) for peer in peers]
        rows.append([title, *cells, *ratios])

    if "calls" not in arguments.skip:
        calls = {}
        for implementation in wrappers:
            measure = measure_of(implementation, "calls", folder, 120)
            calls[implementation.name] = run_alone(folder, implementation, measure)
            print(f"{implementation.name}, calls: {calls[implementation.name]}", flush=True)
        for title, key in (
            ("ping", "ping"),
            ("ping: CPU time in other threads and processes", "ping elsewhere"),
            ("atomic", "atomic"),
            ("entering and leaving a call, 1 rank", "both"),
            ("  entering", "enter"),
            ("  leaving", "leave"),
        ):
            add(title, {name: figures[key] for name, figures in calls.items()}, duration)
    if "steps" not in arguments.skip:
        steps = {}
        nothing = Implementation(NOTHING, implementations[0].python, "")
        for implementation in [nothing, *wrappers]:
            measure = measure_of(
                implementation, "steps", folder, 60 + arguments.pairs * (2 * arguments.block + 5)
            )
            measure = dataclasses.replace(measure, pairs=arguments.pairs, block=arguments.block)
            figures = run_alone(folder, implementation, measure)
            print(f"{implementation.name}, a step of {duration(figures['step'])}", flush=True)
            steps[implementation.name] = figures
        for title, key in (("wall clock", "wall"), ("CPU time", "cpu")):
            cells = [quartiles(steps[name][key]) if name in steps else "-" for name in names]
            low, _, high = statistics.quantiles(steps[NOTHING][key], n=4)
            blank = ["-" for name in names if name != OURS]
            rows.append([f"step with / without, {title} (noise {low:.3f} .. {high:.3f})", *cells, *blank])
    if "beside" not in arguments.skip:
        beside = train_and_look(folder, implementations, arguments.minutes * 60)

        def mib(size: float) -> str:
            return f"{size / MIB:.1f} MiB"

        minutes = f"after {arguments.minutes:g} min"
        add("processes beside a rank", {n: b.processes for n, b in beside.items()}, lambda v: f"{v:g}")
        add(f"  their PSS, {minutes}", {n: b.pss for n, b in beside.items()}, mib)
        add(f"  their private memory, {minutes}", {n: b.private for n, b in beside.items()}, mib)
        add("  their CPU time in a second", {n: b.cpu for n, b in beside.items()}, duration)
    return rows, names


if __name__ == "__main__":
    main()
