"""Jobs in whose store somebody writes who has not their secret."""

from __future__ import annotations

import random
from typing import Any

from ft_wrapper.protocol import keys
from ft_wrapper.protocol.seal import Seal
from ft_wrapper.testing.scheduler import Scheduler, TurnPolicy

from .scenario import Scenario, simulated_stores
from .simulation import Simulation

_WRITES = 80
_LONGEST_PAUSE = 0.5  # seconds, of the job's own time
_FORGED = b"fault|done|0:0 0 1|1:0|0:0 returns|0:9:beef|{}|[[0, 7, 0]]|h 1 2 2|\0|\xff\xfe".split(b"|")


def sealed_stores(scheduler: Scheduler, scenario: Scenario) -> Any:
    """Clients of simulated stores, with the job's secret but for the stranger's."""
    connect = simulated_stores(scheduler, scenario)

    def connect_with_secret(name: str) -> Any:
        store = connect(name)
        if name != "stranger":
            store.seal = Seal(b"the secret of the job", "", lambda key: None)
        return store

    return connect_with_secret


class _Patient(Scheduler):
    """One with more steps: a wait that a stranger wakes looks ten times a second."""

    def __init__(self, *args: Any, max_steps: int, **kwargs: Any) -> None:
        super().__init__(*args, max_steps=10 * max_steps, **kwargs)


class WithStranger(Simulation):
    """A simulation with somebody in it who writes into the job's keys: forgeries, copies, wakes.

    It takes nothing away, and writes no key's own old text back: that ends the job, see SECURITY.md.

    Attributes:
        written: how many times it wrote.
    """

    schedulers = _Patient

    def __init__(self, scenario: Scenario, seed: int = 0, *, policy: TurnPolicy | None = None) -> None:
        super().__init__(scenario, seed, policy=policy, stores=sealed_stores)
        self.written = 0
        self._draw = random.Random(seed)
        self.scheduler.spawn("stranger", self._write_into_all, daemon=True)

    def _write_into_all(self) -> None:
        store: Any = self._connect("stranger")
        for _ in range(_WRITES):
            self.scheduler.sleep(self._draw.uniform(0.0, _LONGEST_PAUSE))
            self._write(store)
            self.written += 1

    def _write(self, store: Any) -> None:
        head = store._read(keys.HEAD)
        n = int(head.split(":")[1]) if head else keys.BEFORE_FIRST
        n += self._draw.randint(0, 1)
        kinds = keys.end, keys.meeting, lambda n: keys.seat(n, self._draw.randint(0, 3)), keys.restarted
        logs = keys.dead, keys.arrived, keys.join, keys.faults, keys.entered, keys.finished
        wakes = keys.wake_end, keys.wake_head, keys.wake_meeting
        counts = keys.count_gone, keys.count_finished, keys.count_entered
        match self._draw.randrange(4):
            case 0:
                store.compare_set(self._draw.choice(kinds)(n), "", self._forge(store))
            case 1:
                store.append(self._draw.choice(logs)(n), self._forge(store) + b"\n")
            case 2:
                store.set(self._draw.choice(wakes)(n), self._forge(store))
            case 3:
                store.add(self._draw.choice(counts)(n), self._draw.randint(1, 4))

    def _forge(self, store: Any) -> bytes:
        """A text of its own, or one of the job's from another key."""
        others = [key for key in store.list_keys() if "count" not in key and "beat" not in key]
        if others and self._draw.random() < 0.5:
            key = self._draw.choice(others)
            lines: list[bytes] = store.get(key).splitlines() if store.check([key]) else []
            return lines[0] if lines else b""
        return self._draw.choice(_FORGED)
