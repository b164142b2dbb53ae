"""Virtual time for threads, which wait until a test turns the clock."""

import dataclasses
import threading
from collections.abc import Sequence
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
        lock: held while a store carries out an operation; its own when None.

    Attributes:
        aside: whether the present look at a store is no part of the simulation: no step, no hook, no fault.
    """

    def __init__(self, start: float = 0.0, lock: Any = None) -> None:
        self._now = start
        self._sleepers = 0
        self._turned = threading.Condition()
        self.lock = lock or self._turned
        self.aside = False

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
                raise TimeoutError(f"{self._sleepers} of {count} threads wait after {timeout:g} s")

    def sleep(self, seconds: float) -> None:
        """Sleeps until the clock has been turned by so many seconds."""
        self.block(Waiter(set()), self.now() + seconds)

    def step(self, client: str, operation: str, args: Sequence[Any]) -> None:
        """Comes before each operation of a store. Does nothing here; a scheduler lets others go first."""

    def observe(self, result: Any) -> None:
        """Comes after each operation of a store. Does nothing here; a scheduler notes it in the trace."""

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
