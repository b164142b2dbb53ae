"""Three processes, a restart, and a fault before each step of each of them: the proposer's among them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.explorer.scenario import Disturbance, Scenario
from tests.explorer.simulation import Simulation

RAISES = Disturbance("exception", 0, 1)
NIGHTLY = pytest.mark.nightly("slot 0 has each fault at each step always")


def run(seed: int, *disturbances: Disturbance, **scenario: Any) -> Simulation:
    """A job to its end."""
    return Simulation(Scenario(disturbances=disturbances, **scenario), seed).run()


@pytest.mark.parametrize("slot", [0, *(pytest.param(slot, marks=NIGHTLY) for slot in (1, 2))])
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
def test_fault_before_each_step(kind: str, seconds: float, slot: int) -> None:
    task = run(slot, RAISES, steps=1, calls=2).processes[slot].task
    assert task is not None and task.steps > 25
    for step in range(1, task.steps + 6):  # some orders take more steps than that one
        run(step, RAISES, Disturbance(kind, slot, step, seconds), steps=1, calls=2)


@pytest.mark.parametrize("slot", range(3))
def test_process_comes_back_after_a_crash_at_each_step(slot: int) -> None:
    for step in range(1, 60):
        again = Disturbance("respawn", slot, step, float(step % 4))
        run(step, RAISES, Disturbance("crash", slot, step), again, steps=2, on_join="now")


@pytest.mark.parametrize("crash_step", [8, 16, 20, 24, 28])
def test_who_reports_a_death_dies_before_each_step(crash_step: int) -> None:
    for slot in range(3):
        for step in range(1, 16):
            run(step, Disturbance("crash", slot, crash_step), Disturbance("reporter", slot, step))


@pytest.mark.parametrize("slot", range(3))
def test_proposer_dies_after_another_crash(slot: int) -> None:
    """Rank 1 dies in the function; anyone who then takes part in the restart dies at each of its steps."""
    for step in range(19, 60):
        faults = (Disturbance("crash", 1, 20), Disturbance("crash", slot, step))
        run(step, *faults, members=4, active=3)


def test_death_of_a_spare_ends_nothing() -> None:
    ended = 0
    for step in range(15, 40):
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
    for step in range(18, 28):
        scenario = Scenario(active=3, min_world_size=3, steps=30, disturbances=(Disturbance(kind, 1, step),))
        simulation = Simulation(scenario, step).run()
        assert [head.n for head in simulation.invariants.heads] == [0]
        for process in (simulation.processes[0], simulation.processes[2]):
            assert process.fate == "failed"
            assert "min_world_size=3" in str(process.error)
            # The last to give up may miss the first one, too.
            assert re.search(r"missing slots: \[(0, )?1(, 2)?\]", str(process.error))
