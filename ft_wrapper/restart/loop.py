"""The restart loop of one rank, without its own threads, processes and sockets.

The loop talks to the store through the rank's membership. A `RestartedProcess` does everything else: `Call`
in a job, `tests.explorer.process` in the explorer. So both run the same loop.
"""

import contextlib
import copy
import dataclasses
import logging
import time

from .. import exception
from .._text import IN_LINE, cut
from ..attribution import Interruption
from ..monitor.frames import raised_at, users_line
from ..monitor.threads import WatchedIteration
from ..protocol.entering import BarrierTimeout, Endpoint, Entered
from ..protocol.history import fault_that_ends_job
from ..protocol.membership import Membership
from ..protocol.records import DONE, FOR_GOOD, CollectivePosition, Decision, SameFault, View
from ..state import Mode, State
from .report import RestartReport

log = logging.getLogger(__name__)

#: Seconds in the function that count as progress, even without a ``ping``.
PROGRESS_AFTER = 60.0
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 10.0


@dataclasses.dataclass(frozen=True)
class Hang:
    """Where the function hung when the iteration ended.

    Args:
        words: describes the collective that it was in.
        position: its position in ``torch.distributed``.
        place: the innermost line of the user's code: the hang's signature.
        since: when the function stopped making progress, in monotonic seconds.
        is_cause: whether the hang is why the iteration ended.
        after: describes the ranks that had returned and waited for this one; empty if there were none.
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
        value: the function's result.
        has_returned: whether this rank has nothing left to do in the iteration: the function has returned, or
            the rank is a spare.
        has_progressed: whether the function reported progress (``ping``, a step).
        error: the exception that left the function.
        own_error: the same, if it is not an interruption: this rank has to publish it.
        is_cause: whether this exception ended the iteration, as far as this rank knows.
        fault: signature of the fault, if `max_same_faults` counts it.
        repeats: how many iterations in a row before this one the same fault had ended.
        is_last: whether the fault has occurred so often that it ends the job.
        is_out_of_memory: whether the device was out of memory.
        hang: where the function hung, if it did. The monitor thread sets this before it interrupts the
            function's thread, and again before it sets ``watch.handled``.
    """

    entered_at: float = 0.0
    watch: WatchedIteration | None = None
    report: RestartReport | None = None
    value: object = None
    has_returned: bool = False
    has_progressed: bool = False
    error: BaseException | None = None
    own_error: BaseException | None = None
    is_cause: bool = False
    fault: str | None = None
    repeats: int = 0
    is_last: bool = False
    is_out_of_memory: bool = False
    hang: Hang | None = None

    def count(self, error: BaseException, view: View, limit: int | None) -> None:
        """Sets the fault's signature, if it counts: no progress before it, and not caused by another fault.

        A hang counts despite progress if another rank has returned and waits for this one, since that rank
        would return again.

        Args:
            error: the exception that left the function.
            view: the current iteration.
            limit: the argument ``max_same_faults``.
        """
        if isinstance(error, exception.JobAbort):
            self.fault, self.is_last = FOR_GOOD + exception.in_one_line(error), True
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
        before = (fault.count for fault in view.decision.same_faults if fault.what == self.fault)
        self.repeats = next(before, 0)
        self.is_last = self.repeats + 1 >= limit


class RestartedProcess:
    """The loop's actions in the rank's process; here they do nothing. An exception in one ends the loop.

    Attributes:
        waiting: entered around every wait for other ranks or the store. Hang detection watches the rest.
    """

    waiting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

    def enter_iteration(self, view: View) -> None:
        """Tells the rank's monitor which iteration it is in, before the rank waits."""

    def assign(self, state: State, decision: Decision) -> State:
        """Runs the rank assignment on a state; returns the rank's new state."""
        return state

    def apply_state(self, state: State) -> bool:
        """Applies the new state; returns whether compiled code was dropped because ranks have moved."""
        return False

    def open_store(self) -> Endpoint | None:
        """On active rank 0, serves the store where ``torch.distributed`` meets; returns host and port."""
        return None

    def point_to_store(self, endpoint: Endpoint) -> None:
        """Points ``torch.distributed`` to that store."""

    def call_function(self, state: State) -> FunctionRun:
        """Runs the function on an active rank; warms a spare up.

        Args:
            state: the rank's state.
        """
        return FunctionRun(has_returned=True)

    def await_abort(self) -> None:
        """After a fault, waits until the process groups are aborted."""

    def clean_up(self) -> None:
        """Runs ``finalize`` and ``health_check``, before this rank arrives.

        Raises:
            RankDrained: the rank was asked to leave the job.
        """

    def reset_process(self) -> None:
        """Prepares this rank's next entry, while it waits for the other ranks."""

    def all_arrived(self) -> None:
        """All ranks have left the iteration, and the next one is decided."""

    def pause(self, seconds: float) -> None:
        """Waits before entering a function that fails repeatedly."""

    def complete(self) -> None:
        """All ranks have finished."""

    def leave(self, error: BaseException) -> Interruption | None:
        """The rank leaves the job.

        Args:
            error: the exception by which it leaves.

        Returns:
            What to report to the other ranks; None if it cannot be reported.
        """
        return None

    def left_job(self) -> None:
        """The other ranks know that this rank has left, if the store could be reached."""


class RestartLoop:
    """What one rank does in one wrapped call, from its first iteration to the end.

    Args:
        member: the rank's membership of the job.
        base: the rank's state, as the last decision refers to it.
        process: does everything that needs a process: threads, plug-ins, torch.
    """

    def __init__(self, member: Membership, base: State, process: RestartedProcess) -> None:
        self.member = member
        self.base = base
        self.state = base
        self.limits = member.limits
        self.process = process
        self._is_spare = False
        self._runs = False
        self._error: BaseException | None = None  # the exception that left the function last

    def run(self) -> object:
        """Runs until an iteration succeeds; returns the function's result."""
        try:
            run = None
            while run is None:
                self.process.enter_iteration(self.member.view)
                self._consider_same_faults()
                self.member.leave_if_excluded()
                run = self._iterate()
        except BaseException as error:
            self._leave(error)
            raise
        self.process.complete()
        return run.value

    def _iterate(self) -> FunctionRun | None:
        """Runs one iteration; None if a fault ended it."""
        member, waiting = self.member, self.process.waiting
        fault: str | None = None
        if self.assign_and_meet():
            self._runs = True
            run = self.process.call_function(self.state)
            with waiting:
                if run.own_error is not None:
                    member.publish(self.state.rank, run.own_error)
                active = self.state.active_world_size or 0
                if run.has_returned and member.await_completion(self.state.active_rank, active) == DONE:
                    return run
            self._error, fault = run.own_error, run.fault
            run.value = None  # it may hold groups, which are released next
            self.process.await_abort()
            self._runs = False
        self.process.clean_up()
        assert self.base.rank is not None
        with waiting:
            proposed = member.arrive(self.base.rank, self.base.world_size, fault)
        self.process.reset_process()
        with waiting:
            member.await_next(proposed)
        self.process.all_arrived()
        return None

    def assign_and_meet(self) -> bool:
        """Gets this rank's new rank; False if the iteration ended before all ranks had theirs."""
        member, decision, base = self.member, self.member.view.decision, self.base
        n = member.view.n
        self._is_spare = False  # until the assignment decides: other ranks may be waiting for this one
        base.rank = decision.rank_of(member.member, base.rank)
        base.world_size = decision.world_size
        if decision.joined:
            base.active_world_size = None  # with newcomers there may be more active ranks again
        self.state = copy.copy(base)
        self.state.fn_exception = None
        self.state.mode = Mode.INITIALIZED  # until the rank assignment says what the rank does
        self.state.iteration = n if self.limits.rejoin else n - decision.first
        try:
            state = self.process.assign(self.state, decision)
        except BarrierTimeout as error:
            member.publish(base.rank, error)  # the ranks that it waited for are alive but do not arrive
            return False
        except exception.RankShouldRestart:
            return False
        except Exception as error:
            # Another rank's fault may have ended the iteration, and made the assignment fail here.
            if isinstance(error, exception.StoreUnavailable) or not member.has_failed():
                raise
            return False
        check_assigned(state)
        self.state, self.base = state, copy.copy(state)
        self._is_spare = state.mode == Mode.INACTIVE
        recompiles = self.process.apply_state(state)
        endpoint = self.process.open_store() if state.active_rank == 0 else None
        promoted = base.mode == Mode.INACTIVE and not member.view.is_first
        entry = Entered(member.member, state.active_rank, promoted, recompiles)
        sizes = (state.world_size or 0, state.active_world_size or 0)
        entering = member.agreement.entering
        with self.process.waiting:
            endpoint = entering.enter(n, entry, sizes, endpoint) or member.await_endpoint(state.rank, sizes)
        if endpoint is None:
            return False
        self.process.point_to_store(endpoint)
        return True

    def _consider_same_faults(self) -> None:
        """Ends the job, or backs off, if the same fault keeps recurring. All ranks do the same."""
        member, limit = self.member, self.limits.max_same_faults
        error, self._error = self._error, None
        last = fault_that_ends_job(member.view.decision, limit)
        if last is not None:
            member.ended_job = describe_same_fault(last, limit)
            if last.member != member.member:
                raise exception.JobEnded(f"another rank's error ended the job: {member.ended_job}")
            log.error("the job ends: %s", member.ended_job)
            if error is None or isinstance(error, exception.RankShouldRestart):  # it never leaves the call
                raise exception.RestartAbort(member.ended_job)
            raise error
        same = member.view.decision.same_faults
        if limit is None or not same:
            return
        worst = same[0]
        pause = min(pause_before_entering(worst.count), self.limits.barrier_timeout / 4)
        if pause:
            if worst.member == member.member:
                log.warning("%s; trying again in %g s", describe_same_fault(worst, limit), pause)
            with self.process.waiting:
                self.process.pause(pause)

    def _leave(self, error: BaseException) -> None:
        """Leaves the job; the other ranks learn of it and go on."""
        member, state = self.member, self.state
        # No rank waits for a discarded one. But if it left from inside the function, its own monitor thread
        # waits for the iteration's end, so it must end the iteration. A spare never does.
        is_missed = not self._is_spare and (self._runs or not isinstance(error, exception.RankDiscarded))
        how = self.process.leave(error)
        if how is not None:
            with self.process.waiting:
                member.leave(state.rank, how, error, ends=is_missed)
                if is_missed and state.active_rank == 0:
                    member.await_others()  # they may still connect to the store that this rank serves
        self.process.left_job()


def check_assigned(state: State) -> None:
    """Checks the state that a rank assignment returned.

    Raises:
        InternalError: the state is invalid.
    """
    active, size = state.active_world_size, state.world_size or 0
    if active is not None and active < 1:
        raise exception.InternalError(
            f"rank_assignment left none of {size} ranks active; use RetryController to end the job before "
            "that happens"
        )
    if state.mode not in (Mode.ACTIVE, Mode.INACTIVE) or active is None or active > size:
        words = "rank_assignment must make each rank ACTIVE or INACTIVE, and at most world_size ACTIVE"
        raise exception.InternalError(f"{words}; it gave {state}")  # others would wait for missing ranks


# A function that fails repeatedly ---------------------------------------------------------------------------
#
# The *signature* of a fault is the kind of exception and the line of the user's code. Faults of equal
# signature are the same fault.


def signature_of(error: BaseException) -> str:
    """The signature of an exception: its kind, and the innermost line of the user's code that led to it.

    The message is left out, since it may contain an address or a number that differs each time.
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


def pause_before_entering(count: int) -> float:
    """Seconds to wait before entering the function again: none after the first fault, which may be chance.

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
