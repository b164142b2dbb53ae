"""Explores simulated jobs at random: from seeds, on any number of processes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import multiprocessing
import os
import random
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from concurrent import futures
from typing import Any, TypeVar

from ..agent.process import die_with
from ..rank_assignment import RankAssignment
from .defaults import StoreFactory
from .failure import Failure, Shrinker, attempt
from .policies import Policy, RandomPolicy
from .scenario import Scenario
from .scheduler import SchedulerError
from .simulation import Simulation

CHUNK = 50
"""Jobs that a process runs before it says how they went."""

T = TypeVar("T")


@dataclasses.dataclass
class Count:
    """How much was tried.

    Args:
        schedules: jobs that were run.
        steps: store operations and sleeps in all of them.
    """

    schedules: int = 0
    steps: int = 0

    def __iadd__(self, other: Count) -> Count:
        self.schedules += other.schedules
        self.steps += other.steps
        return self


@dataclasses.dataclass
class Report:
    """What an exploration came to.

    Args:
        count: how much was tried.
        seconds: how long it took.
        seed: of the failure.
        failure: the first run that went wrong; None if there was none.
    """

    count: Count
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

    def simulation(self, scenario: Scenario, policy: Policy) -> Simulation:
        """One job."""
        return Simulation(scenario, policy=policy, stores=self.stores, rank_assignment=self.rank_assignment)

    def at_random(
        self,
        count: int,
        seed: int | None = None,
        processes: int = 1,
        progress: Callable[[Count], None] | None = None,
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
        report, start = Report(Count()), time.monotonic()

        def work(part: int) -> tuple[Count, int | None]:
            return self._chunk(range(first + part * CHUNK, first + min(count, (part + 1) * CHUNK)))

        with contextlib.closing(share(work, -(-count // CHUNK), processes)) as results:
            for done, failed in results:
                report.count += done
                if progress is not None:
                    progress(report.count)
                if failed is not None:
                    report.seed, report.failure = failed, self.replay(failed)
                    break
                if time.monotonic() - start >= seconds:
                    break
        report.seconds = time.monotonic() - start
        return report

    def _chunk(self, seeds: range) -> tuple[Count, int | None]:
        """Runs some jobs; returns how many went well, and the seed of the first that did not."""
        count = Count()
        with without_logging():
            for seed in seeds:
                simulation = self.simulation(self.scenario(seed), RandomPolicy(seed))
                try:
                    simulation.run()
                except SchedulerError:
                    return count, seed
                count += Count(1, simulation.scheduler.steps)
        return count, None

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
