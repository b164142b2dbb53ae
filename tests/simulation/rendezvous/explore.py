"""Runs jobs of nodes in orders that are drawn: small ones, and larger ones with more happening to them.

For example::

    python tests/simulation/rendezvous/explore.py --random 1000 --processes 2

See docs/rendezvous.md for what is simulated.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # it is run as a program

from disturbed_worlds import disturbed_world
from explored_nodes import drawn_job
from simulated_nodes import random_world

from ft_wrapper.testing import SchedulerError
from tests.explorer.explore import share, without_logging

_TRACE_LINES = 60
_AT_ONCE = 5


def run_random(seed: int) -> str:
    """Runs three jobs, each larger than the one before.

    Returns:
        What does not hold, and the last steps; empty if nothing is wrong.
    """
    for make in (drawn_job, random_world, disturbed_world):
        try:
            make(seed).scheduler.run()
        except SchedulerError as error:
            steps = str(error).splitlines()[-_TRACE_LINES - 2 : -2]
            lines = [line[:200] for line in steps]
            return "\n".join([*lines, f"seed {seed} goes wrong in {make.__name__}", error.what[:500]])
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs jobs until one goes wrong, or so many seconds have passed; returns the exit code: 1 if one did."""
    parser = argparse.ArgumentParser(description="Runs jobs of nodes in orders that are drawn.")
    parser.add_argument("--random", type=int, default=1000, help="from so many seeds (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first of them (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="share the work (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after so many")
    options = parser.parse_args(arguments)
    start, done, first, end = time.monotonic(), 0, options.seed, options.seed + options.random
    parts = range(first, end, _AT_ONCE)

    def work(part: int) -> tuple[str, int]:
        seeds = range(parts[part], min(parts[part] + _AT_ONCE, end))
        with without_logging():
            return next(filter(None, map(run_random, seeds)), ""), len(seeds)

    results = share(work, len(parts), options.processes)
    for failure, size in results:
        done += size
        if failure:
            results.close()
            print(f"{failure}\nafter {time.monotonic() - start:.1f} s")
            return 1
        if time.monotonic() - start >= options.seconds:
            results.close()
            break
    print(f"{done:,} seeds from {first}: {3 * done:,} jobs in {time.monotonic() - start:.0f} s: no violation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
