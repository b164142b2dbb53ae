"""This process's part in the job: joining, leaving an iteration, going on to the next, saying goodbye."""

import contextlib
import dataclasses
import math
from collections.abc import Callable

from .. import exception
from ..attribution import Interruption, out_of_memory
from ..settings import AllLimits
from . import Agreement, history, keys
from .deaths import await_others, report_deaths
from .entering import Endpoint, Sizes
from .global_iteration import OnMissing, Proposed
from .joining import Entry
from .records import FAULT, Decision, Fault, Member, MemberRecord, View, record_of

_A_DAY = 86400.0


@dataclasses.dataclass(eq=False)
class Membership:
    """This process as a member of the job, and its view of the iteration.

    Args:
        agreement: what the ranks of the job agree on.
        slot: the initial rank.
        slots: the slots that the job begins with.
        limits: timeouts, and the other settings that all ranks share.
        call: number of the wrapped call.
        terms: function and settings of the call, which must be the same on all ranks.
        on_member: called with each new incarnation that this process takes, before it joins with it.
        on_missing: called with the members that a restart waits for, and the seconds it has waited.
        heart: name of the heartbeat that this process shares with its node's ranks; None if it has its own.

    Attributes:
        record: this process's record in the store.
        ended_job: the fault that has ended the job on all ranks; None if the job goes on.
        left_by: signature of the exception by which this member leaves; empty if it is not counted.
    """

    agreement: Agreement
    slot: int
    slots: list[int]
    limits: AllLimits
    call: int = 0
    terms: dict[str, object] = dataclasses.field(default_factory=dict)
    on_member: Callable[[Member], None] | None = None
    on_missing: OnMissing | None = None
    heart: str | None = None
    record: MemberRecord = dataclasses.field(init=False)
    member: Member = dataclasses.field(init=False)
    view: View = dataclasses.field(init=False)
    ended_job: str | None = dataclasses.field(default=None, init=False)
    left_by: str = dataclasses.field(default="", init=False)
    _was_completed_late: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self) -> None:
        self.record = MemberRecord(*self.agreement.store.host_and_pid(), self.heart)

    def register(self) -> None:
        """Takes the slot: this process becomes its next incarnation.

        Raises:
            RankDiscarded: the job is already running, and no process may join it.
            StoreError: the store's job was started by another version of this package.
            ValueError: the function or settings differ from the job's; says which.
        """
        self.agreement.joining.agree_on_version()
        if not self.limits.rejoin and self.agreement.iterations.read_head() is not None:
            raise self._refused()
        self.check_terms()
        self.member = self.agreement.joining.register(self.slot, self.record)
        if self.on_member is not None:
            self.on_member(self.member)

    def say_who(self) -> None:
        """Writes this member's record again: its heartbeat may have moved since it registered."""
        self.agreement.joining.write_record(self.member, self.record)

    def check_terms(self) -> None:
        """Checks that function and settings are the job's; a ``ValueError`` says which differ."""
        self.agreement.joining.agree_on_terms(self.slot, self.call, self.terms)

    def join(self, within: float | None = None) -> bool:
        """Joins the job's first iteration, or the next one of a running job; False if the call has completed.

        Args:
            within: seconds after which it gives up. None: somewhat longer than members wait for each other,
                and it rejoins whenever it is passed over.

        Raises:
            TimeoutError: not all slots joined in time, or an iteration was not followed by another one.
            RankDiscarded: another process holds the slot, or no process may join.
        """
        try:
            return self._join(within)
        except BaseException as error:
            if not isinstance(error, exception.RankDiscarded):
                self._withdraw(error)
            raise

    def go_on(self, rank: int, world_size: int) -> None:
        """Leaves the iteration and waits for the next one: `arrive`, then `await_next`."""
        self.await_next(self.arrive(rank, world_size, None))

    def arrive(self, rank: int, world_size: int, fault: str | None) -> Proposed | None:
        """Logs that this member has left the function. From here on no member waits for it.

        Args:
            rank: its rank in this iteration.
            world_size: size of the world that this rank belongs to.
            fault: signature of its fault, if `max_same_faults` counts it.

        Returns:
            Its proposal, if it was the last to arrive: for `await_next`.
        """
        self.emit("arrive")
        return self.agreement.iterations.arrive(self.view, self.member, rank, world_size, fault)

    def await_next(self, proposed: Proposed | None) -> None:
        """Waits for the next decision.

        Args:
            proposed: the result of `arrive`.

        Raises:
            RankDiscarded: the other members go on without this one.
            TimeoutError: too few members are left.
        """
        iterations = self.agreement.iterations
        step = iterations.await_next(self.view, self.member, self.limits, proposed, self.on_missing)
        if step is None:
            current = iterations.read_current() if self.view.decision.max_faults else None
            if current is not None:
                self._leave_if_excluded(current.decision, len(current.members))
            raise exception.RankDiscarded(self.explain_removal())
        before, self.view = self.view, step
        self.emit("decided", after=before.nonce)

    def leave_if_excluded(self) -> None:
        """Raises `RankExcluded` if this member has just joined, and its slot or host has too many faults.

        It asked to join before the exclusion was decided; later joiners are refused before they ask.
        """
        decision = self.view.decision
        new = set(decision.joined).difference(decision.removed)
        if self.member in new:
            now = self.agreement.store.wall_clock()
            self._leave_if_excluded(decision, len(self.view.members) - len(new), now)

    def _leave_if_excluded(self, decision: Decision, others: int, now: float = 0.0) -> None:
        why = history.why_out(decision, self.slot, self.record.host, now)
        if why and others >= max(1, decision.min_world_size):
            raise exception.RankExcluded(why)

    def has_failed(self) -> bool:
        """Whether the current iteration has ended by a fault."""
        return self.agreement.ends.outcome_of(self.view.n) == FAULT

    def await_endpoint(self, rank: int | None, sizes: Sizes) -> Endpoint | None:
        """Waits until the iteration's rank 0 publishes where ``torch.distributed`` meets: host and port.

        None if the iteration has ended, possibly because rank 0 took too long: the job goes on without it.

        Args:
            rank: this member's rank.
            sizes: its world size and active world size.
        """
        timeout, look_every = self.limits.barrier_timeout, self.limits.monitor_thread_interval
        try:
            entering = self.agreement.entering
            return entering.await_endpoint(self.view.n, self.member, sizes, timeout, look_every)
        except exception.RestartTimeout as error:
            self.publish(rank, error)
            return None

    def publish(self, rank: int | None, error: BaseException) -> None:
        """Publishes an exception of this member, and ends the iteration if it still runs.

        Args:
            rank: its rank.
            error: the exception.
        """
        cause = out_of_memory(error)
        kind = Interruption.EXCEPTION if cause is None else Interruption.OUT_OF_MEMORY
        fault = self._raised(rank, kind, cause or error)
        self.emit("fault", kind=fault.interruption.name, ends=True, rank=rank, message=fault.message)
        self.agreement.ends.report_fault(self.view.n, fault)

    def leave(
        self, rank: int | None, interruption: Interruption, error: BaseException, *, ends: bool
    ) -> None:
        """Logs that this member leaves the job in order. The other members go on without it.

        Args:
            rank: its rank.
            interruption: the kind of fault.
            error: the exception by which it leaves.
            ends: whether this ends the iteration.
        """
        fault = dataclasses.replace(self._raised(rank, interruption, error), counted=self.left_by)
        gives_up = isinstance(error, exception.RestartAbort) or self.ended_job is not None
        returns = self.limits.replaced and not (gives_up or isinstance(error, exception.RankDiscarded))
        try:
            if gives_up:
                self._note_end(self.ended_job if isinstance(error, exception.JobEnded) else None)
            # A proposal under way may keep this member, if it had already arrived.
            dead, patience = {self.member: fault}, self.limits.barrier_timeout
            report_deaths(self.agreement, self.view, dead, active=ends, timeout=patience, returns=returns)
        except exception.RestartError as error:
            self.agreement.store.warn(f"could not report that slot {self.slot} leaves: {error}")

    def _note_end(self, by_other: str | None) -> None:
        """Notes that no process should replace this one: agents read the note before they start one."""
        record = dataclasses.replace(self.record, gave_up=True, ended_by=by_other)
        self.agreement.joining.write_record(self.member, record)

    def await_others(self) -> None:
        """Waits until the other members have left this member's last iteration."""
        with contextlib.suppress(exception.RestartError):  # the store is lost
            await_others(self.agreement, self.view, self.limits.barrier_timeout)

    def await_completion(self, active_rank: int | None, active_world_size: int) -> str:
        """Waits for the end of the iteration. An active rank first logs that its function returned.

        Returns:
            ``done`` or ``fault``.

        Raises:
            RankDiscarded: the other members have gone on without this one.
        """
        n, outcome = self.view.n, None
        if active_rank is not None:
            self.emit("returned")
            self.agreement.ends.finish(n, active_rank, active_world_size)
            while (outcome := self._await_end(self.limits.completion_timeout)) is None:
                self._bring_about_completion(active_rank, active_world_size)
        while outcome is None:
            # It has nothing else to do, even while the store cannot be reached.
            with contextlib.suppress(exception.StoreUnavailable):
                outcome = self._await_end(_A_DAY)
        head = self.agreement.iterations.read_head()
        # The keys of n may have been deleted, and the end just read may be this member's own late write.
        if head is not None and head.n > n + 1:
            raise exception.RankDiscarded(self.explain_removal())
        return outcome

    def _bring_about_completion(self, active_rank: int, active_world_size: int) -> None:
        """Completes the iteration if the last rank to finish could not, or restarts it for late ranks."""
        n, patience = self.view.n, self.limits.completion_timeout
        self.agreement.ends.complete(n, active_world_size)
        missing = sorted(set(range(active_world_size)) - self.agreement.ends.finished_in(n))
        late = f"ranks {missing} did not finish within completion_timeout={patience:g} s"
        if missing and self._was_completed_late:
            # They have more work than the other members, and would have it again.
            self.agreement.store.warn(f"{late}; waiting for them, since a restart has not helped")
        elif missing:
            self._was_completed_late = True
            self.publish(active_rank, exception.RestartError(late))

    def _await_end(self, seconds: float) -> str | None:
        outcome = self.agreement.ends.wait_for_end(self.view.n, seconds)
        # The wake key may outlive the deleted end, and would wake this rank repeatedly.
        head = None if outcome else self.agreement.iterations.read_head()
        return FAULT if head is not None and head.n > self.view.n else outcome

    def say_goodbye(self) -> None:
        """Logs that this process no longer needs the store."""
        with contextlib.suppress(exception.RestartError):  # the store is lost
            self.agreement.ends.say_goodbye(self.member)

    def _join(self, within: float | None) -> bool:
        joining, limits, asked = self.agreement.joining, self.limits, None
        is_early = self.agreement.iterations.read_head() is None
        if is_early:
            if self.slot in self.slots:  # otherwise it is an additional rank
                joining.join_first(self.member, self.slots, limits)
                asked = keys.BEFORE_FIRST
            first = joining.await_first(self.member, self.slots, limits.barrier_timeout, limits)
            if first is not None:
                self.view = first
                return True
        if not limits.rejoin:
            raise self._refused()
        if not is_early:
            self._refuse_what_cannot_help()
        # Longer than the members wait: at their timeout they go on without a straggler, and with this one.
        patience = limits.barrier_timeout + limits.heartbeat_timeout if within is None else within
        until = math.inf if within is None else self.agreement.store.now() + within
        while True:
            entry, view = joining.await_entry(self.member, self.call, limits, patience, asked)
            if entry is Entry.DONE:
                return False
            if entry is Entry.TAKEN_OVER:
                raise exception.RankDiscarded(self._explain_takeover())
            if entry is Entry.IN:
                self.view = view
                self.emit("decided")
                return True
            if self.agreement.store.now() >= until:
                late = f"did not get in within {within:g} s: the other members went on too fast"
                raise exception.RestartTimeout(f"{self.member.name} {late}")
            self.agreement.store.warn(f"{self.member.name} was passed over for too long, and joins again")
            asked = None
            self.register()

    def _refuse_what_cannot_help(self) -> None:
        """Raises, before this member asks to join a running job, if it is excluded or the job has ended."""
        view = self.agreement.iterations.read_current()
        if view is None:
            return
        if self.limits.max_faults is not None:
            others = {one for one in view.members if one.slot != self.slot}
            alive = others - self.agreement.ends.deaths_of(view.n)
            self._leave_if_excluded(view.decision, len(alive), self.agreement.store.wall_clock())
        fault = history.fault_that_ends_job(view.decision, self.limits.max_same_faults)
        if view.call == self.call and fault is not None:
            self._note_end(fault.description)
            late = f"slot {self.slot} is too late: the job was ended by {fault.description}"
            raise exception.JobEnded(late)

    def emit(self, event: str, **fields: object) -> None:
        """Writes an event of this member in the current iteration; see `events`.

        Args:
            event: its name.
            fields: its fields, besides the member and the iteration.
        """
        view = {"iteration": self.view.n, "call": self.view.call, "nonce": self.view.nonce}
        self.agreement.store.emit(event, **view, **vars(self.member), **fields)

    def _withdraw(self, error: BaseException) -> None:
        """Reports that this process gives up before it has joined, so that no member waits for it."""
        fault = self._raised(None, Interruption.BASE_EXCEPTION, error)
        joining, read_head = self.agreement.joining, self.agreement.iterations.read_head
        with contextlib.suppress(Exception):  # the error that matters is being raised
            # A decision under way may include this member. Then its death is reported until the others have
            # gone on without it: no monitor watches it now.
            may_be_in = read_head() is not None or joining.living_joiners().keys() >= {*self.slots}
            if isinstance(error, exception.RestartTimeout) and read_head() is None:
                # So the other members name the missing ranks, not this one.
                self.agreement.ends.give_up(keys.BEFORE_FIRST, self.member)
                if read_head() is None and not may_be_in:
                    return
            timeout = self.limits.barrier_timeout if may_be_in else 0.0
            report_deaths(self.agreement, None, {self.member: fault}, active=True, timeout=timeout)

    def _refused(self) -> exception.RankDiscarded:
        return exception.RankDiscarded(
            f"slot {self.slot} started when the job was already running, and cannot join it: use "
            "@Wrapper(rejoin=True) on all ranks, or restart the whole job"
        )

    def explain_removal(self) -> str:
        """Describes why this member is not in the next iteration."""
        ends, n = self.agreement.ends, self.view.n
        if self.agreement.joining.newest_of(self.slot) != self.member:
            return self._explain_takeover()
        limit = f"barrier_timeout={self.limits.barrier_timeout:g} s"
        late = f"it took longer than {limit} to leave the function"
        why = f"it was declared dead, or {late}"  # the keys of an old iteration are deleted
        with contextlib.suppress(exception.StoreError):
            if self.member in ends.deaths_of(n):
                messages = [fault.message for fault in ends.faults_of(n) if fault.member == self.member]
                why = " ".join(["it was declared dead", *(f"({message})" for message in messages[-1:])])
            elif ends.outcome_of(n) is not None:
                why = late
        return f"slot {self.slot} was left out after iteration {n}: {why}"

    def _explain_takeover(self) -> str:
        joining, own = self.agreement.joining, self.record
        record = record_of(joining.store, joining.newest_of(self.slot))
        return (
            f"slot {self.slot} was taken over by process {record.pid} on {record.host}; this is process "
            f"{own.pid} on {own.host}: no slot can be held by two processes, so make sure that each RANK is "
            "started once"
        )

    def fault(self, rank: int | None, interruption: Interruption, message: str) -> Fault:
        """A fault of this member."""
        return self.record.fault(self.member, rank, interruption, message, self.agreement.store.wall_clock())

    def _raised(self, rank: int | None, interruption: Interruption, error: BaseException) -> Fault:
        if isinstance(error, exception.RankDrained):
            return self.fault(rank, Interruption.DRAINED, "was drained")
        return self.fault(rank, interruption, f"raised {exception.in_one_line(error)}")
