"""StoreMixin: what a store offers to the wrapper, its plug-ins and its users, beside torch's operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from ..protocol.by_hand import ByHand
from ..protocol.entering import compute_once, wait_for_all


class StoreMixin(ByHand):
    """A store: torch's operations, steps, barriers of named groups, and global iterations by hand."""

    # torch's Store has had a method of this name and another meaning since 2.12.
    def barrier(
        self,
        ranks: Iterable[int],
        group_name: str,
        rendezvous_count: int,
        timeout: timedelta,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """Waits until so many ranks have come.

        Args:
            ranks: the ranks on whose behalf the caller comes.
            group_name: name of the barrier; it serves once.
            rendezvous_count: number of ranks to wait for.
            timeout: how long to wait at the longest.
            timeout_chunk: how often to look whether the iteration has ended meanwhile.

        Raises:
            BarrierTimeout: somebody is missing; the message names the ranks.
            BarrierOverflow: more ranks came than ``rendezvous_count``.
            RankShouldRestart: the store belongs to an iteration and that has ended.
        """
        wait_for_all(self, ranks, group_name, rendezvous_count, timeout, timeout_chunk)

    def _barrier_named(self, group_name: str, ranks: Iterable[int], *args: Any, **more: Any) -> None:
        """The barrier of that name; see `barrier`."""
        self.barrier(ranks, group_name, *args, **more)

    initial_barrier = functools.partialmethod(_barrier_named, "initial")
    completion_barrier = functools.partialmethod(_barrier_named, "completion")
    iteration_barrier = functools.partialmethod(_barrier_named, "iteration")
    termination_barrier = functools.partialmethod(_barrier_named, "termination")

    def compute_once(
        self,
        name: str,
        rank: int,
        contribution: str,
        count: int,
        compute: Callable[[dict[int, str]], dict[int, str]],
        timeout: timedelta,
    ) -> str:
        """Everyone contributes, the last one computes for all, and each reads its own result.

        Args:
            name: name of the exchange; it serves once.
            rank: the caller's rank.
            contribution: what it contributes, one line.
            count: number of ranks that contribute.
            compute: from all contributions by rank to all results by rank; the same on every rank.
            timeout: how long to wait for the others at the longest.

        Raises:
            BarrierTimeout: somebody is missing; the message names the ranks.
            RankShouldRestart: the store belongs to an iteration and that has ended.
        """
        return compute_once(self, name, rank, contribution, count, compute, timeout)
