"""What is done with the traceback of an exception that has left the wrapped function."""

from __future__ import annotations

import traceback
import types


def users_part(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Returns a traceback without the wrapper's own frames at its start.

    Args:
        trace: of an exception that left the wrapped function.
    """
    package = __name__.partition(".")[0]
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] == package:
        trace = trace.tb_next
    return trace


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
