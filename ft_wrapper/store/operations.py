"""What a store must be able to do, and the few plain steps that everything else is made of."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistStoreError
from typing_extensions import Self

from ..exception import StoreError
from .steps import Append, Beats, Claim, Count, Move, Read, ReadLog, Step, Wake, Write

LAPSED = -1
"""What `StoreOperations.beats` gives where a sign of life does not hold any more. No count is negative."""


class StoreOperations:
    """The operations of ``torch.distributed.Store`` that the protocol uses, and steps made of them.

    A store implements the first group; ``log_append``, ``log_read``, ``count``, ``log_append_counted``,
    ``hear``, ``carry_out``, ``delete_keys`` and ``now`` may be replaced where a store has a better way.
    """

    def set(self, key: str, value: str | bytes) -> None:
        """Writes a key and wakes those who wait for it."""
        raise NotImplementedError

    def get(self, key: str) -> bytes:
        """Reads a key; waits for it up to the store's timeout, then raises ``DistStoreError``."""
        raise NotImplementedError

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns its new value."""
        raise NotImplementedError

    def append(self, key: str, value: str | bytes) -> None:
        """Appends to a key, atomically."""
        raise NotImplementedError

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Writes a key if it holds what is expected (``""``: is absent). Read the key to see who won."""
        raise NotImplementedError

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys exist; raises ``DistStoreError`` after the timeout."""
        raise NotImplementedError

    def check(self, keys: list[str]) -> bool:
        """Tells whether all keys exist."""
        raise NotImplementedError

    def delete_key(self, key: str) -> bool:
        """Deletes a key; tells whether it existed."""
        raise NotImplementedError

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Reads several keys at once; waits like ``get``."""
        raise NotImplementedError

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Writes several keys at once."""
        raise NotImplementedError

    def num_keys(self) -> int:
        """Number of keys in the store."""
        raise NotImplementedError

    def list_keys(self) -> list[str]:
        """Names of all keys, for cleaning up; none where a store cannot tell."""
        raise NotImplementedError

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of operations that wait."""
        raise NotImplementedError

    @property
    def timeout(self) -> timedelta:
        """The timeout of operations that wait."""
        raise NotImplementedError

    def clone(self) -> Self:
        """Another client of the same store: one a thread, since a client serves one call at a time."""
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of the connection. The default has none."""

    def set_patience(self, seconds: float) -> None:
        """How long to try again when the store cannot be reached. The default does not try again."""

    def beat(self, key: str, lasts: float) -> None:
        """Gives a sign of life under a key. The default counts.

        Args:
            key: whose it is.
            lasts: seconds for which it holds where it is a lease, and not a count.
        """
        self.add(key, 1)

    def beats(self, key: str) -> int:
        """A number that moves as long as signs of life come; `LAPSED` where the last one holds no longer."""
        return self.add(key, 0)

    def is_over(self) -> bool:
        """Whether waiting on this store has lost its point: its iteration has ended. Never, by default."""
        return False

    def now(self) -> float:
        """The observer's own clock, in seconds."""
        return time.monotonic()

    def new_nonce(self) -> str:
        """A name that no other proposal has."""
        return secrets.token_hex(6)

    def try_get(self, key: str) -> str | None:
        """Reads a key that no one waits for, without waiting; None if it is absent.

        Raises:
            StoreError: what it holds is no text; names the key.
        """
        if not self.check([key]):
            return None
        try:
            value = self.get(key)
        except DistStoreError:
            return None  # it was deleted just now
        return to_text(value, key)

    def wait_for(self, key: str, seconds: float) -> bool:
        """Waits for a key; tells whether it came in time."""
        if seconds <= 0:
            return self.check([key])
        try:
            self.wait([key], timedelta(seconds=max(seconds, 0.001)))
        except DistStoreError:
            return False
        return True

    def hear(self, key: str, seconds: float) -> str | None:
        """Waits for a key that wakes somebody.

        Returns:
            What it says, as far as the store tells so without being asked again, else ``""``; None if it did
            not come in time.
        """
        return "" if self.wait_for(key, seconds) else None

    def carry_out(self, steps: Sequence[Step]) -> list[str | None]:
        """Carries out several operations: one after the other, or all at once where a store can.

        If an answer is lost they are carried out again, and the first try may come late. So they are for
        logs, counts and registers, and for keys that all who write them write the same.

        Returns:
            What each of them gives.
        """
        return [self._carry_out(step) for step in steps]

    def _carry_out(self, step: Step) -> str | None:
        match step:
            case Read(key):
                return self.try_get(key)
            case ReadLog(key):
                return "\n".join(self.log_read(key))
            case Beats(key):
                return str(self.beats(key))
            case Claim(key, value):
                return self.claim(key, value)
            case Move(key, expected, desired):
                return to_text(self.compare_set(key, expected, desired), key)
            case Count(key):
                return str(self.count(key))
            case Append(key, entry):
                self.log_append(key, entry)
            case Wake(key, value):
                self.set(key, value)
            case Write(values) if len(values) > 1:
                self.multi_set([*values], [*values.values()])
            case Write(values):
                for key, value in values.items():
                    self.set(key, value)
        return None

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Deletes keys that no one writes any more."""
        for key in keys:
            self.delete_key(key)

    def claim(self, key: str, value: str) -> str:
        """Writes a register unless it is written; returns what it holds."""
        # On an absent key some stores answer with what was expected, which says nothing: then it is read.
        held: str | None = to_text(self.compare_set(key, "", value), key) or self.try_get(key)
        if held is None:
            raise StoreError(f"store key {key!r} is gone, though it was written just now")
        return held

    def log_append(self, key: str, entry: str) -> None:
        """Adds an entry (one line) to a log."""
        self.append(key, entry + "\n")

    def count(self, key: str) -> int:
        """Counts one more, and returns the count: a hint, since a lost answer may be counted twice."""
        return self.add(key, 1)

    def log_append_counted(self, key: str, entry: str, count_key: str) -> int:
        """Adds an entry to a log, then counts it; returns the count."""
        self.log_append(key, entry)
        return self.count(count_key)

    def log_read(self, key: str) -> list[str]:
        """Reads a log as it stands; an absent one is empty."""
        return (self.try_get(key) or "").splitlines()


def to_text(value: bytes, key: str) -> str:
    """Decodes what a key holds; an error names the key."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise StoreError(f"store key {key!r} holds {value!r}, which is no text") from None
