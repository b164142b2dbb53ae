"""Barriers, and an exchange in which one rank computes for all. Constant work for each rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import timedelta

from ..exception import RankShouldRestart, RestartError
from . import keys
from .operations import StoreOperations

_LOOK_EVERY = 1.0  # seconds between looks whether waiting has lost its point


class BarrierError(RestartError):
    """A barrier failed."""


class BarrierTimeout(BarrierError):
    """Not everybody came to a barrier in time. The message names who was missing."""


class BarrierOverflow(BarrierError):
    """More ranks came to a barrier than it was made for."""


class BarrierMixin(StoreOperations):
    """Barriers of named groups. A name serves once."""

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
        arrived_key, count_key, wake_key = (keys.barrier(group_name, p) for p in ("arrived", "count", "wake"))
        mine = list(ranks)
        count = 0
        for rank in mine:
            count = self.log_append_counted(arrived_key, str(rank), count_key)
        # The count wakes, the log decides: a reply that was lost may have counted twice.
        if count >= rendezvous_count:
            here = len(set(self.log_read(arrived_key)))
            if here > rendezvous_count:
                raise BarrierOverflow(
                    f"barrier {group_name!r} is for rendezvous_count={rendezvous_count} ranks and {here} came"
                )
            if here == rendezvous_count:
                self.set(wake_key, "1")

        def missing() -> str:
            return _missing(rendezvous_count, {int(line) for line in self.log_read(arrived_key)})

        chunk = _LOOK_EVERY if timeout_chunk is None else timeout_chunk.total_seconds()
        if not self._wait_unless_over(wake_key, timeout.total_seconds(), chunk):
            raise BarrierTimeout(f"barrier {group_name!r} timed out after {timeout}: {missing()}")

    def initial_barrier(
        self,
        ranks: Iterable[int],
        rendezvous_count: int,
        timeout: timedelta,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """The barrier named ``initial``; see `barrier`."""
        self.barrier(ranks, "initial", rendezvous_count, timeout, timeout_chunk)

    def completion_barrier(
        self,
        ranks: Iterable[int],
        rendezvous_count: int,
        timeout: timedelta,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """The barrier named ``completion``; see `barrier`."""
        self.barrier(ranks, "completion", rendezvous_count, timeout, timeout_chunk)

    def iteration_barrier(
        self,
        ranks: Iterable[int],
        rendezvous_count: int,
        timeout: timedelta,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """The barrier named ``iteration``; see `barrier`."""
        self.barrier(ranks, "iteration", rendezvous_count, timeout, timeout_chunk)

    def termination_barrier(
        self,
        ranks: Iterable[int],
        rendezvous_count: int,
        timeout: timedelta,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """The barrier named ``termination``; see `barrier`."""
        self.barrier(ranks, "termination", rendezvous_count, timeout, timeout_chunk)

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

        Total traffic is O(count). Either all ranks get their result or none does: a rank that gives up
        because the iteration has ended rules out that others get theirs later.

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
        log_key, count_key, wake_key, verdict_key = (
            keys.barrier(name, part) for part in ("arrived", "count", "wake", "verdict")
        )
        if self.log_append_counted(log_key, json.dumps([rank, contribution]), count_key) >= count:
            contributions = dict(json.loads(line) for line in self.log_read(log_key))
            if len(contributions) == count:
                results = compute(contributions)
                self.multi_set(
                    [keys.barrier(name, f"result/{peer}") for peer in results], list(results.values())
                )
                self.compare_set(verdict_key, "", "computed")
                self.set(wake_key, "1")
        try:
            if not self._wait_unless_over(wake_key, timeout.total_seconds(), _LOOK_EVERY):
                here = {json.loads(line)[0] for line in self.log_read(log_key)}
                raise BarrierTimeout(f"exchange {name!r} timed out after {timeout}: {_missing(count, here)}")
        except (RankShouldRestart, BarrierTimeout):
            self.compare_set(verdict_key, "", "abandoned")
            if self.try_get(verdict_key) != "computed":
                raise
        result = None
        if self.try_get(verdict_key) == "computed":
            result = self.try_get(keys.barrier(name, f"result/{rank}"))
        if result is None:  # or deleted since, with all else of an iteration that is long over
            raise RankShouldRestart(f"exchange {name!r} was abandoned by a rank: its iteration has ended")
        return result

    def _wait_unless_over(self, key: str, seconds: float, chunk: float) -> bool:
        deadline = self.now() + seconds
        while True:
            remaining = deadline - self.now()
            if self.wait_for(key, min(chunk, remaining)):
                return True
            if self.is_over():
                raise RankShouldRestart("the iteration has ended")
            if remaining <= 0:
                return False


def _missing(count: int, here: set[int]) -> str:
    """Names who did not come; only those who came are known where the ranks are not 0 to count - 1."""
    if here <= set(range(count)):
        return f"missing ranks {sorted(set(range(count)) - here)} of {count}"
    return f"missing {count - len(here)} of {count} ranks, all but {sorted(here)}"
