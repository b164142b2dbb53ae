"""From a run that goes wrong to a smaller one that goes wrong in the same way."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

from .failure import Failure, Make, attempt
from .policies import Policy, RandomPolicy, Switch, SwitchPolicy
from .scenario import Scenario

SEEDS = 20
"""With how many seeds a smaller scenario is tried before it is given up."""
MOST_RUNS = 3_000
_LAST_STEP = 50


class Shrinker:
    """Makes a failure smaller for as long as the runs last.

    First fewer faults and fewer ranks, then fewer switches among them, then less of everything else. It is
    smaller in the first of these that differs.

    Args:
        make: makes a simulation.
        failure: what to begin with.
        most_runs: how many runs may be made.
        same: whether a run goes wrong in the same way, told by what went wrong; by its kind when None.

    Attributes:
        failure: the smallest so far that goes wrong in the same way.
        runs: how many were made.
    """

    def __init__(
        self,
        make: Make,
        failure: Failure,
        most_runs: int = MOST_RUNS,
        same: Callable[[Failure], bool] | None = None,
    ) -> None:
        self.failure = failure
        self.runs = 0
        self.make = make
        self.most_runs = most_runs
        self.same = same or (lambda found: found.kind == failure.kind)

    def shrink(self) -> Failure:
        """The smallest failure that was found."""
        self._simplify(fewer, self._any_order)
        self.drop_switches()
        self._simplify(less, self._same_order)
        return self.failure

    def _simplify(
        self,
        simpler: Callable[[Scenario], Iterator[Scenario]],
        orders: Callable[[], Iterable[Callable[[], Policy]]],
    ) -> None:
        """Takes simpler scenarios for as long as one of the orders goes wrong."""
        while any(
            self._try(scenario, policy) for scenario in simpler(self.failure.scenario) for policy in orders()
        ):
            pass

    def _same_order(self) -> Iterator[Callable[[], Policy]]:
        yield lambda: SwitchPolicy(())
        if self.failure.switches:
            yield lambda: SwitchPolicy(self.failure.switches)

    def _any_order(self) -> Iterator[Callable[[], Policy]]:
        yield from self._same_order()
        yield from (functools.partial(RandomPolicy, seed) for seed in range(SEEDS))

    def _try(self, scenario: Scenario, policy: Callable[[], Policy]) -> bool:
        found = self._attempt(scenario, policy)
        if found is not None:
            self.failure = found
        return found is not None

    def _attempt(self, scenario: Scenario, policy: Callable[[], Policy]) -> Failure | None:
        if self.runs >= self.most_runs:
            return None
        self.runs += 1
        found = attempt(self.make, scenario, policy())
        return found if found is not None and self.same(found) else None

    def drop_switches(self) -> None:
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
            if size == 1 or self.runs >= self.most_runs:
                return
            size = max(1, size // 2)

    def _keeps(self, switches: Sequence[Switch]) -> bool:
        found = self._attempt(self.failure.scenario, lambda: SwitchPolicy(switches))
        # Those that were left may have had no occasion, and others have come instead.
        if found is None or len(found.switches) >= len(self.failure.switches):
            return False
        self.failure = found
        return True


def fewer(scenario: Scenario) -> Iterator[Scenario]:
    """The scenario with one fault less, or one rank."""
    disturbances = scenario.disturbances
    for number in range(len(disturbances)):
        yield dataclasses.replace(scenario, disturbances=disturbances[:number] + disturbances[number + 1 :])
    if scenario.members > 2:
        for slot in sorted(range(scenario.members), key=lambda slot: slot in {d.slot for d in disturbances}):
            yield _without(scenario, slot)


def _without(scenario: Scenario, slot: int) -> Scenario:
    """The scenario without a slot and what happens to it; those behind it move up."""
    members = scenario.members - 1
    return dataclasses.replace(
        scenario,
        members=members,
        active=min(scenario.active, members),
        disturbances=tuple(
            dataclasses.replace(disturbance, slot=disturbance.slot - (disturbance.slot > slot))
            for disturbance in scenario.disturbances
            if disturbance.slot != slot
        ),
    )


def less(scenario: Scenario) -> Iterator[Scenario]:
    """The scenario with one thing as it usually is, perhaps with one of the faults at another step."""
    usual = Scenario(members=scenario.members, active=scenario.active, steps=1)
    names = [field.name for field in dataclasses.fields(Scenario)]
    for name in names:
        if name == "disturbances":
            continue
        if getattr(scenario, name) != getattr(usual, name):
            yield from elsewhere(dataclasses.replace(scenario, **{name: getattr(usual, name)}))


def elsewhere(scenario: Scenario) -> Iterator[Scenario]:
    """The same faults, one of them at another step, the nearest first; the same scenario before."""
    yield scenario
    for number, disturbance in enumerate(scenario.disturbances):
        before, after = scenario.disturbances[:number], scenario.disturbances[number + 1 :]
        for step in sorted(range(1, _LAST_STEP), key=lambda step: abs(step - disturbance.step)):
            if step != disturbance.step:
                moved = dataclasses.replace(disturbance, step=step)
                yield dataclasses.replace(scenario, disturbances=(*before, moved, *after))
