"""A function that fails again and again: what counts as the same fault, and when it is too often."""

import dataclasses
import time

from .._text import IN_LINE, cut
from ..exception import JobAbort, RestartAbort, in_one_line
from ..monitor.frames import raised_at, users_line
from ..monitor.threads import WatchedIteration
from ..protocol.records import FOR_GOOD, CollectivePosition, SameFault, View
from .report import RestartReport

#: Seconds in the function after which it has made progress, whether it said so (``ping``) or not.
PROGRESS_AFTER = 60.0
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 10.0


@dataclasses.dataclass(frozen=True)
class Hang:
    """Where the function was when the iteration ended, though it had made no progress for a while.

    Args:
        words: where, as others are told.
        position: where in ``torch.distributed``.
        place: the innermost line of the user's code, by which it is counted.
        since: when it stopped making progress, in monotonic seconds.
        is_cause: whether that is why the iteration ended.
        after: which ranks had returned by then and waited for this one, in words; empty if there were none.
    """

    words: str
    position: CollectivePosition
    place: str
    since: float
    is_cause: bool
    after: str = ""


@dataclasses.dataclass
class FunctionRun:
    """One run of this rank in the function.

    Args:
        entered_at: when it began, in monotonic seconds.
        watch: the monitor thread's, until it is settled.
        report: of the restart that led to it, for ``on_restart``.
        has_progressed: whether there was progress, by the function's own word.
        error: by which the function was left.
        is_cause: whether that ended the iteration, as far as this rank can see.
        fault: what is counted of it: kind and place.
        is_last: whether it has come so often that it ends the job.
        is_out_of_memory: whether the device had no memory left.
        hang: of this run, if it hung. The monitor thread puts it there before it interrupts the function's
            thread, and once more before the watch is ``handled``.
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
        """Names the fault, if it counts: there was no progress before it, and it follows from no other fault.

        A hang counts in spite of progress if another rank has returned and waits for this one: that rank
        would return again.

        Args:
            error: by which the function was left.
            view: the present iteration's.
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
        self.fault = hang.place + hang.after if hang else kind_and_place(error)
        self.is_last = times_before(view, self.fault) + 1 >= limit


def leaves_with_fault(error: BaseException) -> bool:
    """Whether what makes a rank leave the job is a fault of its function: ``sys.exit(0)`` is none."""
    return not (isinstance(error, RestartAbort) or (isinstance(error, SystemExit) and not error.code))


def kind_and_place(error: BaseException) -> str:
    """Says in one line what was raised, and where: the innermost line of the user's code that led there.

    Not the message, which may have an address or a number in it that differs each time.
    """
    kind, where = type(error).__name__, raised_at(error.__traceback__)
    return cut(kind if where is None else f"{kind} at {where}", IN_LINE)


def hang_of(thread: int) -> str:
    """Says in one line where a thread hangs: the innermost line of the user's code.

    Args:
        thread: its number.
    """
    where = users_line(thread)
    return "no progress" if where is None else f"no progress at {where}"


def times_before(view: View, what: str) -> int:
    """How often in a row a fault, by kind and place, had ended iterations before this one."""
    return next((fault.count for fault in view.decision.same_faults if fault.what == what), 0)


def pause_before_entering(count: int) -> float:
    """Seconds to wait before the function is entered again.

    Args:
        count: how many times in a row it has failed in the same way. The first time may be chance.
    """
    return 0.0 if count < 2 else float(min(_FIRST_PAUSE * 2 ** (count - 2), _LONGEST_PAUSE))


def describe_same_fault(fault: SameFault, limit: int | None) -> str:
    """Says that a fault comes again and again; ``limit`` is the argument ``max_same_faults``."""
    if fault.is_for_good:
        return f"{fault.description} (slot {fault.member.slot})"
    return (
        f"{fault.what} on slot {fault.member.slot}, {fault.count} times in a row without progress "
        f"(max_same_faults={limit})"
    )
