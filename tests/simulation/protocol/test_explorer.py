"""The explorer finds nothing wrong with the protocol."""

from __future__ import annotations

import pytest
from support.nightly import at_night

from tests.explorer import explore
from tests.explorer.explore import Explorer, new_seed
from tests.explorer.scenario import Disturbance, Scenario
from tests.explorer.simulation import Simulation

SEEDS = [60, *at_night("60 run always", [1440])]
FIRST_SEED = 1_000_000


@pytest.mark.parametrize("count", SEEDS)
def test_random_jobs_with_crashes_and_respawns(count: int) -> None:
    report = Explorer().at_random(count, seed=FIRST_SEED)
    assert report.failure is None, report.failure
    assert report.schedules == count


@pytest.mark.parametrize("count", SEEDS)
def test_random_jobs_that_nobody_has_seen_before(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    first = new_seed()
    with capsys.disabled():
        print(f" seeds {first} to {first + count - 1} ", end="", flush=True)
    report = Explorer().at_random(count, seed=first)
    assert report.failure is None, f"explore --replay {report.seed}:\n{report.failure}"


def test_who_comes_after_all_were_lost_looks_for_their_silence_first() -> None:
    """That takes as long as it takes, however long ago they were lost."""
    assert Explorer().replay(530082893) is None


def test_joiner_does_not_give_up_when_the_last_between_two_calls_has_arrived() -> None:
    """It was found at random: who has arrived last is stopped before it proposes."""
    again = Disturbance("respawn", 1, 17, 7.0)
    for step in range(1, 14):
        stop = Disturbance("pause", 0, step, 50.0, since_end=1)
        job = Scenario(2, 2, steps=2, calls=2, between=60.0, disturbances=(again, stop))
        Simulation(job, seed=step).run()


def test_late_wake_of_an_end_that_is_deleted_does_not_keep_a_rank_busy() -> None:
    """It was found at random: who has ended an iteration is stopped before it wakes anybody."""
    raises = [Disturbance("exception", 0, entry) for entry in range(1, 5)]
    for seed in range(8):
        pauses = (Disturbance("pause", 1, 30, 15.0), Disturbance("pause", 0, 3, 60.0, since_end=-1))
        job = Scenario(
            2,
            2,
            steps=4,
            step_seconds=0.5,
            calls=2,
            between=5.0,
            on_join="now",
            replaced=True,
            replaced_after=6.0,
            use_libuv=False,
            disturbances=(*pauses, *raises),
        )
        Simulation(job, seed).run()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("", "nothing to do: give --random or --replay"),
        ("--random 0", "--random 0: must be at least 1"),
        ("--random 5 --processes 0", "--processes 0: must be at least 1"),
        ("--random 5 --members 1", "--members 1: must be at least 2"),
        ("--random 5 --faults -1", "--faults -1: must be at least 0"),
        ("--random 5 --stores no.such:thing", "'no.such:thing' must be MODULE:NAME"),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        explore.main(arguments.split())
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err
