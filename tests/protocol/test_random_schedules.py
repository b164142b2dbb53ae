"""Random jobs with random faults in random orders: the invariants hold after every step."""

from __future__ import annotations

import random

import pytest
from simulation import Job, Scenario

FIXED = 2_000
FRESH = 500
BATCH = 250


@pytest.mark.parametrize("first", range(0, FIXED, BATCH))
def test_fixed_seeds(first: int) -> None:
    for seed in range(first, first + BATCH):
        Job(Scenario.random(seed), seed).run()


def test_fresh_seeds() -> None:
    start = random.SystemRandom().randrange(10**9)
    print(f"seeds {start} to {start + FRESH - 1}: replay one with Job(Scenario.random(seed), seed).run()")
    for seed in range(start, start + FRESH):
        Job(Scenario.random(seed), seed).run()


def test_same_seed_is_the_same_run() -> None:
    seed = next(seed for seed in range(100) if len(Scenario.random(seed).disturbances) == 3)
    first = Job(Scenario.random(seed), seed).run().scheduler
    again = Job(Scenario.random(seed), seed).run().scheduler
    assert _without_nonces(first.trace()) == _without_nonces(again.trace())
    replayed = Job(Scenario.random(seed), seed + 1, tuple(first.choices)).run().scheduler
    assert _without_nonces(replayed.trace()) == _without_nonces(first.trace())


def _without_nonces(trace: str) -> list[str]:
    # Proposals get a name that no other has: the only thing that is not chosen from the seed.
    return [" ".join(line.split()[:3]) for line in trace.splitlines()]
