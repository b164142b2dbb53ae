"""Every mistake of the table in the documentation, put back: the explorer finds it."""

from __future__ import annotations

import pytest
from mistakes import MISTAKES, Mistake

from ft_wrapper.testing.explorer import without_logging
from ft_wrapper.testing.failure import attempt
from ft_wrapper.testing.policies import RandomPolicy


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.row)
def test_mistake_is_found(mistake: Mistake) -> None:
    with without_logging():
        for scenario, seed in mistake.scenarios():
            failure = attempt(mistake.make, scenario, RandomPolicy(seed))
            if failure is not None and mistake.finds in str(failure):
                return
    pytest.fail(f"nothing found: {mistake.row}")
