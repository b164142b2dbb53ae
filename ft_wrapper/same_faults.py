"""A function that fails again and again in the same way: what counts as the same, and how that goes on."""

from __future__ import annotations

import types

from .store.records import SameFault
from .tracebacks import is_own, users_part
from .whereabouts import is_library, place

PROGRESS_AFTER = 60.0
"""Seconds in the function after which it has made progress, whether it said so (``ping``) or not."""

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 10.0


def kind_and_place(error: BaseException) -> str:
    """Says in one line what was raised, and where: the innermost line of the user's code that led there.

    Not the message, which may have an address or a number in it that differs each time.
    """
    trace: types.TracebackType | None = users_part(error.__traceback__)
    found, line = trace, trace
    while line is not None:
        if not (is_own(line.tb_frame) or is_library(line.tb_frame)):
            found = line
        line = line.tb_next
    where = "" if found is None else f" at {place(found.tb_frame, found.tb_lineno)}"
    return f"{type(error).__name__}{where}"


def pause_before_entering(count: int) -> float:
    """Seconds to wait before the function is entered again.

    Args:
        count: how many times in a row it has failed in the same way. The first time may be chance.
    """
    return 0.0 if count < 2 else float(min(_FIRST_PAUSE * 2 ** (count - 2), _LONGEST_PAUSE))


def in_words(fault: SameFault, limit: int) -> str:
    """Says that a fault comes again and again.

    Args:
        fault: what is counted.
        limit: the argument ``max_same_faults``.
    """
    return (
        f"{fault.what} on slot {fault.member.slot}, {fault.count} times in a row without progress "
        f"(max_same_faults={limit})"
    )
