"""What all threads are doing, asked for without risking a deadlock."""

from __future__ import annotations

import gc
import sys
from types import FrameType


def current_frames() -> dict[int, FrameType]:
    """Returns the innermost frame of each thread by its identifier, as ``sys._current_frames()``.

    That function makes objects while it holds the interpreter's list of threads. In some versions (3.11.7
    for one; CPython's issue 106883) a garbage collection may begin there, and what it destroys may release
    the GIL to a thread that then waits, GIL in hand, for the list. So nothing is collected meanwhile.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collecting:
            gc.enable()
