"""Explores simulated jobs from the command line.

For example::

    python -m ft_wrapper.testing.explore --random 100000 --processes 2
    python -m ft_wrapper.testing.explore --replay 4711

``--stores package.module:name`` takes other stores, ``--rank-assignment package.module:name`` another rank
assignment; see `Simulation`.
"""

import argparse
import functools
import importlib
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from .explorer import Explorer, new_seed, without_logging
from .failure import Failure
from .policies import RandomPolicy
from .scenario import Scenario

_TRACE_LINES = 60
_REPORT_EVERY = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Explores as the command line says; returns the exit code: 1 if something went wrong."""
    options = _parse(arguments)
    scenario = functools.partial(Scenario.random, max_members=options.members, max_faults=options.faults)
    explorer = Explorer(options.stores, options.rank_assignment, scenario)
    if options.replay is not None:
        return _replay(explorer, options.replay, options.shrink)
    return _at_random(explorer, options)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ft_wrapper.testing.explore",
        description="Explores simulated jobs and checks after every step what must always hold.",
    )
    parser.add_argument("--random", type=int, metavar="N", help="run N jobs from seeds in a row")
    parser.add_argument("--seed", type=int, help="the first of them; a new one by default")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin none after so many seconds")
    parser.add_argument("--as-found", action="store_true", help="do not make smaller what goes wrong")
    parser.add_argument("--members", type=int, default=8, help="ranks at the most (default: %(default)s)")
    parser.add_argument("--faults", type=int, default=3, help="faults at the most (default: %(default)s)")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run a seed's job and show who did what")
    parser.add_argument("--shrink", action="store_true", help="make it smaller first, if it goes wrong")
    parser.add_argument("--processes", type=int, default=1, help="share the work (default: %(default)s)")
    add_what_is_tested(parser)
    options = parser.parse_args(arguments)
    if options.random is None and options.replay is None:
        parser.error("nothing to do: give --random or --replay")
    if options.seconds <= 0:
        parser.error(f"--seconds {options.seconds:g}: must be positive")
    for name, least in (("random", 1), ("members", 2), ("faults", 0), ("processes", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            parser.error(f"--{name} {value}: must be at least {least}")
    return options


def add_what_is_tested(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name a store and a rank assignment of one's own."""
    parser.add_argument("--stores", type=_named, metavar="MODULE:NAME", help="other stores")
    parser.add_argument(
        "--rank-assignment", type=_named, metavar="MODULE:NAME", help="makes another rank assignment"
    )


def _named(text: str) -> Any:
    module, _, name = text.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be MODULE:NAME of something: {error}") from None


def _at_random(explorer: Explorer, options: argparse.Namespace) -> int:
    seed = new_seed() if options.seed is None else options.seed
    last = seed + options.random - 1
    what = f"2 to {options.members} ranks, up to {options.faults} faults, seeds {seed} to {last}"
    print(f"at random: {what}", flush=True)
    progress = Progress(options.random)
    report = explorer.at_random(options.random, seed, options.processes, progress, options.seconds)
    count = report.count
    if report.failure is not None:
        print(f"seed {report.seed} goes wrong: replay it with --replay {report.seed}")
        if options.as_found:
            print(f"{report.failure.what}\nafter {count.schedules + 1:,} schedules\n{report.failure}")
        else:
            print_failure(_smaller(explorer, report.failure))
        return 1
    print(
        f"at random: {count.schedules:,} schedules ({what}), {count.steps:,} steps in {report.seconds:.0f} s "
        f"on {options.processes} processes: no violation"
    )
    return 0


def _replay(explorer: Explorer, seed: int, shrink: bool) -> int:
    print(f"seed {seed}: {explorer.scenario(seed)}")
    failure = explorer.replay(seed)
    if failure is not None:
        print_failure(_smaller(explorer, failure) if shrink else failure, trace_lines=None)
        return 1
    with without_logging():
        simulation = explorer.simulation(explorer.scenario(seed), RandomPolicy(seed))
        simulation.run()
    print(simulation.scheduler.trace())
    for process in simulation.processes:
        print(f"{process.name} ({process.member}): {process.fate}")
    return 0


def _smaller(explorer: Explorer, failure: Failure) -> Failure:
    print(f"{failure.what}\nmaking it smaller ...", flush=True)
    return explorer.shrink(failure)


def print_failure(failure: Failure, trace_lines: int | None = _TRACE_LINES) -> None:
    """Prints the last lines of a failure's trace, all when None, and then what happened."""
    trace = failure.trace.splitlines()
    print("\n".join(trace if trace_lines is None else trace[-trace_lines:]))
    print(f"\n{failure}")


class Progress:
    """Prints every 10 seconds, to the standard error, how far it is.

    Args:
        of: how many schedules there will be, if that is known.
    """

    def __init__(self, of: int = 0) -> None:
        self._of = f" of {of:,}" if of else ""
        self._start = self._said = time.monotonic()

    def __call__(self, count: Any) -> None:
        now = time.monotonic()
        if now - self._said < _REPORT_EVERY:
            return
        self._said = now
        rate = count.schedules / (now - self._start)
        print(f"  {count.schedules:,}{self._of} schedules, {rate:.0f} a second", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
