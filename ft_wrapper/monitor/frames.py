"""What all threads are doing, asked for without risking a deadlock.

``sys._current_frames()`` and ``sys._current_exceptions()`` make objects while they hold the interpreter's
list of threads. In some versions (3.11.7 for one; CPython's issue 106883) a garbage collection may begin
there, and what it destroys may release the GIL to a thread that then waits, GIL in hand, for the list. So
nothing is collected meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


def current_frames() -> dict[int, FrameType]:
    """Returns the innermost frame of each thread by its identifier, as ``sys._current_frames()``."""
    with _nothing_collected():
        return sys._current_frames()


def current_exception(thread: int) -> BaseException | None:
    """Returns the exception that a thread handles, if any; in one's own, ``sys.exc_info()`` serves.

    Args:
        thread: the thread's identifier.
    """
    with _nothing_collected():
        handled: Any = sys._current_exceptions().get(thread)
    error: BaseException | None = handled[1] if isinstance(handled, tuple) else handled  # before Python 3.12
    return error


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
