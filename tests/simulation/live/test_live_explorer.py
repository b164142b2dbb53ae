"""The course of many ranks, in any order and with faults anywhere; and that mistakes in it are found."""

from __future__ import annotations

import dataclasses

import pytest

from tests.simulation.live.explorer.__main__ import main
from tests.simulation.live.explorer.job import JOBS
from tests.simulation.live.explorer.mistakes import MISTAKES, Mistake
from tests.simulation.live.explorer.search import at_random, exhaustively

SCHEDULES = 500
FINDS_WITHIN = 6000
SMALL = dataclasses.replace(JOBS["ddp"], shards=("A", "A"), steps=1, faults=1, demotions=0)


@pytest.mark.parametrize("name", JOBS)
def test_random_schedules(name: str) -> None:
    report = at_random(JOBS[name], range(SCHEDULES))
    print(report.figures())
    assert report.failure is None, report.failure
    assert report.schedules == SCHEDULES
    assert report.recoveries["PEERS"] > SCHEDULES / 2
    assert report.faults > SCHEDULES
    assert name != "buddies" or report.recoveries["COPIES"] > SCHEDULES / 20


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_found(mistake: Mistake) -> None:
    report = at_random(JOBS[mistake.job], range(FINDS_WITHIN), mistake)
    print(f"{mistake.name}: {report.schedules} schedules")
    assert report.failure is not None
    assert report.failure.trace


def test_all_schedules_of_a_small_job() -> None:
    report = exhaustively(SMALL)
    print(report.figures())
    assert report.failure is None, report.failure
    assert report.is_complete
    assert report.states > 1000


def test_a_search_through_all_finds_a_mistake() -> None:
    mistake = next(one for one in MISTAKES if one.name == "not-torn")
    failure = exhaustively(SMALL, mistake).failure
    assert failure is not None
    assert failure.choices and failure.trace


@pytest.mark.parametrize("compares", [False, True])
def test_a_late_write_of_the_register(compares: bool) -> None:
    """By a rank that was left out meanwhile: a plain write brings a history back that was given up."""
    job = dataclasses.replace(JOBS["ddp-spare"], faults=12, demotions=9, late_writes=True, compares=compares)
    failure = at_random(job, range(3000)).failure
    assert (failure is None) == compares, failure


def test_a_seed_is_a_schedule() -> None:
    one, other = (at_random(JOBS["hsdp"], range(5)) for _ in range(2))
    assert (one.events, one.faults, one.recoveries) == (other.events, other.faults, other.recoveries)


def test_the_command_line_prints_what_went_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mistake", "no-vote", "--random", "50"]) == 1
    printed = capsys.readouterr().out
    assert "VIOLATION: seed 0" in printed
    assert "are not prepared" in printed


def test_the_command_line_shares_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--job", "fsdp", "--random", "20", "--processes", "2"]) == 0
    assert "20 schedules" in capsys.readouterr().out
