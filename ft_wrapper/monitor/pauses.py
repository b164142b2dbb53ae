"""When a watcher did not run itself: what it watches may not have run then either.

A container that was paused or a virtual machine that was suspended stops a rank and its monitor together. At
the thaw the rank's stamps are as old as the pause was long, and yet the rank is healthy.
"""

from __future__ import annotations

import collections
import math

_LATE = 1.0  # seconds; a busy machine is later than that now and then, at no cost
_REMEMBERED = 64  # pauses; those of before are older than any stamp that matters


class Pauses:
    """Counts time without the gaps in which the watcher did not look when it wanted to.

    All of a gap is left out, from the last look before it on, since no one knows when in it the pause began.

    Args:
        interval: seconds between two looks at the most. A look that is late by more than that, and by more
            than a second, ends a gap.
        now: the watcher's clock, in monotonic seconds.
    """

    def __init__(self, interval: float, now: float) -> None:
        self._late = max(interval, _LATE)
        self._looked = now
        self._due = math.inf
        self._gaps: collections.deque[tuple[float, float]] = collections.deque(maxlen=_REMEMBERED)

    def expect(self, due: float) -> None:
        """Says when the watcher wants to look next."""
        self._due = due

    def look(self, now: float) -> None:
        """Says that the watcher looks."""
        if now - self._due > self._late:
            began = self._looked
            if self._gaps and self._gaps[-1][1] == began:
                began = self._gaps.pop()[0]
            self._gaps.append((began, now))
        self._looked = now

    def since(self, moment: float, now: float) -> float:
        """Seconds since a moment, without the gaps."""
        gaps = sum(max(0.0, ended - max(began, moment)) for began, ended in self._gaps)
        return now - moment - gaps
