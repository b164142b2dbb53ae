"""Explores live state from the command line.

For example, from the root of the repository::

    python -m tests.simulation.live.explorer --job hsdp --random 100000 --processes 2
    python -m tests.simulation.live.explorer --job ddp --places 2 --spares 1 --steps 1 --faults 1 --exhaustive
    python -m tests.simulation.live.explorer --mistake no-vote
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import multiprocessing
import sys
from collections.abc import Sequence

from .job import JOBS, Job
from .mistakes import BY_NAME, Mistake
from .search import Report, at_random, exhaustively, together

PORTION = 500
LAST_EVENTS = 120


def main(arguments: Sequence[str] | None = None) -> int:
    """Searches as the command line says; returns the exit code: 1 if something went wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.live.explorer", description="Explores live state."
    )
    parser.add_argument("--job", choices=sorted(JOBS), help="default: ddp, or the one that shows the mistake")
    parser.add_argument("--random", type=int, default=2000, help="so many schedules (%(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="of the schedules (%(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="share the work (%(default)s)")
    parser.add_argument("--exhaustive", action="store_true", help="all schedules: of a small job")
    parser.add_argument("--from-start", action="store_true", help="with all of the first recovery, too")
    parser.add_argument("--most-seconds", type=float, default=600.0, help="of that search (%(default)s)")
    parser.add_argument("--mistake", choices=sorted(BY_NAME), default="none", help="put into the code")
    parser.add_argument("--places", type=int, help="the first so many of the job's")
    parser.add_argument("--never-permutes", action="store_true", help="survivors keep their places")
    parser.add_argument("--strict-swaps", action="store_true", help="L6 also where shards are permuted")
    parser.add_argument("--late-writes", action="store_true", help="of the register, by who was left out")
    parser.add_argument("--compare-set", action="store_true", help="is how the register is written")
    for name in ("spares", "steps", "faults", "demotions"):
        parser.add_argument(f"--{name}", type=int, help="as in the job")
    options = parser.parse_args(arguments)
    mistake = BY_NAME[options.mistake]
    name = options.job or (mistake.job if options.mistake != "none" else "ddp")
    job = _changed(JOBS[name], options)
    if options.exhaustive:
        report = exhaustively(job, mistake, most_seconds=options.most_seconds, from_start=options.from_start)
    else:
        seeds = range(options.first_seed, options.first_seed + options.random)
        report = _shared(job, seeds, mistake, options.processes)
    print(f"{name}, {mistake.name}: {report.figures()}")
    if not report.is_complete:
        print("not complete")
    if report.failure is None:
        return 0
    failure = report.failure
    print(*failure.trace[-LAST_EVENTS:], sep="\n")
    where = "" if failure.seed is None else f"seed {failure.seed}, "
    print(f"VIOLATION: {where}after {failure.events} events: {failure.what}")
    return 1


def _changed(job: Job, options: argparse.Namespace) -> Job:
    named = {name: getattr(options, name) for name in ("spares", "steps", "faults", "demotions")}
    job = dataclasses.replace(job, **{name: value for name, value in named.items() if value is not None})
    return dataclasses.replace(
        job,
        shards=job.shards[: options.places],
        permutes=not options.never_permutes,
        strict_swaps=options.strict_swaps,
        late_writes=options.late_writes,
        compares=options.compare_set,
    )


def _shared(job: Job, seeds: range, mistake: Mistake, processes: int) -> Report:
    if processes == 1:
        return at_random(job, seeds, mistake)
    portions = [seeds[at : at + PORTION] for at in range(0, len(seeds), PORTION)]
    reports: list[Report] = []
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        for future in [pool.submit(at_random, job, portion, mistake) for portion in portions]:
            reports.append(future.result())
            if reports[-1].failure is not None:
                pool.shutdown(cancel_futures=True)
                break
    return together(reports)


if __name__ == "__main__":
    sys.exit(main())
