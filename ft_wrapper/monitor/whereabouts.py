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
    while frame is not None and is_library(frame):
        frame = frame.f_back
    if frame is None or frame is inner:
        return f"at {place(inner, inner.f_lineno)}"
    return f"in {inner.f_code.co_name}, called at {place(frame, frame.f_lineno)}"


def is_library(frame: FrameType) -> bool:
    """Whether a frame is one of Python's library or of an installed package."""
    return any(part in frame.f_code.co_filename for part in _LIBRARIES)


def place(frame: FrameType, line: int) -> str:
    """Says where a frame is: file, line and function."""
    return f"{os.path.basename(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}"
