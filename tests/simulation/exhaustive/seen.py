"""Which states a search has gone into, with how many departures left."""

from __future__ import annotations

from typing import Protocol

_LEFT_BITS = 3
_LEFT = (1 << _LEFT_BITS) - 1
MOST_LEFT = _LEFT - 1


class Seen(Protocol):
    """What a search remembers."""

    def note(self, state: int, left: int) -> int:
        """Notes that a state has been gone into.

        Args:
            state: a hash of it.
            left: departures left there, at the most `MOST_LEFT`.

        Returns:
            The most departures with which it had been noted before; -1 if it had not been.
        """


class SeenHere:
    """In this process, for searches of any size."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}

    def note(self, state: int, left: int) -> int:
        before = self._left.get(state, -1)
        if left > before:
            self._left[state] = left
        return before
