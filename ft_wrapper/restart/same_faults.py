"""A function that fails again and again in the same way: what counts as the same, and how that goes on."""

from __future__ import annotations

import types

from ..monitor.frames import Place, is_library, is_own, users_part
from ..protocol.records import SameFault, View

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
        if not (is_own(line.tb_frame) or is_library(line.tb_frame.f_code.co_filename)):
            found = line
        line = line.tb_next
    if found is None:
        return type(error).__name__
    code = found.tb_frame.f_code
    return f"{type(error).__name__} at {Place(code.co_filename, found.tb_lineno, code.co_name)}"


def times_before(view: View, what: str) -> int:
    """How often in a row a fault, by kind and place, had ended iterations before this one."""
    return next((fault.count for fault in view.same_faults if fault.what == what), 0)


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
