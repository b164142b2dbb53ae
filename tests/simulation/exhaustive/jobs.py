"""Every run, within a bound, of a job in which one process crashes and one is started."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Generator

from ft_wrapper.testing.scheduler import ReplayPolicy, SchedulerError, TurnPolicy
from tests.explorer.explore import Explorer, share, without_logging
from tests.explorer.failure import Failure, SwitchPolicy, attempt
from tests.explorer.process import SimulatedProcess
from tests.explorer.scenario import Scenario
from tests.explorer.simulation import Simulation

from .search import Branch, Count, Search
from .seen import MOST_LEFT, Seen, SeenByAll
from .simulated import SearchedSimulation
from .states import Event

JOB = Scenario(members=3, active=2, steps=1, on_join="now", heartbeat_interval=20.0, heartbeat_timeout=70.0)
"""What is searched by default. Its monitors beat seldom: what they do comes on top only where ranks wait."""

# Room for the states of `JOB`, and for those that each departure adds.
_ROOM = 2**22
_MORE_ROOM = 8


@dataclasses.dataclass
class Report:
    """What a search came to.

    Args:
        count: how much was tried.
        seconds: how long it took.
        failure: the first run that went wrong; None if there was none.
    """

    count: Count
    seconds: float = 0.0
    failure: Failure | None = None


def every_run(
    explorer: Explorer,
    departures: int = 0,
    processes: int = 1,
    scenario: Scenario = JOB,
    progress: Callable[[Count], None] | None = None,
) -> Report:
    """Makes every run within a bound of one job in which one process crashes and one is started.

    Any process may crash just before any of its steps, and while all wait; a process may be started for any
    slot between any two steps, whether the slot's first one lives or not. Neither has to happen.

    Args:
        explorer: makes the job: its stores and its rank assignment.
        departures: at how many places a schedule may depart from that in which everyone runs on, beside the
            crash and the start.
        processes: how many processes share the work.
        scenario: the job.
        progress: called with what was tried so far, from time to time.
    """
    if not 0 <= departures <= MOST_LEFT:
        raise ValueError(f"departures={departures} must lie in 0..{MOST_LEFT}")
    report, start = Report(Count()), time.monotonic()
    # Made before there are other processes: they all use it.
    seen = SeenByAll(_ROOM * _MORE_ROOM**departures)

    def whole(slot: int) -> _Part:
        return _search(explorer, scenario, slot, departures, seen, None)

    def rest(number: int) -> _Part:
        slot, branches = parts[number]
        return _search(explorer, scenario, slot, departures, seen, branches)

    parts: list[tuple[int, list[Branch]]] = []
    good = _put_together(share(whole, scenario.members, processes), report, parts, progress)
    if good:
        parts.sort(key=lambda part: len(part[1]), reverse=True)  # the long ones first
        _put_together(share(rest, len(parts), processes), report, [], progress)
    report.seconds = time.monotonic() - start
    return report


@dataclasses.dataclass(frozen=True)
class _Part:
    slot: int
    count: Count
    put_aside: list[list[Branch]]
    failure: Failure | None


def _put_together(
    results: Generator[_Part, None, None],
    report: Report,
    parts: list[tuple[int, list[Branch]]],
    progress: Callable[[Count], None] | None,
) -> bool:
    """Adds results to a report as they come; False as soon as something went wrong."""
    with contextlib.closing(results):
        for part in results:
            report.count += part.count
            parts += [(part.slot, branches) for branches in part.put_aside]
            if progress is not None:
                progress(report.count)
            if part.failure is not None:
                report.failure = part.failure
                return False
    return True


def _search(
    explorer: Explorer,
    scenario: Scenario,
    slot: int,
    departures: int,
    seen: Seen,
    start: list[Branch] | None,
) -> _Part:
    """One part: all that comes before a crash, what follows one at each place put aside; or that."""
    search = Search(
        lambda policy: _crash_and_start(explorer, slot, scenario, policy),
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
            replay = ReplayPolicy(search.choices, SwitchPolicy(()))
            failure = attempt(functools.partial(_crash_and_start, explorer, slot), scenario, replay)
            if failure is None:
                raise RuntimeError(f"a run cannot be repeated: {error.what}") from error
    return _Part(slot, search.count, list(search.parts.values()), failure)


def _place_of_crash(event: Event) -> str | None:
    return None if event.task is None else f"{event.name} {event.task.steps}"


def _crash_and_start(explorer: Explorer, slot: int, scenario: Scenario, policy: TurnPolicy) -> Simulation:
    """A job in which a process may crash, and another one may be started for a slot."""
    simulation = SearchedSimulation(
        scenario, policy=policy, stores=explorer.stores, rank_assignment=explorer.rank_assignment
    )
    scheduler = simulation.scheduler
    crashed: list[SimulatedProcess] = []

    def add_crash(process: SimulatedProcess) -> None:
        task = process.task
        assert task is not None

        def crash() -> None:
            crashed.append(process)
            simulation.crash(process)

        scheduler.add_event(f"crash of {process.name}", crash, lambda: not crashed and not task.done, task)

    for process in simulation.processes:
        add_crash(process)
    another = scheduler.add_event(f"start of another rank {slot}", lambda: add_crash(simulation.start(slot)))
    scheduler.add_state(lambda: (another.name if another in scheduler.events else "", bool(crashed)))
    return simulation
