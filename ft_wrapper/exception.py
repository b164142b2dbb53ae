"""Every error that a user can meet."""

from ._text import IN_LINE, IN_STORE, cut, without_secrets


class RestartError(Exception):
    """Base of the errors raised by the wrapper itself."""


class RestartAbort(BaseException):
    """Ends the wrapped call on this rank; raised by plug-ins to give up restarting.

    A ``BaseException``, so that an ``except Exception`` in training code does not swallow it.
    """


class JobAbort(RestartAbort):
    """Ends the wrapped call on all ranks: what is wrong would come again in each iteration.

    To be raised in the function or in ``initialize``. The ranks agree on it, so that none goes on alone, even
    if only one has seen the error. The others leave with `JobEnded`.
    """


class _QuietExit(RestartAbort, SystemExit):
    """Ends a process that lets it pass with exit code 1, without a traceback."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.code = 1  # not the text, which would be printed by every rank


class JobEnded(_QuietExit):
    """Ends the wrapped call on the ranks beside the one whose error ends the job.

    That is a `JobAbort`, or the same fault too often: see ``max_same_faults``.

    A ``SystemExit`` too: a process that lets it pass exits with 1 and without a traceback, so that the error
    that counts stands alone.
    """


class RankDrained(RestartAbort, SystemExit):
    """Ends the wrapped call on a rank that was asked to leave, by ``ftrun drain`` for instance.

    The others go on without it. It is raised where the rank tells that a step begins (`CallWrapper.step`,
    `LiveState.steps`), so that no step is cut short, or once the iteration has ended.

    A ``SystemExit`` too: a process that lets it pass exits with 0, and is not started again.
    """

    def __init__(self) -> None:
        super().__init__("this rank was drained: the others go on without it")
        self.code = 0


class RankExcluded(_QuietExit):
    """Ends the wrapped call on a rank whose slot or host has caused too many faults; the others go on.

    See ``max_faults``. A ``SystemExit`` too: a process that lets it pass exits with 1 and without a
    traceback, and is not started again.
    """


class RankShouldRestart(BaseException):
    """Raised inside the wrapped function to make it leave: the iteration is over.

    A ``BaseException``, so that an ``except Exception`` in training code does not swallow it. Let it
    pass; it never leaves the wrapped call. A function that raises it itself restarts all ranks, as with an
    ``Exception``.
    """


class HealthCheckError(RestartError):
    """A health check failed: this rank leaves the job, the others go on."""


class InternalError(RestartError):
    """Something that must hold does not: a defect in the wrapper or in a plug-in."""


class RestartTimeout(RestartError, TimeoutError):
    """A wait of the wrapper took longer than its timeout. The message says who was missing."""


class RankDiscarded(RestartError):
    """This rank has no part in the job any more: there is no place for it, or the others go on without it."""


class StoreError(RestartError):
    """The store that the ranks agree on failed. The message names its endpoint and the operation."""


class StoreUnavailable(StoreError):
    """The store does not answer at this time, but may again: it is kept on several machines."""


def in_one_line(error: BaseException) -> str:
    """Says what was raised: the kind and the first line of the message, as a traceback's last line has it.

    Cut to fit a log line. Without secrets: it goes into the store, from where others read and
    show it.

    ``traceback.format_exception_only`` says the same, with more lines, and takes twenty times as long; the
    others wait for this.

    Args:
        error: what was raised.
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
"""The name that nvidia-resiliency-ext has for it."""
