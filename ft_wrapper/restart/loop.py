"""The restart loop of one rank, without threads, processes and sockets of its own.

The loop talks to the store through the rank's membership. A `RestartedProcess` does everything else: `Call`
in a job, `tests.explorer.process` in the explorer. So both run the same loop.
"""

import contextlib
import copy
import dataclasses
import logging

from ..attribution import Interruption
from ..exception import (
    InternalError,
    JobEnded,
    RankDiscarded,
    RankShouldRestart,
    RestartAbort,
    StoreUnavailable,
)
from ..protocol.entering import BarrierTimeout, Endpoint, Entered
from ..protocol.history import fault_that_ends_job
from ..protocol.membership import Membership
from ..protocol.records import DONE, Decision, View
from ..state import Mode, State
from . import same_faults

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Outcome:
    """How the rank left the function.

    Args:
        value: what the function returned.
        error: the fault that this rank is to publish.
        has_returned: whether the rank has nothing more to do in this iteration: whether that is done, or has
            ended by a fault, is still to be heard.
        fault: kind and place of ``error``, if it is to be counted.
    """

    value: object = None
    error: BaseException | None = None
    has_returned: bool = False
    fault: str | None = None


class RestartedProcess:
    """What the loop needs done in the rank's process; here nothing. What a method raises ends the loop.

    Attributes:
        waiting: around all that waits for other ranks or for the store. What runs outside of it is watched.
    """

    waiting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

    def enter_iteration(self, view: View) -> None:
        """Before the rank waits, tells its monitor which iteration it is in."""

    def assign(self, state: State, decision: Decision) -> State:
        """Runs the rank assignment on a state; returns the rank's new state."""
        return state

    def apply_state(self, state: State) -> bool:
        """Takes the new state; returns whether compiled code was dropped, since ranks have moved."""
        return False

    def open_store(self) -> Endpoint | None:
        """On active rank 0: serves the store at which ``torch.distributed`` meets; returns host and port."""
        return None

    def point_to_store(self, endpoint: Endpoint) -> None:
        """Points ``torch.distributed`` to that store."""

    def call_function(self, state: State) -> Outcome:
        """Runs the function on an active rank, waits on a spare.

        Args:
            state: the rank's.
        """
        return Outcome(has_returned=True)

    def await_abort(self) -> None:
        """The iteration has ended by a fault: aborts process groups, frees the function's thread."""

    def clean_up(self) -> None:
        """Finalize and health check, before the others are told that this rank has left the function."""

    def leave_if_asked(self) -> None:
        """Raises `RankDrained` if the rank was asked to leave the job."""

    def reset_process(self) -> None:
        """Does what only this rank's next entry needs, while the others are waited for."""

    def all_left(self) -> None:
        """All have left the iteration, and the next one is decided."""

    def pause(self, seconds: float) -> None:
        """Waits before a function is entered that fails again and again."""

    def complete(self) -> None:
        """All ranks have finished."""

    def leave(self, error: BaseException, is_missed: bool) -> Interruption | None:
        """The rank leaves the job.

        Args:
            error: why.
            is_missed: whether others wait for this rank in the iteration.

        Returns:
            What the others are told; None if they cannot be told.
        """
        return None

    def left_job(self) -> None:
        """The others know, as far as they can."""


class RestartLoop:
    """What one rank does in one wrapped call, from its first iteration to the end.

    Args:
        member: the rank's part in the job: it is in.
        base: the rank's state; its ranks are those that the last decision speaks of.
        process: does what the loop does not do itself.
    """

    def __init__(self, member: Membership, base: State, process: RestartedProcess) -> None:
        self.member = member
        self.base = base
        self.state = base
        self.limits = member.limits
        self.process = process
        self._is_spare = False
        self._runs = False
        self._error: BaseException | None = None  # by which the function was left

    def run(self) -> object:
        """Runs until an iteration ends well; returns what the function returned."""
        try:
            left = None
            while left is None:
                self.process.enter_iteration(self.member.view)
                self._consider_same_faults()
                self.member.leave_if_excluded()
                left = self._iterate()
        except BaseException as error:
            self._leave(error)
            raise
        self.process.complete()
        return left.value

    def _iterate(self) -> Outcome | None:
        """One iteration; None if it has ended by a fault."""
        member, waiting = self.member, self.process.waiting
        fault: str | None = None
        if self.enter():
            self._runs = True
            left = self.process.call_function(self.state)
            with waiting:
                if left.error is not None:
                    member.publish(self.state.rank, left.error)
                active = self.state.active_world_size or 0
                if left.has_returned and member.await_completion(self.state.active_rank, active) == DONE:
                    return left
            self._error, fault = left.error, left.fault
            del left
            self.process.await_abort()
            self._runs = False
        self.process.clean_up()
        self.process.leave_if_asked()
        assert self.base.rank is not None
        with waiting:
            proposed = member.arrive(self.base.rank, self.base.world_size, fault)
        self.process.reset_process()
        with waiting:
            member.await_next(proposed)
        self.process.all_left()
        return None

    def enter(self) -> bool:
        """Gets this rank's place; False if the iteration ended before all ranks had theirs."""
        member, decision, base = self.member, self.member.view.decision, self.base
        n = member.view.n
        self._is_spare = False  # until it is known: others may be waiting for this rank
        base.rank = decision.rank_of(member.member, base.rank)
        base.world_size = decision.world_size
        if decision.joined:
            base.active_world_size = None  # there may be more active ranks again
        self.state = copy.copy(base)
        self.state.fn_exception = None
        self.state.mode = Mode.INITIALIZED  # until the rank assignment says what the rank does
        self.state.iteration = n if self.limits.use_global_iteration else n - decision.first
        try:
            state = self.process.assign(self.state, decision)
        except BarrierTimeout as error:
            member.publish(base.rank, error)  # whom it waited for lives, and does not come
            return False
        except RankShouldRestart:
            return False
        except Exception as error:
            # It may have failed because of another rank, whose fault has ended the iteration.
            if isinstance(error, StoreUnavailable) or not member.has_failed():
                raise
            return False
        check(state)
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
        """Ends the job, or backs off, if the same fault comes again and again; the same on all ranks."""
        member, limit = self.member, self.limits.max_same_faults
        error, self._error = self._error, None
        last = fault_that_ends_job(member.view.decision, limit)
        if last is not None:
            member.ended_job = same_faults.describe_same_fault(last, limit)
            if last.member != member.member:
                raise JobEnded(f"another rank's error ended the job: {member.ended_job}")
            log.error("the job ends: %s", member.ended_job)
            if error is None or isinstance(error, RankShouldRestart):  # which never leaves the call
                raise RestartAbort(member.ended_job)
            raise error
        same = member.view.decision.same_faults
        if limit is None or not same:
            return
        worst = same[0]
        pause = min(same_faults.pause_before_entering(worst.count), self.limits.barrier_timeout / 4)
        if pause:
            if worst.member == member.member:
                log.warning("%s; trying again in %g s", same_faults.describe_same_fault(worst, limit), pause)
            with self.process.waiting:
                self.process.pause(pause)

    def _leave(self, error: BaseException) -> None:
        """This rank leaves the job; the others are told, and go on."""
        member, state = self.member, self.state
        # No one plans with a discarded rank. One whose monitor thread waits for the end must bring it about;
        # a spare ends nothing.
        is_missed = not self._is_spare and (self._runs or not isinstance(error, RankDiscarded))
        how = self.process.leave(error, is_missed)
        if how is not None:
            with self.process.waiting:
                member.leave(state.rank, how, error, ends=is_missed)
                if is_missed and state.active_rank == 0:
                    member.await_others()  # they may yet connect to the store that this rank's monitor serves
        self.process.left_job()


def check(state: State) -> None:
    """Checks what a rank assignment has made.

    Raises:
        InternalError: it is no place for a rank.
    """
    if state.mode not in (Mode.ACTIVE, Mode.INACTIVE) or state.active_world_size is None:
        raise InternalError(f"rank_assignment must make each rank ACTIVE or INACTIVE; it gave {state}")
    if state.active_world_size < 1:
        raise InternalError(
            f"rank_assignment left no rank active of {state.world_size}; RetryController can end the job "
            "before it comes to that"
        )
    if state.active_world_size > (state.world_size or 0):
        # The others would wait for ranks that are not there.
        raise InternalError(
            f"rank_assignment gave active_world_size={state.active_world_size}, which is more than "
            f"world_size={state.world_size}"
        )
