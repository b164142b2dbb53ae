"""I7: what a member does in a restart does not grow with the world; of the proposer's, only the bytes do."""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from ft_wrapper.protocol import keys
from ft_wrapper.testing.scheduler import Step
from tests.explorer.scenario import Disturbance, Scenario
from tests.explorer.simulation import Simulation

RAISES = (Disturbance("exception", 1, 1),)
DIES = (Disturbance("crash", 1, 20),)
COMES_BACK = (*DIES, Disturbance("respawn", 1, 20, 5.0))

MEMBERS = 64
# A few more than it takes; one operation for each rank would be more than that.
MOST = 40


@functools.cache
def run(disturbances: tuple[Disturbance, ...]) -> Simulation:
    """A job with a spare, to its end."""
    scenario = Scenario(
        members=MEMBERS, active=MEMBERS - 1, step_seconds=3.0, on_join="now", disturbances=disturbances
    )
    return Simulation(scenario, seed=MEMBERS).run()


def operations(simulation: Simulation) -> Counter[str]:
    """How many operations on the store each process did itself."""
    steps = simulation.scheduler.trace_steps
    return Counter(step.task for step in steps if step.task.startswith("rank ") and step.args)


@pytest.mark.parametrize("disturbances", [RAISES, DIES, COMES_BACK], ids=["exception", "crash", "respawn"])
def test_restart_costs_each_member_a_constant_number_of_operations(
    disturbances: tuple[Disturbance, ...],
) -> None:
    simulation = run(disturbances)
    restarts = len(simulation.invariants.heads) - 1
    assert restarts == (2 if disturbances is COMES_BACK else 1)
    quiet, restarted = operations(run(())), operations(simulation)
    more = {name: restarted[name] - quiet[name] for name in quiet}
    assert max(more.values()) <= MOST * restarts, more


def test_member_reads_the_change_not_the_world() -> None:
    """No one but proposers reads a roster or an arrival list after the formation."""
    simulation = run(RAISES)
    steps, heads = simulation.scheduler.trace_steps, simulation.invariants.heads
    ended = next(place for place, step in enumerate(steps) if keys.end(0) in keys_of(step))
    large = {keys.arrived(0), keys.roster(1, heads[1].nonce)}
    readers = {step.task for step in steps[ended:] if step.what in READS and large & set(keys_of(step))}
    assert 1 <= len(readers) <= 2


READS = ("get", "multi_get", "check", "compare_set")


def keys_of(step: Step) -> list[str]:
    """The keys of an operation."""
    if not step.args or isinstance(step.args[0], str):
        return [*step.args[:1]]
    return list(step.args[0]) if isinstance(step.args[0], list) else []
