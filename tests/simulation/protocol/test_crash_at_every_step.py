"""Three processes, a restart, and a fault before each step of each of them: the proposer's among them."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from support.nightly import at_night

from tests.explorer.scenario import Disturbance, Scenario
from tests.explorer.simulation import Simulation

RAISES = Disturbance("exception", 0, 1)

in_strides = pytest.mark.parametrize("stride", [11, *at_night("each eleventh step is tried always", [1])])


def run(seed: int, *disturbances: Disturbance, **scenario: Any) -> Simulation:
    """A job to its end."""
    return Simulation(Scenario(disturbances=disturbances, **scenario), seed).run()


@in_strides
@pytest.mark.parametrize(
    "kind, seconds",
    [
        ("crash", 0.0),
        ("host", 0.0),
        ("leave", 0.0),
        ("doom", 0.0),
        ("pause", 3.0),
        ("pause", 100.0),
        ("freeze", 100.0),
        ("error", 0.0),
        ("repeat", 0.0),
        ("respawn", 0.0),
    ],
)
def test_fault_before_each_step(kind: str, seconds: float, stride: int) -> None:
    without = run(1, RAISES, steps=1, calls=2)
    for slot, process in enumerate(without.processes):
        assert process.task is not None and process.task.steps > 25
        # Some orders take more steps than that one.
        for step in range(1 + slot * stride // 3, process.task.steps + 6, stride):
            run(step, RAISES, Disturbance(kind, slot, step, seconds), steps=1, calls=2)


@in_strides
def test_process_comes_back_after_a_crash_at_each_step(stride: int) -> None:
    for slot in range(3):
        for step in range(1 + slot, 60, stride):
            again = Disturbance("respawn", slot, step, float(step % 4))
            run(step, RAISES, Disturbance("crash", slot, step), again, steps=2, on_join="now")


@in_strides
def test_who_reports_a_death_dies_before_each_step(stride: int) -> None:
    steps = itertools.product((8, 16, 20, 24, 28), range(3), range(1, 16))
    for crash_step, slot, step in itertools.islice(steps, 0, None, stride):
        run(step, Disturbance("crash", slot, crash_step), Disturbance("reporter", slot, step))


@in_strides
def test_proposer_dies_after_another_crash(stride: int) -> None:
    """Rank 1 dies in the function; anyone who then takes part in the restart dies at each of its steps."""
    for slot in range(3):
        for step in range(19 + slot, 60, stride):
            faults = (Disturbance("crash", 1, 20), Disturbance("crash", slot, step))
            run(step, *faults, members=4, active=3)


def test_death_of_a_spare_ends_nothing() -> None:
    ended = 0
    for step in range(15, 40, 3):
        simulation = run(step, Disturbance("crash", 2, step), steps=20)
        spare = simulation.processes[2]
        if spare.fate == "dead" and spare.monitor and spare.monitor.view and not spare.active:
            ended += 1
            assert [head.n for head in simulation.invariants.heads] == [0]
            assert simulation.invariants.outcomes == {0: "done"}
    assert ended > 0


@pytest.mark.parametrize("kind", ["crash", "host", "leave"])
def test_too_few_members_are_left(kind: str) -> None:
    """With min_world_size=3 two of three do not go on, no matter who proposes."""
    for step in range(18, 28, 4):
        scenario = Scenario(active=3, min_world_size=3, steps=30, disturbances=(Disturbance(kind, 1, step),))
        simulation = Simulation(scenario, step).run()
        assert [head.n for head in simulation.invariants.heads] == [0]
        for process in (simulation.processes[0], simulation.processes[2]):
            assert process.fate == "failed"
            assert "min_world_size=3" in str(process.error)
            # The last to give up may miss the first one, too.
            assert re.search(r"missing slots: \[(0, )?1(, 2)?\]", str(process.error))
