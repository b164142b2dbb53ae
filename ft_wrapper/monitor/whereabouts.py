"""Where a thread is, in words: for the log line of a hang, to tell who waits from who is waited for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NamedTuple

from .frames import current_frames

_LIBRARIES = (
    f"{os.sep}site-packages{os.sep}",
    f"{os.sep}dist-packages{os.sep}",
    os.path.dirname(os.__file__),
)


class Place(NamedTuple):
    """Where a frame is.

    Args:
        file: path of the source.
        line: number in it.
        function: its name.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}"


def whereabouts(thread: int) -> str | None:
    """Says what a thread is doing.

    Args:
        thread: its identifier, as ``threading.get_ident()`` has it.

    Returns:
        The function it is in and the line of the user's code that led there; None if there is no such thread.
    """
    return stack_in_words(list(_places(current_frames().get(thread))))


def stack_in_words(stack: Sequence[Place]) -> str | None:
    """Says where a stack stands: the function it is in, and the line of the user's code that led there.

    Args:
        stack: the innermost frame first.

    Returns:
        None if it is empty.
    """
    if not stack:
        return None
    inner = stack[0]
    users = next((place for place in stack if not is_library(place.file)), inner)
    return f"at {inner}" if users is inner else f"in {inner.function}, called at {users}"


def is_library(file: str) -> bool:
    """Whether a source file is one of Python's library or of an installed package."""
    return any(part in file for part in _LIBRARIES)


def _places(frame: FrameType | None) -> Iterator[Place]:
    while frame is not None:
        yield Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
