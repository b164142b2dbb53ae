"""The restart loop of one rank, as a course of actions: without threads, processes and sockets of its own.

The loop talks to the store through the rank's membership, and asks for everything else: the actions that it
yields are carried out elsewhere, by `Call` in a job and by `ft_wrapper.testing.process` in the explorer. So
both run the same loop.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar, cast

from ..attribution import Interruption
from ..exception import (
    InternalError,
    JobEnded,
    RankDiscarded,
    RankShouldRestart,
    RestartAbort,
    StoreUnavailable,
)
from ..protocol.entering import BarrierTimeout
from ..protocol.membership import Membership
from ..protocol.records import DONE, Decision, View
from ..settings import Limits
from ..state import Mode, State
from .same_faults import in_words, pause_before_entering

log = logging.getLogger(__name__)

T = TypeVar("T")
Endpoint = tuple[str, int]


class Action(Generic[T]):
    """Something that the loop asks for; answered with a ``T``, or with an exception."""


Course = Generator[Action[Any], Any, T]
"""What yields actions, is sent their answers, and returns a ``T``."""


@dataclasses.dataclass(frozen=True)
class Know(Action[None]):
    """The monitor learns which iteration this rank is in, and how it was decided, before the rank waits."""

    view: View
    decision: Decision


@dataclasses.dataclass(frozen=True)
class Assign(Action[State]):
    """The rank assignment runs on a state: answered with the rank's new state."""

    state: State
    decision: Decision


@dataclasses.dataclass(frozen=True)
class Take(Action[bool]):
    """The rank takes its new state. The answer: whether it dropped compiled code, since ranks have moved."""

    state: State


@dataclasses.dataclass(frozen=True)
class Serve(Action[Endpoint | None]):
    """Active rank 0 serves the store at which ``torch.distributed`` meets; answered with host and port."""


@dataclasses.dataclass(frozen=True)
class Meet(Action[None]):
    """``torch.distributed`` is pointed to that store."""

    endpoint: Endpoint


@dataclasses.dataclass
class Left:
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


@dataclasses.dataclass(frozen=True)
class Run(Action[Left]):
    """The function runs on an active rank, a spare waits. ``entered`` active ranks have come this far."""

    view: View
    state: State
    entered: int


@dataclasses.dataclass(frozen=True)
class Settle(Action[None]):
    """The iteration has ended by a fault: process groups are aborted, the function's thread is free."""


@dataclasses.dataclass(frozen=True)
class CleanUp(Action[None]):
    """Finalize and health check, before the others are told that this rank has left the function."""


@dataclasses.dataclass(frozen=True)
class TidyUp(Action[None]):
    """What only this rank's next entry needs, while the others are waited for."""


@dataclasses.dataclass(frozen=True)
class Onward(Action[None]):
    """All have left the iteration, and the next one is decided."""


@dataclasses.dataclass(frozen=True)
class Pause(Action[None]):
    """The ranks wait before they enter a function that fails again and again."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class Complete(Action[None]):
    """All ranks have finished."""

    state: State


@dataclasses.dataclass(frozen=True)
class Leave(Action[Interruption | None]):
    """The rank leaves the job. Answered with what the others are told; None if they cannot be told.

    ``is_missed`` says whether others wait for this rank in the iteration.
    """

    state: State
    error: BaseException
    is_missed: bool


@dataclasses.dataclass(frozen=True)
class Gone(Action[None]):
    """The others know, as far as they can."""

    state: State


def do(action: Action[T]) -> Course[T]:
    """Yields an action; returns its answer, with its type."""
    return cast(T, (yield action))


def carry_out(course: Course[T], perform: Callable[[Action[Any]], Any]) -> T:
    """Carries the actions of a course out, one after the other.

    Args:
        course: what yields them. What `perform` raises is raised there, at the action.
        perform: carries one out, and returns its answer.
    """
    resume, answer = course.send, cast(Any, None)
    while True:
        try:
            answer = perform(resume(answer))
            resume = course.send
        except BaseException as error:  # a signal's, too, between two actions
            if inspect.getgeneratorstate(course) != inspect.GEN_CLOSED:
                resume, answer = cast(Any, course.throw), error
                continue
            answer = None
            if isinstance(error, StopIteration):
                return cast(T, error.value)
            if isinstance(error.__cause__, StopIteration):
                raise error.__cause__ from None  # a plug-in's: none can leave a generator as it is
            raise


class RestartLoop:
    """What one rank does in one wrapped call, from its first iteration to the end.

    Args:
        member: the rank's part in the job: it is in.
        base: the rank's state; its ranks are those that the last decision speaks of.
        limits: the wrapper's settings.
    """

    def __init__(self, member: Membership, base: State, limits: Limits) -> None:
        self.member = member
        self.base = base
        self.state = base
        self.limits = limits
        self._is_spare = False
        self._runs = False
        self._error: BaseException | None = None  # by which the function was left

    def course(self) -> Course[object]:
        """All actions; returns what the function returned."""
        try:
            left = None
            while left is None:
                yield from do(Know(self.member.view, self.member.decision))
                yield from self._consider_same_faults()
                left = yield from self._iterate()
        except BaseException as error:
            yield from self._leave(error)
            raise
        yield from do(Complete(self.state))
        return left.value

    def _iterate(self) -> Course[Left | None]:
        """One iteration; None if it has ended by a fault."""
        member = self.member
        fault: str | None = None
        entered = yield from self.enter()
        if entered is not None:
            self._runs = True
            left = yield from do(Run(member.view, self.state, entered))
            if left.error is not None:
                member.publish(self.state.rank, left.error)
            active = self.state.active_world_size or 0
            if left.has_returned and member.await_completion(self.state.active_rank, active) == DONE:
                return left
            self._error, fault = left.error, left.fault
            del left
            yield from do(Settle())
            self._runs = False
        yield from do(CleanUp())
        assert self.base.rank is not None
        proposed = member.arrive(self.base.rank, self.base.world_size, fault)
        yield from do(TidyUp())
        member.await_next(proposed)
        yield from do(Onward())
        return None

    def enter(self) -> Course[int | None]:
        """Gets this rank's place; None if the iteration ended before all ranks had theirs."""
        member, decision, base = self.member, self.member.decision, self.base
        n = member.view.n
        self._is_spare = False  # until it is known: others may be waiting for this rank
        is_new = member.member in decision.joined or n == decision.first
        base.rank = decision.rank_of(member.member, base.rank)
        base.world_size = decision.world_size
        if decision.joined:
            base.active_world_size = None  # there may be more active ranks again
        self.state = copy.copy(base)
        self.state.fn_exception = None
        self.state.mode = Mode.INITIALIZED  # until the rank assignment says what the rank does
        self.state.iteration = n if self.limits.use_global_iteration else n - decision.first
        try:
            state = yield from do(Assign(self.state, decision))
        except BarrierTimeout as error:
            member.publish(base.rank, error)  # whom it waited for lives, and does not come
            return None
        except RankShouldRestart:
            return None
        except Exception as error:
            # It may have failed because of another rank, whose fault has ended the iteration.
            if isinstance(error, StoreUnavailable) or not member.has_failed():
                raise
            return None
        check(state)
        self.state, self.base = state, copy.copy(state)
        self._is_spare = state.mode == Mode.INACTIVE
        recompiles = yield from do(Take(state))
        endpoint = (yield from do(Serve())) if state.active_rank == 0 else None
        entered = member.agreement.entering.check_assignment(
            n,
            member.member,
            state.active_rank,
            state.world_size,
            state.active_world_size or 0,
            promoted=not (is_new or base.mode == Mode.ACTIVE),
            recompiles=recompiles,
            endpoint=endpoint,
        )
        if endpoint is None:
            endpoint = member.await_endpoint(state.rank, self.limits.monitor_thread_interval)
        if endpoint is None:
            return None
        yield from do(Meet(endpoint))
        return entered

    def _consider_same_faults(self) -> Course[None]:
        """Ends the job, or backs off, if the same fault comes again and again; the same on all ranks."""
        member, limit = self.member, self.limits.max_same_faults
        error, self._error = self._error, None
        if limit is None or not member.decision.same_faults:
            return
        hopeless = member.hopeless()
        if hopeless is not None:
            member.ended_job = in_words(hopeless, limit)
            if hopeless.member != member.member:
                raise JobEnded(f"another rank's error ended the job: {member.ended_job}")
            log.error("the job ends: %s", member.ended_job)
            if not isinstance(error, Exception):  # the function's own RankShouldRestart, which stays inside
                raise RestartAbort(member.ended_job)
            raise error
        worst = member.decision.same_faults[0]
        pause = min(pause_before_entering(worst.count), self.limits.barrier_timeout / 4)
        if pause:
            if worst.member == member.member:
                log.warning("%s; trying again in %g s", in_words(worst, limit), pause)
            yield from do(Pause(pause))

    def _leave(self, error: BaseException) -> Course[None]:
        """This rank leaves the job; the others are told, and go on."""
        member, state = self.member, self.state
        # No one plans with a discarded rank. One whose monitor thread waits for the end must bring it about;
        # a spare ends nothing.
        is_missed = not self._is_spare and (self._runs or not isinstance(error, RankDiscarded))
        how = yield from do(Leave(state, error, is_missed))
        if how is not None:
            member.leave(state.rank, how, error, ends=is_missed)
            if is_missed and state.active_rank == 0:
                member.await_others()  # they may yet connect to the store that this rank's monitor serves
        yield from do(Gone(state))


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
