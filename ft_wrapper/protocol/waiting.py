"""Waits for a key that may never be written: looks at growing intervals, by a few members at a time."""

import dataclasses
import itertools
from collections.abc import Iterator

from .operations import Operations

FIRST_LOOK = 0.5  # seconds
LONGEST_LOOK = 8.0
_STAGGER = 0.05  # seconds between one member's look and the next one's
_LAST_STAGGER = 2.0
_CHECKERS = 16  # members that read the log of arrivals on behalf of all
_LOOKS_OF_FEW = 4  # looks after which more members read it
LOOKS_BETWEEN_CALLS = _LOOKS_OF_FEW + 3  # readers stop increasing: a wait between two calls may be long


@dataclasses.dataclass(frozen=True)
class Moment:
    """A moment to look at the store.

    Args:
        number: number of the look, from 0.
        waited: seconds since the wait began.
        is_last: whether the timeout has passed.
        value: value of the notification key; empty if the store gives no value; None if the key is absent.
    """

    number: int
    waited: float
    is_last: bool
    value: str | None


def looks(
    store: Operations,
    wake: str,
    timeout: float,
    *,
    first: float = FIRST_LOOK,
    longest: float = LONGEST_LOOK,
    also_after: float = 0.0,
) -> Iterator[Moment]:
    """Looks when the notification key is written, at growing intervals before that, and at the timeout.

    Args:
        store: a client of the job's store.
        wake: the notification key.
        timeout: seconds until the last look.
        first: seconds until the first look.
        longest: longest time between two looks, in seconds.
        also_after: seconds after which there is always a look.
    """
    start, pause = store.now(), first
    for number in itertools.count():
        waited = store.now() - start
        until = min(pause, timeout - waited, also_after - waited if waited < also_after else pause)
        value = store.wait_for(wake, until)
        waited = store.now() - start
        is_last = waited >= timeout
        yield Moment(number, waited, is_last, value)
        if is_last:
            return
        pause = min(2 * pause, longest)


def stagger(position: int) -> float:
    """Seconds by which a member looks later than the first of the waiting members."""
    return min(position * _STAGGER, _LAST_STAGGER)


def is_checker(position: int, size: int, look: int = 0) -> bool:
    """Whether a waiting member reads the log of arrivals, which costs O(size), at one of its looks.

    A few members, spread over the world, read the log on behalf of all, so that a straggler does not cost
    O(size²). In case none of them is left, their number doubles with each later look.
    """
    stride = max(1, size // _CHECKERS) >> max(0, look - _LOOKS_OF_FEW)
    return position % max(1, stride) == 0
