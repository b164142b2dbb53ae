"""The explorer finds nothing wrong with the protocol."""

from __future__ import annotations

import pytest

from ft_wrapper.testing import explore
from ft_wrapper.testing.explorer import Explorer, new_seed

FIXED = 1_500
FIRST_SEED = 1_000_000
FRESH = 500


def test_random_jobs_with_crashes_and_respawns() -> None:
    report = Explorer().at_random(FIXED, seed=FIRST_SEED)
    assert report.failure is None, report.failure
    assert report.count.schedules == FIXED


def test_random_jobs_that_nobody_has_seen_before(capsys: pytest.CaptureFixture[str]) -> None:
    first = new_seed()
    with capsys.disabled():
        print(f" seeds {first} to {first + FRESH - 1} ", end="", flush=True)
    report = Explorer().at_random(FRESH, seed=first)
    assert report.failure is None, f"explore --replay {report.seed}:\n{report.failure}"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("", "nothing to do: give --random, --exhaustive or --replay"),
        ("--random 0", "--random 0: must be at least 1"),
        ("--random 5 --processes 0", "--processes 0: must be at least 1"),
        ("--random 5 --members 1", "--members 1: must be at least 2"),
        ("--random 5 --faults -1", "--faults -1: must be at least 0"),
        ("--exhaustive --departures 9", "--departures 9: must be at most 6"),
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
