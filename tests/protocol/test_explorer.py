"""The explorer: it finds nothing wrong with the protocol, and each mistake that is put back into it."""

from __future__ import annotations

import pytest
from mistakes import MISTAKES, Mistake

from ft_wrapper.testing.explorer import Explorer, without_logging
from ft_wrapper.testing.failure import attempt
from ft_wrapper.testing.policies import RandomPolicy

FIXED = 1_500
FIRST_SEED = 1_000_000


def test_random_jobs_with_crashes_and_respawns() -> None:
    report = Explorer().at_random(FIXED, seed=FIRST_SEED)
    assert report.failure is None, report.failure
    assert report.count.schedules == FIXED


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.row)
def test_mistake_is_found(mistake: Mistake) -> None:
    with without_logging():
        for scenario, seed in mistake.scenarios():
            failure = attempt(mistake.make, scenario, RandomPolicy(seed))
            if failure is not None and mistake.finds in str(failure):
                return
    pytest.fail(f"nothing found: {mistake.row}")
