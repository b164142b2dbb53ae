"""Plug-ins that are made with arguments that make no sense say so at once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from ft_wrapper.initialize import RetryController
from ft_wrapper.nested_restarter import NestedRestarterFinalized
from ft_wrapper.rank_assignment import (
    ActiveWorldSizeDivisibleBy,
    FilterCountGroupedByKey,
    Layer,
    MaxActiveWorldSize,
    ReplicaGroups,
    Tree,
)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: RetryController(0), ValueError, "max_iterations=0"),
        (lambda: RetryController("3"), TypeError, "max_iterations='3'"),
        (lambda: RetryController(torch.ones(2)), TypeError, "max_iterations=tensor([1., 1.])"),
        (lambda: RetryController(min_world_size=-1), ValueError, "min_world_size=-1"),
        (lambda: RetryController(min_world_size=None), TypeError, "min_world_size=None"),
        (lambda: RetryController(min_active_world_size=1.5), TypeError, "min_active_world_size=1.5"),
        (lambda: NestedRestarterFinalized(-1), ValueError, "special_rank=-1"),
        (lambda: NestedRestarterFinalized(None), TypeError, "special_rank=None"),
        (lambda: NestedRestarterFinalized("0"), TypeError, "special_rank='0'"),
        (lambda: MaxActiveWorldSize(0), ValueError, "max_active_world_size=0"),
        (lambda: MaxActiveWorldSize(2.5), TypeError, "max_active_world_size=2.5"),
        (lambda: ActiveWorldSizeDivisibleBy(0), ValueError, "divisor=0"),
        (lambda: ActiveWorldSizeDivisibleBy(None), TypeError, "divisor=None"),
        (lambda: FilterCountGroupedByKey(3, bool), TypeError, "key_or_fn=3"),
        (lambda: FilterCountGroupedByKey("k", 8), TypeError, "condition=8"),
        (lambda: FilterCountGroupedByKey("k", bool, "60"), TypeError, "timeout='60'"),
        (
            lambda: FilterCountGroupedByKey("k", bool, timedelta(0)),
            ValueError,
            "must be more than 0 seconds",
        ),
        (lambda: FilterCountGroupedByKey("k", bool, float("nan")), ValueError, "timeout=nan"),
        (lambda: FilterCountGroupedByKey("k", bool, True), TypeError, "timeout=True"),
        (lambda: ReplicaGroups(0), ValueError, "size=0"),
        (lambda: ReplicaGroups(2.0), TypeError, "size=2.0"),
        (lambda: ReplicaGroups(True), TypeError, "size=True"),
        (lambda: Layer(min_ranks=-1), ValueError, "min_ranks=-1"),
        (lambda: Layer(min_ranks="8"), TypeError, "min_ranks='8'"),
        (lambda: Layer(max_ranks=0), ValueError, "max_ranks=0"),
        (lambda: Layer(max_ranks=True), TypeError, "max_ranks=True"),
        (lambda: Layer(min_ranks=9, max_ranks=8), ValueError, "min_ranks=9 must not exceed max_ranks=8"),
        (lambda: Layer(key_or_fn=None), TypeError, "key_or_fn=None"),
        (lambda: Layer(flag="RESERVE"), TypeError, "flag='RESERVE'"),
        (lambda: Tree([]), ValueError, "layers=[]"),
        (lambda: Tree(Layer()), TypeError, "layers=Layer("),
        (lambda: Tree(None), TypeError, "layers=None"),
        (lambda: Tree([Layer(), "node"]), TypeError, "'node'] must be a list of Layer"),
        (lambda: Tree([Layer()], 8), TypeError, "world_size_filter=8"),
    ],
)
def test_bad_arguments(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert message in str(caught.value)
