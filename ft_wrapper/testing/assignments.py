"""The rank assignments of simulated jobs, with and without an exchange between the ranks."""

from __future__ import annotations

import functools
from datetime import timedelta

from ..compose import Compose
from ..rank_assignment import (
    FilterCountGroupedByKey,
    Layer,
    LayerFlag,
    MaxActiveWorldSize,
    RankAssignment,
    RankAssignmentCtx,
    ShiftRanks,
    Tree,
)
from ..state import State
from .history import Violation

_EXCHANGE_TIMEOUT = timedelta(seconds=20)


def default_assignment(active: int, exchange: str, node_size: int) -> RankAssignment:
    """The first ranks are active, and all move up.

    Args:
        active: the most active ranks.
        exchange: how the ranks talk to each other as well; see `Scenario`.
        node_size: how many ranks in a row are on one node.
    """
    if exchange == "tree":
        key = functools.partial(_node_key, node_size)
        layers = [Layer(1, active, flag=LayerFlag.RESERVE), Layer(1, key_or_fn=key, flag=LayerFlag.RESERVE)]
        return Tree(layers)
    parts: list[RankAssignment] = [MaxActiveWorldSize(active), ShiftRanks()]
    if exchange == "plain":
        parts.append(Exchange())
    if exchange == "filter":
        key = functools.partial(_node_key, node_size)
        parts.append(FilterCountGroupedByKey(key, _at_least_one, _EXCHANGE_TIMEOUT))
    made: RankAssignment = Compose(*parts)
    return made


def _node_key(node_size: int, state: State) -> str:
    return str((state.initial_rank or 0) // node_size)


def _at_least_one(count: int) -> bool:
    return count >= 1


class Exchange(RankAssignment):
    """Changes nothing, but lets all ranks wait for each other."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Exchanges ranks; see `RankAssignment`."""
        mine = str(ctx.state.rank)
        count = ctx.state.world_size - len(ctx.terminated_ranks)
        assert ctx.state.rank is not None
        got = ctx.store.compute_once("exchange", ctx.state.rank, mine, count, dict, _EXCHANGE_TIMEOUT)
        if got != mine:
            raise Violation(f"compute_once gave rank {mine} the result of another: {got}")
        return ctx
