"""Which states a search has gone into, and with how many departures left: in 8 bytes a state."""

from __future__ import annotations

import mmap
from typing import Protocol

_LEFT_BITS = 3
_LEFT = (1 << _LEFT_BITS) - 1
_STATE = (1 << 64) - 1 - _LEFT
MOST_LEFT = _LEFT - 1
_MOST_PROBES = 10_000


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


class SeenByAll:
    """In memory that is shared with the processes that are forked from this one.

    Nothing is locked. Where two processes note something at the same place at the same moment, one of the
    notes may be lost; then what follows that state is tried once more.

    Args:
        most: for how many states there is room; rounded up to a power of two.
    """

    def __init__(self, most: int) -> None:
        size = 1 << (most - 1).bit_length()
        self._last = size - 1
        self._places = memoryview(mmap.mmap(-1, 8 * size)).cast("Q")

    def note(self, state: int, left: int) -> int:
        state &= _STATE
        places, place = self._places, (state >> _LEFT_BITS) & self._last
        for _ in range(_MOST_PROBES):
            held = places[place]
            if held & _STATE == state and held:
                before = (held & _LEFT) - 1
                if left > before:
                    places[place] = state | (left + 1)
                return before
            if not held:
                places[place] = state | (left + 1)
                return -1
            place = (place + 1) & self._last
        raise MemoryError(f"no room for more than {self._last + 1:,} states: search with fewer departures")
