"""Makes every run of a small simulated job within a bound.

For example, from the root of the repository::

    python -m tests.simulation.exhaustive
    python -m tests.simulation.exhaustive --departures 1 --processes 2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.explorer.explore import Explorer, Progress, add_what_is_tested, print_failure

from .jobs import JOB, every_run
from .seen import MOST_LEFT


def main(arguments: Sequence[str] | None = None) -> int:
    """Searches as the command line says; returns the exit code: 1 if something went wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.exhaustive",
        description="Makes every run of a small job within a bound.",
    )
    parser.add_argument(
        "--departures", type=int, default=0, help="the bound: switches beside the default order (%(default)s)"
    )
    parser.add_argument("--processes", type=int, default=1, help="share the work (default: %(default)s)")
    add_what_is_tested(parser)
    options = parser.parse_args(arguments)
    if not 0 <= options.departures <= MOST_LEFT:
        parser.error(f"--departures {options.departures}: must lie in 0..{MOST_LEFT}")
    if options.processes < 1:
        parser.error(f"--processes {options.processes}: must be at least 1")
    orders = "the order in which everyone runs on until it has to wait"
    if options.departures:
        orders = f"every order that departs from that of running on in at most {options.departures} places"
    what = (
        f"{JOB.members} ranks, at most one crash before any step of any process, after which "
        f"anybody goes on, at most one start of another process for any slot at any step; {orders}"
    )
    print(f"exhaustively: {what}", flush=True)
    explorer = Explorer(options.stores, options.rank_assignment)
    report = every_run(explorer, options.departures, options.processes, progress=Progress())
    if report.failure is not None:
        print_failure(report.failure)
        return 1
    count = report.count
    print(
        f"exhaustively: {count.schedules:,} schedules, {count.complete:,} of them to their end, the others "
        f"to a state that was gone into before; {count.states:,} states, {count.steps:,} steps in "
        f"{report.seconds:.0f} s on {options.processes} processes: no violation"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
