"""Searches every order of the steps of a few nodes within a bound, or orders at random.

For example::

    python tests/simulation/rendezvous/explore.py --nodes 3
    python tests/simulation/rendezvous/explore.py --nodes 2 --departures 2 --processes 2
    python tests/simulation/rendezvous/explore.py --nodes 2 --happenings 2
    python tests/simulation/rendezvous/explore.py --random 1000 --seed 0 --processes 2

See docs/rendezvous.md for what is searched, and what is left out.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # it is run as a program
sys.path.insert(0, str(Path(__file__).parents[1]))

from disturbed_worlds import disturbed_world
from exhaustive.search import Count
from exhaustive.seen import MOST_LEFT
from explored_nodes import HAPPENINGS, Job, search
from simulated_nodes import random_world

from ft_wrapper.testing import SchedulerError
from tests.explorer.explore import share, without_logging

_TRACE_LINES = 60
_AT_ONCE = 5
POLICIES = (
    (False, True),
    (True, True),
    (True, False),
)  # whether it is `rank`, whether a node hosts the store


def jobs(nodes: int, happenings: int = 1, kinds: Sequence[str] = HAPPENINGS) -> Iterator[Job]:
    """Jobs that so many nodes begin: all needed, one less needed, one too many; under both policies.

    Under ``rank`` also where the store of the workers outlives the nodes.

    Args:
        nodes: how many.
        happenings: so many happen in one run, of each combination of kinds.
        kinds: what can happen.
    """
    sizes = sorted({(nodes, nodes), (max(1, nodes - 1), nodes), (1, max(1, nodes - 1))})
    for happen in itertools.combinations_with_replacement(kinds, happenings):
        for (low, high), (rank_policy, hosted) in itertools.product(sizes, POLICIES):
            yield Job(nodes, low, high, rank_policy, tuple(sorted(set(happen))), happenings, hosted)


def run_random(seed: int) -> str:
    """Runs two jobs at random, a small one and one with more happening to it.

    Returns:
        What does not hold, and the last steps; empty if nothing is wrong.
    """
    for make in (disturbed_world, random_world):
        try:
            make(seed).scheduler.run()
        except SchedulerError as error:
            steps = str(error).splitlines()[-_TRACE_LINES - 2 : -2]
            lines = [line[:200] for line in steps]
            return "\n".join([*lines, f"seed {seed} goes wrong in {make.__name__}", error.what[:500]])
    return ""


def search_at_random(first: int, count: int, processes: int, seconds: float) -> int:
    """Runs jobs at random until one goes wrong, or so many seconds have passed; returns the exit code."""
    start, done = time.monotonic(), 0
    parts = range(first, first + count, _AT_ONCE)

    def work(part: int) -> tuple[str, int]:
        seeds = range(parts[part], min(parts[part] + _AT_ONCE, first + count))
        with without_logging():
            return next(filter(None, map(run_random, seeds)), ""), len(seeds)

    results = share(work, len(parts), processes)
    for failure, size in results:
        done += size
        if failure:
            results.close()
            print(f"{failure}\nafter {time.monotonic() - start:.1f} s")
            return 1
        if time.monotonic() - start >= seconds:
            results.close()
            break
    print(f"{done:,} seeds from {first}: {2 * done:,} jobs in {time.monotonic() - start:.0f} s: no violation")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Searches as the command line says; returns the exit code: 1 if something went wrong."""
    parser = argparse.ArgumentParser(description="Searches every order of the steps of a few nodes.")
    parser.add_argument("--nodes", type=int, default=3, help="that begin (default: %(default)s)")
    parser.add_argument("--departures", type=int, default=0, help="see docs/rendezvous.md (%(default)s)")
    parser.add_argument("--happenings", type=int, default=1, help="in one run, at the most (%(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=HAPPENINGS, default=HAPPENINGS, help="what can happen")
    parser.add_argument("--processes", type=int, default=1, help="share the work (default: %(default)s)")
    parser.add_argument("--random", type=int, default=0, help="orders at random instead, from so many seeds")
    parser.add_argument("--seed", type=int, default=0, help="the first of them (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end --random after so many")
    options = parser.parse_args(arguments)
    if options.random:
        return search_at_random(options.seed, options.random, options.processes, options.seconds)
    for name, least in (("nodes", 1), ("departures", 0), ("happenings", 0), ("processes", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} {getattr(options, name)}: must be at least {least}")
    if options.departures > MOST_LEFT:
        parser.error(f"--departures {options.departures}: must be at most {MOST_LEFT}")
    parts, total, start = (
        list(jobs(options.nodes, options.happenings, options.kinds)),
        Count(),
        time.monotonic(),
    )

    def work(part: int) -> tuple[Count, str]:
        try:
            with without_logging():
                return search(parts[part], options.departures), ""
        except SchedulerError as error:
            lines = str(error).splitlines()[-_TRACE_LINES:]
            return Count(), "\n".join([*lines, str(parts[part])])

    results = share(work, len(parts), options.processes)
    for count, failure in results:
        total += count
        if failure:
            results.close()
            print(failure)
            return 1
    print(
        f"{options.nodes} nodes, {options.departures} departures, {options.happenings} happenings of "
        f"{', '.join(options.kinds)}: "
        f"{len(parts)} jobs, {total.schedules:,} schedules, {total.complete:,} of them to their end, "
        f"{total.states:,} states, {total.steps:,} steps in {time.monotonic() - start:.0f} s on "
        f"{options.processes} processes: no violation"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
