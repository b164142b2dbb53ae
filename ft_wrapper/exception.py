"""Every error that a user can see."""

import contextlib
from collections.abc import Iterator

from ._text import IN_LINE, IN_STORE, cut, without_secrets


class RestartError(Exception):
    """Base of the errors raised by the wrapper itself."""


class RestartAbort(BaseException):
    """Ends the wrapped call on this rank; raised by plug-ins to give up restarting.

    A ``BaseException``, so that an ``except Exception`` in training code does not swallow it.
    """


class JobAbort(RestartAbort):
    """Ends the wrapped call on all ranks: the error would recur in each iteration.

    Raise it in the function or in ``initialize``. The ranks agree on it, so that none goes on alone, even if
    only one has seen the error. The other ranks leave with `JobEnded`.
    """


class _QuietExit(RestartAbort, SystemExit):
    """Ends a process that does not catch it with exit code 1, without a traceback."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.code = 1  # not the text, which every rank would print


class JobEnded(_QuietExit):
    """Ends the wrapped call on every rank except the one whose error ends the job.

    That error is a `JobAbort`, or the same fault too often: see ``max_same_faults``.

    Also a ``SystemExit``: a process that does not catch it exits with 1 and without a traceback, so that only
    the error that matters is printed.
    """


class RankDrained(RestartAbort, SystemExit):
    """Ends the wrapped call on a rank that was asked to leave, by ``ftrun drain`` for instance.

    The other ranks go on without it, unless the whole job ends (`CallWrapper.notice`). It is raised where the
    rank reports that a step begins (`CallWrapper.step`, `LiveState.steps`), so that no step is cut short, or
    once the iteration has ended.

    Also a ``SystemExit``: a process that does not catch it exits with 0, and is not restarted.
    """

    def __init__(self, why: str = "this rank was drained: the other ranks go on without it") -> None:
        super().__init__(why)
        self.code = 0


class RankExcluded(_QuietExit):
    """Ends the wrapped call on a rank whose slot or host has caused too many faults; the other ranks go on.

    See ``max_faults``. Also a ``SystemExit``: a process that does not catch it exits with 1 and without a
    traceback, and is not restarted.
    """


class RankShouldRestart(BaseException):
    """Raised inside the wrapped function to make it leave: the iteration is over.

    A ``BaseException``, so that an ``except Exception`` in training code does not swallow it. Do not catch
    it: it never leaves the wrapped call. A function that raises it itself restarts all ranks, as with an
    ``Exception``.
    """


class HealthCheckError(RestartError):
    """A health check failed: this rank leaves the job, and the other ranks go on."""


class InternalError(RestartError):
    """An invariant does not hold: the wrapper or a plug-in has a bug."""


class RestartTimeout(RestartError, TimeoutError):
    """The wrapper waited longer than a timeout. The message says which ranks were missing."""


class RankDiscarded(RestartError):
    """This rank is no longer in the job: it has no place there, or the other ranks went on without it."""


class StoreError(RestartError):
    """The coordination store failed. The message names its endpoint and the operation."""


class StoreUnavailable(StoreError):
    """The store is not answering, but may recover: it runs on several machines."""


@contextlib.contextmanager
def for_good(who: str) -> Iterator[None]:
    """Ends the call for a wrong argument of ``who``, which would recur in each iteration."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise JobAbort(f"{who}: {error}") from error


def in_one_line(error: BaseException) -> str:
    """Describes an exception by its kind and the first line of its message, as a traceback's last line does.

    It is cut to fit a log line, and contains no secrets, since it goes into the store and other ranks show
    it.

    ``traceback.format_exception_only`` gives the same with more lines, and takes twenty times as long; the
    other ranks wait for this.

    Args:
        error: the exception.
    """
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    said = f"{module}{kind.__qualname__}"
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        lines = ["<exception str() failed>"]
    return cut(f"{said}: {without_secrets(cut(lines[0], IN_STORE))}" if lines else said, IN_LINE)


TimeoutError = RestartTimeout
"""Its name in nvidia-resiliency-ext."""
