"""Frames and tracebacks: where threads stand, in words, and what an exception keeps alive.

``sys._current_frames()`` and ``sys._current_exceptions()`` make objects while they hold the interpreter's
list of threads. In some versions (3.11.7 for one; CPython's issue 106883) a garbage collection may begin
there, and what it destroys may release the GIL to a thread that then waits, GIL in hand, for the list. So
nothing is collected meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from ..exception import RankShouldRestart

_LIBRARIES = (
    f"{os.sep}site-packages{os.sep}",
    f"{os.sep}dist-packages{os.sep}",
    os.path.dirname(os.__file__),
)


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


# ---- where a thread stands: for the log line of a hang, to tell who waits from who is waited for


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


# ---- the traceback of an exception that has left the wrapped function


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback without the wrapper's own frames at its start.

    Args:
        trace: of an exception that left the wrapped function.
    """
    while trace is not None and is_own(trace.tb_frame):
        trace = trace.tb_next
    return trace


def drop_own_frames(error: BaseException) -> None:
    """Takes the wrapper's own frames from the start of a traceback, if the user's follow, and empties them.

    The user's frames refer to those that called them, and so would keep what these hold.

    Args:
        error: what leaves the wrapped function, caught in the outermost frame.
    """
    trace, users = error.__traceback__, users_part(error.__traceback__)
    if users is None:
        return
    error.__traceback__ = users
    while trace is not None and trace is not users:
        with contextlib.suppress(RuntimeError):  # the outermost one is running
            trace.tb_frame.clear()
        trace = trace.tb_next


def is_own(frame: FrameType) -> bool:
    """Whether a frame is one of this package."""
    module: str = frame.f_globals.get("__name__", "")
    return module.partition(".")[0] == __name__.partition(".")[0]


@contextlib.contextmanager
def interruptions_unreported() -> Iterator[None]:
    """In the block Python does not report ``RankShouldRestart`` raised where it can only ignore exceptions.

    A destructor or a callback of the collector is such a place. The interruption is raised again outside, so
    an "Exception ignored in" would only alarm.
    """
    report = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, RankShouldRestart):
            report(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = report


def forget_frames(error: BaseException) -> None:
    """Drops what the frames of an exception hold: models, tensors, process groups.

    Args:
        error: the exception; those that it was raised from, or while handling, are cleared too.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        if link.__traceback__ is not None:
            traceback.clear_frames(link.__traceback__)
            link.__traceback__ = None
        pending += [link.__cause__, link.__context__]


def checkpoint_failure(error: BaseException) -> str | None:
    """Says what made a distributed checkpoint fail; None if the error is no such failure.

    Torch's ``CheckpointException`` is a ``BaseException``, though a full disk, say, is a fault like others.

    Args:
        error: what left the wrapped function.
    """
    # What it has not imported, it does not raise.
    api: Any = sys.modules.get("torch.distributed.checkpoint.api")
    if api is None or not isinstance(error, api.CheckpointException):
        return None
    by_rank = [
        f"rank {rank}: {''.join(traceback.format_exception_only(cause)).strip()}"
        for rank, (cause, _) in error.failures.items()
    ]
    return f"{type(error).__name__}: {'; '.join(by_rank)}"
