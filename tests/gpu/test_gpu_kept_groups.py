"""A process group of NCCL2 that is given its peers again at each restart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from gpu_ranks import (
    BACKEND,
    TIMEOUT,
    Rank,
    backend_name,
    choosing,
    needs_gpu,
    needs_new_peers,
    run,
    total,
)

from ft_wrapper import CallWrapper, Limits, Wrapper

pytestmark = [*needs_gpu, needs_new_peers]
RESTARTS = 20


class Planned(Exception):
    """A fault that a test wants."""


def keeps(rank: Rank) -> tuple[list[int], int, str]:
    """Asks for the group in each iteration; each rank fails in turn.

    Returns:
        The sums of all ranks, how many groups there were, and their backend's class.
    """
    rank.use_gpu()
    groups: list[object] = []  # held, or a new one might get an old one's address
    totals: list[int] = []
    backends: set[str] = set()

    @Wrapper(limits=Limits(keep_groups=True, max_same_faults=None))
    def train(call_wrapper: CallWrapper) -> None:
        group = call_wrapper.process_group(BACKEND)
        if not any(group is each for each in groups):
            groups.append(group)
        backends.add(backend_name())
        totals.append(total())
        if call_wrapper.iteration == RESTARTS:
            return
        if call_wrapper.iteration % rank.world_size == rank.rank:
            raise Planned
        while True:
            total()

    train()
    return totals, len(groups), ", ".join(sorted(backends))


@pytest.mark.parametrize("ranks", [1, 2])
def test_reconfigure(ranks: int, seen: Callable[[str], None]) -> None:
    """One process group over 20 restarts, given its peers again by reconfigure (NCCL2)"""
    environment = choosing("ProcessGroupNCCL2")
    for totals, groups, backend in run(keeps, ranks, environment=environment, timeout=2 * TIMEOUT):
        assert set(totals) == {ranks} and groups == 1, backend
        assert ranks > 1 or len(totals) == RESTARTS + 1
        seen(f"yes, {backend}")
