"""Explores simulated jobs: at random from seeds, or every schedule within a bound."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import random
import time
import warnings
from collections.abc import Callable, Generator, Iterator

from ..rank_assignment import RankAssignment
from .exhaustive import Branch, Count, Search
from .failure import Failure, attempt
from .policies import Policy, RandomPolicy, ReplayPolicy, RunOnPolicy
from .process import SimulatedProcess
from .scenario import Scenario
from .scheduler import Event, SchedulerError
from .seen import MOST_LEFT, Seen, SeenByAll
from .shrink import Shrinker
from .simulation import Simulation, StoreFactory
from .workers import share

CHUNK = 50

# Room for the states of `EXHAUSTIVE`, and for those that each departure adds.
_ROOM = 2**22
_MORE_ROOM = 8

EXHAUSTIVE = Scenario(
    members=3, active=2, steps=1, on_join="now", heartbeat_interval=20.0, heartbeat_timeout=70.0
)
"""The job of `exhaustively`. Its monitors beat seldom: what they do comes on top only where ranks wait."""


@dataclasses.dataclass
class Report:
    """What an exploration came to.

    Args:
        count: how much was tried.
        seconds: how long it took.
        seed: of the failure, if the exploration was at random.
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
        scenario: from a seed to a scenario, for what is done at random.
    """

    stores: StoreFactory | None = None
    rank_assignment: Callable[[], RankAssignment] | None = None
    scenario: Callable[[int], Scenario] = Scenario.random

    def simulation(self, scenario: Scenario, policy: Policy) -> Simulation:
        """One job."""
        return Simulation(scenario, policy=policy, stores=self.stores, rank_assignment=self.rank_assignment)

    # At random -------------------------------------------------------------------------------------------

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
            progress: told from time to time how far it has come.
            seconds: after which no further jobs are begun.
        """
        first = new_seed() if seed is None else seed
        report, start = Report(Count()), time.monotonic()

        def work(part: int) -> tuple[Count, int | None]:
            return self._chunk(range(first + part * CHUNK, first + min(count, (part + 1) * CHUNK)))

        results = share(work, -(-count // CHUNK), processes)
        for done, failed in results:
            report.count += done
            if progress is not None:
                progress(report.count)
            if failed is not None:
                results.close()
                report.seed, report.failure = failed, self.replay(failed)
                break
            if time.monotonic() - start >= seconds:
                results.close()
                break
        report.seconds = time.monotonic() - start
        return report

    def _chunk(self, seeds: range) -> tuple[Count, int | None]:
        count = Count()
        with without_logging():
            for seed in seeds:
                simulation = self.simulation(self.scenario(seed), RandomPolicy(seed))
                try:
                    simulation.run()
                except SchedulerError:
                    return count, seed
                count += Count(1, 1, 0, simulation.scheduler.steps)
        return count, None

    def replay(self, seed: int) -> Failure | None:
        """Runs the job of a seed again; None if all goes well."""
        with without_logging():
            return attempt(self.simulation, self.scenario(seed), RandomPolicy(seed))

    def shrink(self, failure: Failure) -> Failure:
        """A smaller job that goes wrong in the same way."""
        with without_logging():
            return Shrinker(self.simulation, failure).shrink()

    # Exhaustively ----------------------------------------------------------------------------------------

    def exhaustively(
        self,
        departures: int = 0,
        processes: int = 1,
        scenario: Scenario = EXHAUSTIVE,
        progress: Callable[[Count], None] | None = None,
    ) -> Report:
        """Makes every run within a bound of one job in which one process crashes and one is started.

        Any process may crash just before any of its steps, and while all wait; a process may be started for
        any slot between any two steps, whether the slot's first one lives or not. Neither has to happen.

        Args:
            departures: at how many places a schedule may depart from that in which everyone runs on, beside
                the crash and the start.
            processes: how many processes share the work.
            scenario: the job.
            progress: told from time to time how far it has come.
        """
        if not 0 <= departures <= MOST_LEFT:
            raise ValueError(f"departures={departures} must lie in 0..{MOST_LEFT}")
        report, start = Report(Count()), time.monotonic()
        # Made before there are other processes: they all use it.
        seen = SeenByAll(_ROOM * _MORE_ROOM**departures)

        def whole(slot: int) -> _Part:
            return self._search(scenario, slot, departures, seen, None)

        def rest(number: int) -> _Part:
            slot, branches = parts[number]
            return self._search(scenario, slot, departures, seen, branches)

        parts: list[tuple[int, list[Branch]]] = []
        good = self._put_together(share(whole, scenario.members, processes), report, parts, progress)
        if good:
            parts.sort(key=lambda part: len(part[1]), reverse=True)  # the long ones first
            self._put_together(share(rest, len(parts), processes), report, [], progress)
        report.seconds = time.monotonic() - start
        return report

    def _put_together(
        self,
        results: Generator[_Part, None, None],
        report: Report,
        parts: list[tuple[int, list[Branch]]],
        progress: Callable[[Count], None] | None,
    ) -> bool:
        for part in results:
            report.count += part.count
            parts += [(part.slot, branches) for branches in part.put_aside]
            if progress is not None:
                progress(report.count)
            if part.failure is not None:
                results.close()
                report.failure = part.failure
                return False
        return True

    def _search(
        self, scenario: Scenario, slot: int, departures: int, seen: Seen, start: list[Branch] | None
    ) -> _Part:
        """One part: all that comes before a crash, what follows one at each place put aside; or that."""
        search = Search(
            functools.partial(self._crash_and_start, scenario, slot),
            departures,
            split_at=_place_of_crash if start is None else None,
            from_first=True,
            seen=seen,
        )
        failure = None
        with without_logging():
            try:
                search.run(start)
            except SchedulerError as error:
                replay = ReplayPolicy(search.choices, RunOnPolicy())
                failure = attempt(
                    lambda scenario, policy: self._crash_and_start(scenario, slot, policy), scenario, replay
                )
                if failure is None:
                    raise RuntimeError(f"a run cannot be repeated: {error.what}") from error
        return _Part(slot, search.count, list(search.parts.values()), failure)

    def _crash_and_start(self, scenario: Scenario, slot: int, policy: Policy) -> Simulation:
        simulation = self.simulation(scenario, policy)
        scheduler = simulation.scheduler
        crashed: list[SimulatedProcess] = []

        def add_crash(process: SimulatedProcess) -> None:
            task = process.task
            assert task is not None

            def crash() -> None:
                crashed.append(process)
                simulation.crash(process)

            scheduler.add_event(
                f"crash of {process.name}",
                crash,
                lambda: not crashed and not task.done,
                task,
            )

        def begin() -> None:
            add_crash(simulation.start(slot))

        for process in simulation.processes:
            add_crash(process)
        another = scheduler.add_event(f"start of another rank {slot}", begin)
        scheduler.add_state(lambda: (another.name if another in scheduler.events else "", bool(crashed)))
        return simulation


@dataclasses.dataclass(frozen=True)
class _Part:
    slot: int
    count: Count
    put_aside: list[list[Branch]]
    failure: Failure | None


def _place_of_crash(event: Event) -> str | None:
    return None if event.task is None else f"{event.name} {event.task.steps}"


def new_seed() -> int:
    """A seed that no one has chosen."""
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
