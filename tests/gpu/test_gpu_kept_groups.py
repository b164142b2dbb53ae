"""A process group of NCCL2 that is given its peers again at each restart."""

from __future__ import annotations

from collections.abc import Callable

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


def test_reconfigure_with_one_rank(seen: Callable[[str], None]) -> None:
    """One process group over 20 restarts, given its peers again by reconfigure (NCCL2, one rank)"""
    environment = choosing("ProcessGroupNCCL2")
    ((totals, groups, backend),) = run(keeps, 1, environment=environment, timeout=2 * TIMEOUT)
    assert (totals, groups) == ([1] * (RESTARTS + 1), 1), backend
    seen(f"yes, {backend}")


def test_reconfigure_with_two_ranks() -> None:
    """One process group over 20 restarts, given its peers again by reconfigure (NCCL2, two ranks)"""
    environment = choosing("ProcessGroupNCCL2")
    for totals, groups, backend in run(keeps, 2, environment=environment, timeout=2 * TIMEOUT):
        assert set(totals) == {2} and groups == 1, backend
