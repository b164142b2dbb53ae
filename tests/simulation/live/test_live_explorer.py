"""The course of many ranks, in any order and with faults anywhere. `make mutants` puts mistakes into it."""

from __future__ import annotations

import dataclasses

import pytest
from support.nightly import at_night

from tests.simulation.live.explorer.job import JOBS
from tests.simulation.live.explorer.search import at_random


@pytest.mark.parametrize("schedules", [60, *at_night("60 are run always", [1000])])
@pytest.mark.parametrize("name", JOBS)
def test_random_schedules(name: str, schedules: int) -> None:
    report = at_random(JOBS[name], range(schedules))
    assert report.failure is None, report.failure
    assert report.schedules == schedules
    assert report.recoveries["PEERS"] > schedules / 2
    assert report.faults > schedules
    assert name != "buddies" or report.recoveries["COPIES"] > schedules / 20


@pytest.mark.parametrize(
    ("compares", "schedules"),
    [(True, 200), *at_night("200 are run always, and compare", [(False, 3000), (True, 3000)])],
)
def test_a_late_write_of_the_register(compares: bool, schedules: int) -> None:
    """By a rank that was left out meanwhile: a plain write brings a history back that was given up."""
    job = dataclasses.replace(JOBS["ddp-spare"], faults=12, demotions=9, late_writes=True, compares=compares)
    failure = at_random(job, range(schedules)).failure
    assert (failure is None) == compares, failure
