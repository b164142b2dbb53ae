"""From a run that goes wrong to a smaller one that goes wrong in the same way."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

from .exhaustive import Search
from .failure import Failure, Make, attempt, kind_of
from .policies import Policy, RandomPolicy, ReplayPolicy, RunOnPolicy, Switch, SwitchPolicy
from .scenario import Disturbance, Scenario
from .scheduler import SchedulerError

SEEDS = 20
"""With how many seeds a smaller scenario is tried before it is given up."""
MOST_RUNS = 3_000
_MOST_DEPARTURES = 3
_LAST_STEP = 50


class Shrinker:
    """Makes a failure smaller for as long as the runs last.

    Args:
        make: makes a simulation.
        failure: what to begin with.
        most_runs: how many runs may be made.

    Attributes:
        failure: the smallest so far that goes wrong in the same way.
        runs: how many were made.
    """

    def __init__(self, make: Make, failure: Failure, most_runs: int = MOST_RUNS) -> None:
        self.failure = failure
        self.runs = 0
        self._make = make
        self._most_runs = most_runs

    def shrink(self) -> Failure:
        """The smallest failure that was found."""
        while any(self._takes(scenario) for scenario in simpler(self.failure.scenario)):
            pass
        self._drop_switches()
        for departures in range(min(len(self.failure.switches), _MOST_DEPARTURES)):
            if self._needs_only(departures):
                break
        return self.failure

    def _takes(self, scenario: Scenario) -> bool:
        """Whether a simpler scenario goes wrong in the same way, in any of some orders."""
        policies: list[Callable[[], Policy]] = [
            lambda: SwitchPolicy(()),
            lambda: SwitchPolicy(self.failure.switches),
            *(lambda seed=seed: RandomPolicy(seed) for seed in range(SEEDS)),
        ]
        return any(self._try(scenario, policy) for policy in policies)

    def _try(self, scenario: Scenario, policy: Callable[[], Policy]) -> bool:
        if self.runs >= self._most_runs:
            return False
        self.runs += 1
        found = attempt(self._make, scenario, policy())
        if found is None or found.kind != self.failure.kind:
            return False
        self.failure = found
        return True

    def _needs_only(self, departures: int) -> bool:
        """Whether so few switches will do, perhaps with the faults at other steps."""
        for scenario in elsewhere(self.failure.scenario):
            search = Search(functools.partial(self._make, scenario), departures)
            try:
                search.run(most=self._most_runs - self.runs)
            except SchedulerError as error:
                if kind_of(error.what) != self.failure.kind:
                    continue
                found = attempt(self._make, scenario, ReplayPolicy(search.choices, RunOnPolicy()))
                assert found is not None
                self.failure = found
                return True
            finally:
                self.runs += search.count.schedules
        return False

    def _drop_switches(self) -> None:
        """Leaves out whatever is not needed: halves first, then quarters, and single ones last."""
        size = max(1, len(self.failure.switches) // 2)
        while True:
            switches = self.failure.switches
            dropped = any(
                self._keeps(switches[:start] + switches[start + size :])
                for start in range(0, len(switches), size)
            )
            if dropped:
                continue
            if size == 1 or self.runs >= self._most_runs:
                return
            size = max(1, size // 2)

    def _keeps(self, switches: Sequence[Switch]) -> bool:
        before = len(self.failure.switches)
        last = self.failure
        if self._try(self.failure.scenario, lambda: SwitchPolicy(switches)):
            if len(self.failure.switches) < before:
                return True
            self.failure = last  # those that were left had no occasion, or met others
        return False


def simpler(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios that are a little simpler, the most so first."""
    disturbances = scenario.disturbances
    for number in range(len(disturbances)):
        yield dataclasses.replace(scenario, disturbances=disturbances[:number] + disturbances[number + 1 :])
    if scenario.members > 2:
        fewer = scenario.members - 1
        yield dataclasses.replace(
            scenario,
            members=fewer,
            active=min(scenario.active, fewer),
            disturbances=tuple(d for d in disturbances if d.slot < fewer),
        )
    usual = Scenario(members=scenario.members, active=scenario.active, steps=1)
    for name in ("calls", "exchange", "endpoint", "on_join", "steps", "step_seconds", "use_libuv"):
        if getattr(scenario, name) != getattr(usual, name):
            yield dataclasses.replace(scenario, **{name: getattr(usual, name)})
    for number, disturbance in enumerate(disturbances):
        for easier in _easier(disturbance):
            changed = (*disturbances[:number], easier, *disturbances[number + 1 :])
            yield dataclasses.replace(scenario, disturbances=changed)


def elsewhere(scenario: Scenario) -> Iterator[Scenario]:
    """The same faults, one of them at another step; the same scenario first."""
    yield scenario
    for number, disturbance in enumerate(scenario.disturbances):
        for step in range(1, _LAST_STEP):
            if step != disturbance.step:
                moved = dataclasses.replace(disturbance, step=step)
                before, after = scenario.disturbances[:number], scenario.disturbances[number + 1 :]
                yield dataclasses.replace(scenario, disturbances=(*before, moved, *after))


def _easier(disturbance: Disturbance) -> Iterator[Disturbance]:
    for step in (disturbance.step // 2, disturbance.step - 1):
        if 0 < step < disturbance.step:
            yield dataclasses.replace(disturbance, step=step)
