"""Where a thread is, in words: for the log line of a hang, to tell who waits from who is waited for."""

from __future__ import annotations

import os
from types import FrameType

from .monitor.frames import current_frames

_LIBRARIES = (
    f"{os.sep}site-packages{os.sep}",
    f"{os.sep}dist-packages{os.sep}",
    os.path.dirname(os.__file__),
)


def whereabouts(thread: int) -> str | None:
    """Says what a thread is doing.

    Args:
        thread: its identifier, as ``threading.get_ident()`` has it.

    Returns:
        The function it is in and the line of the user's code that led there; None if there is no such thread.
    """
    inner = current_frames().get(thread)
    if inner is None:
        return None
    frame: FrameType | None = inner
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    if frame is None or frame is inner:
        return f"at {_place(inner)}"
    return f"in {inner.f_code.co_name}, called at {_place(frame)}"


def _is_library(frame: FrameType) -> bool:
    return any(part in frame.f_code.co_filename for part in _LIBRARIES)


def _place(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
