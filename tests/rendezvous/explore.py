"""Searches every order of the steps of a few nodes within a bound, from the command line.

For example::

    python tests/rendezvous/explore.py --nodes 3
    python tests/rendezvous/explore.py --nodes 2 --departures 2 --processes 2
    python tests/rendezvous/explore.py --nodes 2 --happenings 2

See docs/rendezvous.md for what is searched, and what is left out.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence

from explored_nodes import HAPPENINGS, Job, search

from ft_wrapper.testing import SchedulerError
from ft_wrapper.testing.exhaustive import Count
from ft_wrapper.testing.explorer import without_logging
from ft_wrapper.testing.seen import MOST_LEFT
from ft_wrapper.testing.workers import share

_TRACE_LINES = 60
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Searches as the command line says; returns the exit code: 1 if something went wrong."""
    parser = argparse.ArgumentParser(description="Searches every order of the steps of a few nodes.")
    parser.add_argument("--nodes", type=int, default=3, help="that begin (default: %(default)s)")
    parser.add_argument("--departures", type=int, default=0, help="see docs/rendezvous.md (%(default)s)")
    parser.add_argument("--happenings", type=int, default=1, help="in one run, at the most (%(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=HAPPENINGS, default=HAPPENINGS, help="what can happen")
    parser.add_argument("--processes", type=int, default=1, help="share the work (default: %(default)s)")
    options = parser.parse_args(arguments)
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
