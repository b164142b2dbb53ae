"""Simulated jobs in whose store somebody writes who has not their secret."""

from __future__ import annotations

import pytest
from support.nightly import at_night

from ft_wrapper.exception import StoreError
from ft_wrapper.protocol import Agreement, keys
from ft_wrapper.protocol.operations import CompareAndSet
from ft_wrapper.protocol.seal import Seal
from ft_wrapper.testing import FakeStore
from ft_wrapper.testing.scheduler import RandomPolicy
from tests.explorer.explore import without_logging
from tests.explorer.scenario import Scenario
from tests.explorer.stranger import WithStranger

FIRST = 5_000_000


@pytest.mark.parametrize("jobs", [30, *at_night("30 run always", [400])])
def test_the_job_does_as_without(jobs: int) -> None:
    written = 0
    for seed in range(FIRST, FIRST + jobs):
        simulation = WithStranger(Scenario.random(seed), seed, policy=RandomPolicy(seed))
        with without_logging():
            simulation.run()
        written += simulation.written
    assert written > 20 * jobs


@pytest.mark.parametrize("forged", ["0:7:abc", "0:7:abc " + "0" * 32, "%", "", "\n"])
def test_a_head_that_somebody_else_has_written(forged: str) -> None:
    job = FakeStore()
    stranger = job.clone()
    late = job.clone()
    job.seal, late.seal = (Seal(b"a secret of the job's", "store", lambda key: None) for _ in range(2))
    job.execute([CompareAndSet(keys.HEAD, "", "0:3:own")])
    assert str(Agreement(job).iterations.read_head()) == "0:3:own"
    stranger.set(keys.HEAD, forged)
    assert str(Agreement(job).iterations.read_head()) == "0:3:own"  # for those who have seen it
    with pytest.raises(StoreError, match="was not written with the secret"):
        Agreement(late).iterations.read_head()
    if forged:  # an empty one is as good as deleted
        with pytest.raises(StoreError, match="was not written with the secret"):
            late.execute([CompareAndSet(keys.HEAD, "", "0:0:another")])
        assert job.execute([CompareAndSet(keys.HEAD, "0:3:own", "0:4:own")]) == ["0:4:own"]
        assert str(Agreement(late).iterations.read_head()) == "0:4:own"
