"""Three members, a restart, and a fault before each step of each of them: the proposer's among them."""

from __future__ import annotations

import pytest
from simulation import Disturbance, Job, Scenario

SEEDS = range(3)


def last_step(scenario: Scenario, slot: int, seed: int) -> int:
    """How many steps a rank takes if nothing happens to it."""
    task = Job(scenario, seed).run().ranks[slot].task
    assert task is not None
    return task.steps


@pytest.mark.parametrize("slot", range(3))
@pytest.mark.parametrize(
    "kind, seconds",
    [
        ("crash", 0.0),
        ("host", 0.0),
        ("leave", 0.0),
        ("doom", 0.0),
        ("pause", 3.0),
        ("pause", 100.0),
        ("repeat", 0.0),
    ],
)
def test_fault_before_each_step(kind: str, seconds: float, slot: int) -> None:
    base = {"members": 3, "active": 2, "steps": 1, "calls": 2, "exceptions": ((0, 1),)}
    for seed in SEEDS:
        for step in range(1, last_step(Scenario(**base), slot, seed) + 1):  # type: ignore[arg-type]
            faults = (Disturbance(kind, slot, step, seconds),)
            Job(Scenario(disturbances=faults, **base), seed).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("crash_step", [8, 16, 20, 24, 28])
def test_who_reports_a_death_dies_before_each_step(crash_step: int) -> None:
    for slot in range(3):
        for step in range(1, 16):
            faults = (Disturbance("crash", slot, crash_step), Disturbance("reporter", slot, step))
            Job(Scenario(disturbances=faults), seed=step).run()


@pytest.mark.parametrize("slot", range(3))
def test_proposer_dies_after_another_crash(slot: int) -> None:
    """Rank 1 dies in the function; whoever then takes part in the restart dies at each of its steps."""
    for step in range(19, 60):
        for seed in SEEDS:
            faults = (Disturbance("crash", 1, 20), Disturbance("crash", slot, step))
            Job(Scenario(members=4, active=3, disturbances=faults), seed).run()


def test_death_of_a_spare_ends_nothing() -> None:
    ended = 0
    for step in range(15, 40):
        faults = (Disturbance("crash", 2, step),)
        job = Job(Scenario(members=3, active=2, steps=20, disturbances=faults), step).run()
        spare = job.ranks[2]
        if spare.fate == "dead" and spare.view is not None and not spare.active:
            ended += 1
            assert [head.n for head in job.invariants.heads] == [0]
            assert job.invariants.outcomes == {0: "done"}
    assert ended > 0


def test_too_few_members_are_left() -> None:
    """With min_world_size=3 two of three do not go on, whoever may propose."""
    for step in range(16, 26):
        for kind in ("crash", "host", "leave"):
            scenario = Scenario(
                members=3, active=3, min_world_size=3, disturbances=(Disturbance(kind, 1, step),), steps=30
            )
            job = Job(scenario, step)
            job.invariants.check_end = lambda: None  # type: ignore[method-assign]  # they fail, as they must
            job.run()
            assert [head.n for head in job.invariants.heads] == [0]
            for rank in (job.ranks[0], job.ranks[2]):
                assert rank.fate == "failed"
                assert "min_world_size=3" in str(rank.error)
                assert "missing slots: [1]" in str(rank.error)
