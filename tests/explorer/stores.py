"""Stores of simulated jobs: as `FakeStore`, with what sets TCPStore and etcd apart for the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ft_wrapper.protocol.operations import Step, keys_of
from ft_wrapper.testing import FakeStore


class SimulatedStore(FakeStore):
    """A client that reads as `TCPStore` does: in one step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # With libuv this wakes those who wait for an absent key.
        self.reads_by_compare_set = self._contents.use_libuv

    def wall_clock(self) -> float:
        """Always the same: what is in the store depends on the seed alone."""
        return 0.0


class TransactionStore(SimulatedStore):
    """One that carries out several operations as one, as etcd does; a lost answer repeats all of them."""

    def execute(self, steps: Sequence[Step]) -> list[str | None]:
        if len(steps) == 1:
            return super().execute(steps)
        keys = [key for step in steps for key in keys_of(step)]
        return self._operate("execute", keys, (keys, steps), lambda: self._at_once(steps))

    def _at_once(self, steps: Sequence[Step]) -> list[str | None]:
        before, self.clock.aside = self.clock.aside, True
        try:
            return super().execute(steps)
        finally:
            self.clock.aside = before
