"""A clock that a test turns. Threads that wait by it sleep until they are woken or the clock is turned."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(eq=False)
class Waiter:
    """Somebody who waits for keys.

    Args:
        missing: keys that must still come.
        woken: whether all have come. Stays true, even where a key is deleted again meanwhile.
        task: whose it is, if a scheduler runs it.
        patience: real seconds without a turn of the clock after which the wait is given up; None: for ever.
    """

    missing: set[str]
    woken: bool = False
    task: Any = None
    patience: float | None = None


class Clock:
    """Virtual time for threads. It stands still until `advance` turns it.

    Args:
        start: the first time that it shows, in seconds.
    """

    tells_states_apart = False

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._sleepers = 0
        self._turned = threading.Condition()

    @property
    def lock(self) -> threading.Condition:
        """Held while a store carries out an operation."""
        return self._turned

    @property
    def aside(self) -> bool:
        """Whether the present look at a store is no part of what is simulated. Never, by default."""
        return False

    def now(self) -> float:
        """The time that it shows, in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Turns the clock forward; whose deadline has passed then wakes up.

        Args:
            seconds: by how much.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"seconds={seconds} must not be negative: time only goes forward")
        with self._turned:
            self._now += seconds
            self._turned.notify_all()

    def wait_for_sleepers(self, count: int, timeout: float = 30.0) -> None:
        """Waits until so many threads wait by this clock: before that, turning it would not reach them.

        Args:
            count: how many threads at least.
            timeout: real seconds to wait at the longest.

        Raises:
            TimeoutError: fewer threads came to wait.
        """
        with self._turned:
            if not self._turned.wait_for(lambda: self._sleepers >= count, timeout):
                raise TimeoutError(
                    f"{self._sleepers} of {count} threads wait by the clock after {timeout:g} s"
                )

    def sleep(self, seconds: float) -> None:
        """Sleeps until the clock has been turned by so many seconds."""
        self.block(Waiter(set()), self.now() + seconds)

    def step(self, client: str, operation: str, args: Sequence[Any]) -> None:
        """Comes before each operation of a store. Does nothing here; a scheduler lets others go first."""

    def observe(self, result: Any) -> None:
        """Comes after each operation of a store. Does nothing here; a scheduler notes it in the trace."""

    # For a search that goes into each state once: what follows from here on must follow from these.

    def add_state(self, state: Callable[[], object]) -> None:
        """Says what tells one state from another: something hashable that tasks share. Does nothing here."""

    def learn(self, value: Any) -> None:
        """Says what the current task has learned otherwise than from the store. Does nothing here."""

    def forget(self, task: Any, known: Any) -> None:
        """Says that only ``known`` counts of what a task has learned so far. Does nothing here."""

    def block(self, waiter: Waiter, deadline: float) -> bool:
        """Blocks until the waiter is woken; False if its deadline passed first.

        Raises:
            RuntimeError: the waiter's patience came to its end.
        """
        with self._turned:
            self._sleepers += 1
            self._turned.notify_all()
            try:
                now = self._now
                while not self._turned.wait_for(
                    lambda: waiter.woken or self._now >= deadline, waiter.patience
                ):
                    if self._now == now:
                        raise RuntimeError(
                            f"would block for ever: in {waiter.patience:g} s no one has written "
                            f"{sorted(waiter.missing)} nor turned the clock; its time is virtual: let "
                            "another thread write the keys, or call clock.advance()"
                        )
                    now = self._now
            finally:
                self._sleepers -= 1
            return waiter.woken

    def woke(self, waiter: Waiter) -> None:
        """A waiter was woken; called with `lock` held."""
        self._turned.notify_all()
