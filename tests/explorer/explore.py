"""Explores simulated jobs from the command line.

For example::

    python -m tests.explorer --random 100000 --processes 2
    python -m tests.explorer --replay 4711

``--stores package.module:name`` takes other stores, ``--rank-assignment package.module:name`` another rank
assignment; see `Simulation`.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import itertools
import logging
import math
import multiprocessing
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent import futures
from typing import Any, TypeVar

from ft_wrapper.agent.signals import die_with
from ft_wrapper.rank_assignment import RankAssignment
from ft_wrapper.testing.scheduler import RandomPolicy, SchedulerError, TurnPolicy

from .failure import Failure, Shrinker, attempt
from .scenario import Scenario, StoreFactory
from .simulation import Simulation

_TRACE_LINES = 60
_REPORT_EVERY = 10.0
#: Jobs that a process runs before it says how they went.
CHUNK = 50
_AT_ONCE = 5

T = TypeVar("T")


@dataclasses.dataclass
class Report:
    """What an exploration came to.

    Args:
        schedules: jobs that were run.
        steps: store operations and sleeps in all of them.
        seconds: how long it took.
        seed: of the failure.
        failure: the first run that went wrong; None if there was none.
    """

    schedules: int = 0
    steps: int = 0
    seconds: float = 0.0
    seed: int | None = None
    failure: Failure | None = None


@dataclasses.dataclass(frozen=True)
class Explorer:
    """Explores jobs on certain stores, with a certain rank assignment.

    Args:
        stores: see `Simulation`.
        rank_assignment: see `Simulation`.
        scenario: from a seed to a scenario.
    """

    stores: StoreFactory | None = None
    rank_assignment: Callable[[], RankAssignment] | None = None
    scenario: Callable[[int], Scenario] = Scenario.random

    def simulation(self, scenario: Scenario, policy: TurnPolicy) -> Simulation:
        """One job."""
        return Simulation(scenario, policy=policy, stores=self.stores, rank_assignment=self.rank_assignment)

    def at_random(
        self,
        count: int,
        seed: int | None = None,
        processes: int = 1,
        progress: Callable[[Report], None] | None = None,
        seconds: float = math.inf,
    ) -> Report:
        """Runs jobs from as many seeds in a row. The first that goes wrong ends it.

        Args:
            count: how many.
            seed: the first seed; a new one when None.
            processes: how many processes share the work.
            progress: called with what was tried so far, after every few jobs.
            seconds: starts no further jobs after that long.
        """
        first = new_seed() if seed is None else seed
        report, start = Report(), time.monotonic()

        def work(part: int) -> Report:
            return self._chunk(range(first + part * CHUNK, first + min(count, (part + 1) * CHUNK)))

        with contextlib.closing(share(work, -(-count // CHUNK), processes)) as results:
            for done in results:
                report.schedules += done.schedules
                report.steps += done.steps
                if progress is not None:
                    progress(report)
                if done.seed is not None:
                    report.seed, report.failure = done.seed, self.replay(done.seed)
                    break
                if time.monotonic() - start >= seconds:
                    break
        report.seconds = time.monotonic() - start
        return report

    def _chunk(self, seeds: range) -> Report:
        """Runs some jobs; returns how many went well, and the seed of the first that did not."""
        report = Report()
        with without_logging():
            for seed in seeds:
                simulation = self.simulation(self.scenario(seed), RandomPolicy(seed))
                try:
                    simulation.run()
                except SchedulerError:
                    report.seed = seed
                    break
                report.schedules += 1
                report.steps += simulation.scheduler.steps
        return report

    def replay(self, seed: int) -> Failure | None:
        """Runs the job of a seed again; None if all goes well."""
        with without_logging():
            return attempt(self.simulation, self.scenario(seed), RandomPolicy(seed))

    def shrink(self, failure: Failure) -> Failure:
        """A smaller job that goes wrong in the same way."""
        with without_logging():
            return Shrinker(self.simulation, failure).shrink()


def new_seed() -> int:
    """A seed by chance."""
    return random.SystemRandom().randrange(10**9)


@contextlib.contextmanager
def without_logging() -> Iterator[None]:
    """Formatting the warnings of thousands of simulated jobs would take longer than the jobs."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# Sharing work among processes ------------------------------------------------------------------------------


def share(work: Callable[[int], T], parts: int, processes: int) -> Generator[T, None, None]:
    """Carries out the parts of some work in several processes, and yields the results as they come.

    Closing the iterator starts no further parts and waits for those that run.

    Args:
        work: carries out a part, from 0. It runs in a fork of this process, so it need not be importable; its
            result must be.
        parts: how many parts there are.
        processes: among how many processes they are shared; 1 does everything in this one.

    Raises:
        BrokenProcessPool: one of the processes died.
        Exception: what a part raised.
    """
    if processes <= 1 or parts <= 1:
        yield from map(work, range(parts))
        return
    fork = multiprocessing.get_context("fork")
    following = iter(range(parts))
    with futures.ProcessPoolExecutor(processes, fork, _begin, (work, os.getpid())) as pool:
        # There may be very many parts: only so many wait for a process to become free.
        running = {pool.submit(_carry_out, part) for part in itertools.islice(following, 2 * processes)}
        try:
            while running:
                done, running = futures.wait(running, return_when=futures.FIRST_COMPLETED)
                running |= {pool.submit(_carry_out, part) for part in itertools.islice(following, len(done))}
                for future in done:
                    yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


_work: Callable[[int], Any]


def _begin(work: Callable[[int], Any], parent: int) -> None:
    """Hands a process the work: that cannot be pickled, but comes with the fork."""
    global _work
    _work = work
    die_with(parent)  # a part may last long


def _carry_out(part: int) -> Any:
    return _work(part)


def explore_seeds(run: Callable[[int], str], jobs: int, arguments: Sequence[str] | None = None) -> int:
    """What programs do that run jobs of seeds in a row until one goes wrong, or so many seconds have passed.

    Args:
        run: runs the jobs of a seed; returns what goes wrong, and nothing if all is well.
        jobs: how many those are.
        arguments: the command line's.

    Returns:
        The exit code: 1 if something went wrong.
    """
    parser = argparse.ArgumentParser(description="Runs jobs in orders that are drawn.")
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
            return next(filter(None, map(run, seeds)), ""), len(seeds)

    with contextlib.closing(share(work, len(parts), options.processes)) as results:
        for failure, size in results:
            done += size
            if failure:
                print(f"{failure}\nafter {time.monotonic() - start:.1f} s")
                return 1
            if time.monotonic() - start >= options.seconds:
                break
    seconds = time.monotonic() - start
    print(f"{done:,} seeds from {first}: {jobs * done:,} jobs in {seconds:.0f} s: no violation")
    return 0


# The command line -------------------------------------------------------------------------------------------


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
        prog="python -m tests.explorer",
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
    if report.failure is not None:
        print(f"seed {report.seed} goes wrong: replay it with --replay {report.seed}")
        if options.as_found:
            print(f"{report.failure.what}\nafter {report.schedules + 1:,} schedules\n{report.failure}")
        else:
            print_failure(_smaller(explorer, report.failure))
        return 1
    print(
        f"at random: {report.schedules:,} schedules ({what}), {report.steps:,} steps "
        f"in {report.seconds:.0f} s on {options.processes} processes: no violation"
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
