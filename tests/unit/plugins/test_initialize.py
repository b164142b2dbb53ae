"""RetryController: when it gives up, and that it says why."""

from __future__ import annotations

from typing import Any

import pytest

from ft_wrapper.exception import RestartAbort
from ft_wrapper.initialize import RetryController
from ft_wrapper.state import FrozenState


def state(**fields: Any) -> FrozenState:
    return FrozenState(**{"rank": 1, "world_size": 4, "active_world_size": 3, **fields})


@pytest.mark.parametrize(
    ("controller", "fields"),
    [
        (RetryController(), {"iteration": 10**6}),
        (RetryController(3), {"iteration": 2}),
        (RetryController(None, 4, 3), {}),
        (RetryController(min_active_world_size=4), {"active_world_size": None}),
        (RetryController(min_world_size=0, min_active_world_size=0), {"active_world_size": 0}),
    ],
)
def test_within_the_limits_it_hands_the_state_on(controller: RetryController, fields: dict[str, Any]) -> None:
    given = state(**fields)
    assert controller(given) is given


@pytest.mark.parametrize(
    ("controller", "fields", "reasons"),
    [
        (RetryController(3), {"iteration": 3}, ["iteration 3", "max_iterations=3"]),
        (RetryController(1), {"iteration": 9, "use_global_iteration": True}, ["max_iterations=1"]),
        (RetryController(min_world_size=5), {}, ["world size 4", "min_world_size=5"]),
        (RetryController(min_active_world_size=4), {}, ["active world size 3", "min_active_world_size=4"]),
        (RetryController(), {"active_world_size": 0}, ["active world size 0"]),
        (RetryController(2, 5), {"iteration": 2}, ["max_iterations=2", "min_world_size=5"]),
    ],
)
def test_beyond_a_limit_it_gives_up(
    controller: RetryController, fields: dict[str, Any], reasons: list[str]
) -> None:
    with pytest.raises(RestartAbort) as caught:
        controller(state(**fields))
    assert all(reason in str(caught.value) for reason in [*reasons, "rank 1"])
