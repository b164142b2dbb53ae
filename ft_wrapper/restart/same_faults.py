"""A function that fails again and again: which faults are the same, and when they end the job.

The *signature* of a fault is the kind of exception and the line of the user's code. Faults of equal signature
are the same fault.
"""

import dataclasses
import time

from .._text import IN_LINE, cut
from ..exception import JobAbort, RestartAbort, in_one_line
from ..monitor.frames import raised_at, users_line
from ..monitor.threads import WatchedIteration
from ..protocol.records import FOR_GOOD, CollectivePosition, SameFault, View
from .report import RestartReport

#: Seconds in the function that count as progress, even without a ``ping``.
PROGRESS_AFTER = 60.0
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 10.0


@dataclasses.dataclass(frozen=True)
class Hang:
    """Where the function hung when the iteration ended.

    Args:
        words: the collective that it was in, for people.
        position: its position in ``torch.distributed``.
        place: the innermost line of the user's code: the hang's signature.
        since: when the function stopped making progress, in monotonic seconds.
        is_cause: whether the hang is why the iteration ended.
        after: the ranks that had returned and waited for this one, in words; empty if there were none.
    """

    words: str
    position: CollectivePosition
    place: str
    since: float
    is_cause: bool
    after: str = ""


@dataclasses.dataclass
class FunctionRun:
    """One execution of the function on this rank.

    Args:
        entered_at: when it began, in monotonic seconds.
        watch: the iteration as the monitor thread watches it; None once the rank has left the function.
        report: report of the restart that led to this run, for ``on_restart``.
        has_progressed: whether the function reported progress (``ping``, a step).
        error: the exception that left the function.
        is_cause: whether this exception ended the iteration, as far as this rank knows.
        fault: signature of the fault, if `max_same_faults` counts it.
        is_last: whether the fault has come so often that it ends the job.
        is_out_of_memory: whether the device was out of memory.
        hang: where the function hung, if it did. The monitor thread sets this before it interrupts the
            function's thread, and again before it sets ``watch.handled``.
    """

    entered_at: float = 0.0
    watch: WatchedIteration | None = None
    report: RestartReport | None = None
    has_progressed: bool = False
    error: BaseException | None = None
    is_cause: bool = False
    fault: str | None = None
    is_last: bool = False
    is_out_of_memory: bool = False
    hang: Hang | None = None

    def count(self, error: BaseException, view: View, limit: int | None) -> None:
        """Sets the fault's signature, if it counts: no progress before it, and not caused by another fault.

        A hang counts in spite of progress if another rank has returned and waits for this one, since that
        rank would return again.

        Args:
            error: the exception that left the function.
            view: the current iteration.
            limit: the argument ``max_same_faults``.
        """
        if isinstance(error, JobAbort):
            self.fault, self.is_last = FOR_GOOD + in_one_line(error), True
            return
        has_ended = self.watch is not None and self.watch.ended_at is not None
        hang = self.hang if has_ended else None
        if limit is None or (has_ended and not (hang and (hang.is_cause or hang.after))):
            return
        until = hang.since if hang else time.monotonic()
        has_progressed = self.has_progressed or until - self.entered_at > PROGRESS_AFTER
        if has_progressed and not (hang and hang.after):
            return
        self.fault = hang.place + hang.after if hang else signature_of(error)
        self.is_last = times_before(view, self.fault) + 1 >= limit


def leaves_with_fault(error: BaseException) -> bool:
    """Whether an exception that ends the call is a fault of the function: ``sys.exit(0)`` is not."""
    return not (isinstance(error, RestartAbort) or (isinstance(error, SystemExit) and not error.code))


def signature_of(error: BaseException) -> str:
    """The signature of an exception: its kind, and the innermost line of the user's code that led to it.

    Without the message, which may contain an address or a number that differs each time.
    """
    kind, where = type(error).__name__, raised_at(error.__traceback__)
    return cut(kind if where is None else f"{kind} at {where}", IN_LINE)


def hang_of(thread: int) -> str:
    """The signature of a hang: the innermost line of the user's code in a thread.

    Args:
        thread: the thread's identifier.
    """
    where = users_line(thread)
    return "no progress" if where is None else f"no progress at {where}"


def times_before(view: View, what: str) -> int:
    """How many iterations in a row before this one a fault of this signature had ended."""
    return next((fault.count for fault in view.decision.same_faults if fault.what == what), 0)


def pause_before_entering(count: int) -> float:
    """Seconds to wait before the function is entered again: none at the first fault, which may be chance.

    Args:
        count: number of iterations in a row that the same fault has ended.
    """
    return 0.0 if count < 2 else float(min(_FIRST_PAUSE * 2 ** (count - 2), _LONGEST_PAUSE))


def describe_same_fault(fault: SameFault, limit: int | None) -> str:
    """Describes a repeated fault for people; ``limit`` is the argument ``max_same_faults``."""
    if fault.is_for_good:
        return f"{fault.description} (slot {fault.member.slot})"
    return (
        f"{fault.what} on slot {fault.member.slot}, {fault.count} times in a row without progress "
        f"(max_same_faults={limit})"
    )
