"""The stores of a simulation: a fake one that reads as a TCPStore does, and one with transactions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from ..protocol.operations import Step, keys_of
from ..store import StoreMixin
from .fake_store import FakeStore
from .scenario import Scenario
from .scheduler import Scheduler

Connect = Callable[[str], StoreMixin]
StoreFactory = Callable[[Scheduler, Scenario], Connect]
"""Makes the shared contents for one run, and returns what connects a client, by its name, to them."""


# Read as sets: no one tells the order of their entries.
_LOG = re.compile(r"ft_wrapper/1/(?:(?:arrived|dead|join|finished|faults)/|goodbyes)")


class SimulatedStore(FakeStore):
    """A client that reads as `TCPStore` does: in one step."""

    def essence(self, key: str, value: Any) -> Any:
        if isinstance(value, bytes) and _LOG.match(key):
            return frozenset(value.split(b"\n"))
        return value

    def _read(self, key: str) -> str | None:
        # With libuv this wakes those who wait for an absent key.
        if not self._contents.use_libuv:
            return super()._read(key)
        value = self.compare_set(key, "never", "never").decode()
        return None if value == "never" else value


class TransactionStore(SimulatedStore):
    """One that carries out several operations as one, as etcd does; a lost answer repeats all of them."""

    def execute(self, steps: Sequence[Step]) -> list[str | None]:
        if len(steps) == 1:
            return super().execute(steps)
        keys = [key for step in steps for key in keys_of(step)]
        return self._operate("execute", keys, (keys, steps), lambda: self._at_once(steps))

    def _at_once(self, steps: Sequence[Step]) -> list[str | None]:
        scheduler: Any = self.clock
        before, scheduler._aside = scheduler._aside, True
        try:
            return super().execute(steps)
        finally:
            scheduler._aside = before


def simulated_stores(scheduler: Scheduler, scenario: Scenario) -> Connect:
    """The usual stores of a simulation."""
    kind = TransactionStore if scenario.transactions else SimulatedStore
    return kind(scheduler, use_libuv=scenario.use_libuv).clone
