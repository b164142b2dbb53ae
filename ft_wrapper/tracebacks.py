"""What is done with the traceback of an exception that has left the wrapped function."""

from __future__ import annotations

import contextlib
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

from .exception import RankShouldRestart


def in_one_line(error: BaseException) -> str:
    """Says what was raised: the kind and the first line of the message, as a traceback's last line has it.

    ``traceback.format_exception_only`` says the same, with more lines, and takes twenty times as long; the
    others wait for this.

    Args:
        error: what was raised.
    """
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        lines = ["<exception str() failed>"]
    return f"{name}: {lines[0]}" if lines else name


def users_part(trace: types.TracebackType | None) -> types.TracebackType | None:
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


def is_own(frame: types.FrameType) -> bool:
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
    api: Any = sys.modules.get(
        "torch.distributed.checkpoint.api"
    )  # what it has not imported, it does not raise
    if api is None or not isinstance(error, api.CheckpointException):
        return None
    by_rank = [
        f"rank {rank}: {''.join(traceback.format_exception_only(cause)).strip()}"
        for rank, (cause, _) in error.failures.items()
    ]
    return f"{type(error).__name__}: {'; '.join(by_rank)}"
