"""The explorer finds nothing wrong with the protocol."""

from __future__ import annotations

from ft_wrapper.testing.explorer import Explorer

FIXED = 1_500
FIRST_SEED = 1_000_000


def test_random_jobs_with_crashes_and_respawns() -> None:
    report = Explorer().at_random(FIXED, seed=FIRST_SEED)
    assert report.failure is None, report.failure
    assert report.count.schedules == FIXED
