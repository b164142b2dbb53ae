"""One simulated process: the rank, which does what the wrapper does, and its monitor."""

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from ft_wrapper.attribution import Interruption
from ft_wrapper.exception import InternalError, RestartError
from ft_wrapper.monitor.heart import HeartBeat
from ft_wrapper.protocol import Agreement, keys
from ft_wrapper.protocol.deaths import report_deaths
from ft_wrapper.protocol.entering import Endpoint, Sizes
from ft_wrapper.protocol.housekeeping import note_active_target
from ft_wrapper.protocol.membership import Membership
from ft_wrapper.protocol.records import Decision, Fault, Member, MemberRecord, View
from ft_wrapper.rank_assignment import RankAssignment, RankAssignmentCtx, RankDiscarded
from ft_wrapper.restart.loop import FunctionRun, RestartedProcess
from ft_wrapper.restart.report import waiting_line
from ft_wrapper.settings import AllLimits
from ft_wrapper.state import Mode, State
from ft_wrapper.store import PrefixStore
from ft_wrapper.testing.scheduler import Task

from .history import Facts
from .scenario import process_name

if TYPE_CHECKING:
    from .simulation import Simulation

_GAP_OF_LATE = 20.0
GRACE = AllLimits.termination_grace_time


class CtrlC(BaseException):
    """Ctrl-C, or SIGTERM: the process leaves the job in order."""


class SimulatedProcess(RestartedProcess):
    """One process of a slot.

    Args:
        simulation: what it is part of.
        slot: the initial rank.
        life: how many processes of the slot were started before it.

    Attributes:
        task: the rank's main thread.
        monitor: its present monitor; it has none before it has registered.
        member: the incarnation that it has taken.
        inside: the iteration whose function it is in.
        fate: ``running``, ``done``, ``late`` (all was done when it came), ``out`` (the others go on without
            it), ``failed``, ``dead``, ``left``, ``quit`` or ``broken`` (an invariant does not hold).
        error: why it failed.
        told: whether it told the others that it leaves.
        completed: the iterations that it returned from.
        facts: what else is known of it.
    """

    def __init__(self, simulation: "Simulation", slot: int, life: int = 0) -> None:
        self.simulation = simulation
        self.slot = slot
        self.life = life
        self.task: Task
        self.monitor: SimulatedMonitor | None = None
        self.member: Member | None = None
        self.inside: int | None = None
        self.fate = "running"
        self.error: BaseException | None = None
        self.told = False
        self.completed: list[int] = []
        self.facts = Facts(started_at=simulation.scheduler.now())
        self._job: SimulatedJob
        self._rank_assignment: RankAssignment

    @property
    def name(self) -> str:
        """What it is called in traces."""
        return process_name(self.slot, self.life)

    @property
    def alive(self) -> bool:
        """Whether it has not come to its end."""
        return self.fate == "running"

    @property
    def is_going(self) -> bool:
        """Whether it has ended or is about to, as others may know."""
        return not self.alive or self.facts.doomed or self.facts.leaving

    @property
    def active(self) -> bool:
        """Whether it calls the function in its iteration, as its monitor knows."""
        return self.monitor is None or self.monitor.active

    @property
    def between(self) -> bool:
        """Whether it has left a call in order, and has not made the next one."""
        return self.monitor is not None and self.monitor.between

    @property
    def is_silent(self) -> bool:
        """Whether it tells no one how it ends: it was killed, or an invariant is broken."""
        return self.fate == "broken" or self.task.crashed

    def main(self, after: float = 0.0) -> None:
        """What the wrapper does, in the rank's main thread.

        Args:
            after: virtual seconds until it begins.
        """
        agreement = self.simulation.agreement(self.name, self.slot)
        try:
            if after > 0:
                self.simulation.scheduler.sleep(after)
            self.facts.started_at = self.simulation.scheduler.now()
            self._all_calls(agreement)
        except InternalError:
            raise  # a defect
        except RankDiscarded as error:
            self._ends("out", error)
        except CtrlC as error:
            self._ends("left", error)
        except RestartError as error:
            self._ends("failed", error)

    def _ends(self, fate: str, error: BaseException | None = None) -> None:
        if error is not None and not self.told:
            self.simulation.invariants.nobody_tells()
        self.simulation.invariants.ends(self, fate)
        self.fate, self.error = fate, error
        if not self.told:
            self.facts.died_at = self.simulation.scheduler.now()
        if self.between:
            self.simulation.report(self, Interruption.TERMINATED)

    def _all_calls(self, agreement: Agreement) -> None:
        simulation, scenario = self.simulation, self.simulation.scenario
        last: SimulatedJob | None = None
        state, slots = State(0, 1), list(range(scenario.members))
        for call in range(scenario.calls):
            job = self._job = SimulatedJob(agreement, self.slot, slots, scenario.limits, call)
            job.process = self
            job.record = MemberRecord("host", self.slot)  # every run is the same, in any process
            job.on_member, job.on_missing = self._on_member, job.look_for
            self.facts.called_at, self.facts.away = simulation.scheduler.now(), False
            if last is None:
                job.register()
                if self.slot >= scenario.members and scenario.extra_is_early:
                    # As by hand, or from an older version: one that is not expected asks before the first.
                    agreement.iterations.ask_to_join(keys.BEFORE_FIRST, job.member, 0)
                if not job.join():
                    self._between_calls(call)
                    continue
                state = State(0, 1, initial_rank=self.slot, initial_world_size=scenario.members)
            else:
                self._go_on(job, last, state)
            self._rank_assignment = simulation.rank_assignment()
            loop = simulation.restart_loop(job, state, self)
            loop.run()
            state, last = loop.base, job
            if call < scenario.calls - 1:
                if simulation.quits(self, call):
                    self._tell_monitor().between = True
                    self._ends("quit")
                    return
                self._between_calls(call)
        self._ends("late" if last is None else "done")

    def _go_on(self, job: "SimulatedJob", last: "SimulatedJob", state: State) -> None:
        """The store outlived the last call: its members go on to the next one's first iteration."""
        job.check_terms()
        job.member, job.view = last.member, last.view
        self._begin_monitor()
        assert state.rank is not None
        try:
            job.go_on(state.rank, state.world_size)
        except BaseException as error:
            if self._leaves():
                job.leave(state.rank, Interruption.BASE_EXCEPTION, error, ends=False)
                self.told = True
            raise

    def _between_calls(self, call: int) -> None:
        """The program does something else; the monitor goes on, if it had one."""
        gap = self.simulation.scenario.gap(self.slot, call)
        if self.facts.last >= 0:
            self._tell_monitor().between = True
        else:
            gap = min(gap, _GAP_OF_LATE)  # many that come late would take for ever
        self.facts.away = True
        if gap > 0:
            self.simulation.scheduler.sleep(gap)

    def _on_member(self, member: Member) -> None:
        """The rank tells its monitor who it is."""
        self.member = member
        self.facts.wants_since = self.simulation.scheduler.now()
        self.simulation.invariants.registered(self)
        if self.monitor is None:
            self._begin_monitor()
        else:
            self.monitor.view = None

    def _begin_monitor(self) -> None:
        """Another monitor for each call; the one before it ends now."""
        self.monitor = SimulatedMonitor(self, self.monitor)
        self.simulation.heart_began(self.monitor)

    def _tell_monitor(self) -> "SimulatedMonitor":
        assert self.monitor is not None
        return self.monitor

    # What its restart loop asks for; see `RestartedProcess` ------------------------------------------------

    def enter_iteration(self, view: View) -> None:
        monitor = self._tell_monitor()
        monitor.view, monitor.rank, monitor.active = view, None, True

    def apply_state(self, state: State) -> bool:
        monitor = self._tell_monitor()
        monitor.rank, monitor.active = state.rank, state.mode == Mode.ACTIVE
        return False

    def open_store(self) -> Endpoint:
        return "host", 1

    def await_abort(self) -> None:
        if self.inside is not None:  # its own fault has ended the iteration: so it is heard
            seconds = self.simulation.scenario.step_seconds
            self._job.agreement.store.wait_for(keys.wake_end(self.inside), seconds)
            self._hear_of_end()

    def complete(self) -> None:
        self.simulation.invariants.completed(self, self._job.view)

    def leave(self, error: BaseException) -> Interruption | None:
        return Interruption.BASE_EXCEPTION if self._leaves() else None

    def left_job(self) -> None:
        self.told = not self.is_silent

    def assign(self, state: State, decision: Decision) -> State:
        store = PrefixStore(self._job.view.n, self._job.agreement.store)
        context = RankAssignmentCtx(state, store, set(decision.ranks))
        try:
            assigned: State = self._rank_assignment(context).state
        except AssertionError:  # an invariant does not hold
            self.fate = "broken"
            raise
        return assigned

    def call_function(self, state: State) -> FunctionRun:
        simulation, scenario, store = self.simulation, self.simulation.scenario, self._job.agreement.store
        n = self._job.view.n
        simulation.invariants.entered(self, self._job.view, state)
        self.facts.entered += 1
        if state.active_rank is None:
            return FunctionRun(has_returned=True)
        if state.active_rank == 0:
            note_active_target(store, n)
        raises = simulation.raises(self)
        for step in range(scenario.steps):
            if raises is not None and step == scenario.steps - 1:
                simulation.raised(self, raises)
                return FunctionRun(own_error=RuntimeError("simulated"))
            # The wrapper waits in another thread, which interrupts this one.
            if store.wait_for(keys.wake_end(n), scenario.step_seconds) is not None:
                self._hear_of_end()
                return FunctionRun()
        self.inside = None
        simulation.invariants.history.returned.setdefault(n, set()).add(state.active_rank)
        return FunctionRun(has_returned=True)

    def _hear_of_end(self) -> None:
        self.inside = None
        self._job.await_completion(None, 0)

    def _leaves(self) -> bool:
        """Whether it is to tell the others that it leaves."""
        if self.is_silent:
            return False
        self.inside, self.facts.died_at = None, self.simulation.scheduler.now()
        self.facts.leaving = True
        return True


class SimulatedJob(Membership):
    """A simulated process's part in the job: tells the invariants what it does."""

    process: SimulatedProcess

    def look_for(self, missing: Sequence[Member], waited: float) -> None:
        """Told for whom a restart waits."""
        waiting_line(self.agreement.store, missing, 0.0, 0.0)  # it reads where they run

    def publish(self, rank: int | None, error: BaseException) -> None:
        """See `Membership`."""
        self.process.simulation.invariants.history.published.add(self.view.n)
        super().publish(rank, error)

    def await_completion(self, active_rank: int | None, active_world_size: int) -> str:
        """See `Membership`."""
        outcome = super().await_completion(active_rank, active_world_size)
        process = self.process
        process.simulation.invariants.progress.check_hearing(process, self.view.n)
        process.facts.heard = self.view.n
        process.simulation.left(process)
        process.inside = None
        return outcome

    def await_endpoint(self, rank: int | None, sizes: Sizes) -> Endpoint | None:
        """See `Membership`; it is not waited for in every scenario."""
        is_awaited = self.process.simulation.scenario.endpoint
        return super().await_endpoint(rank, sizes) if is_awaited else ("host", 1)

    def has_failed(self) -> bool:
        """See `Membership`."""
        return self.process.fate != "broken" and super().has_failed()

    def _withdraw(self, error: BaseException) -> None:
        if not isinstance(error, AssertionError) and not self.process.is_silent:
            self.process.facts.leaving = True
            super()._withdraw(error)


@dataclasses.dataclass
class Seen:
    """A rank as its heart sees it at a tick; see `ft_wrapper.monitor.heart.Rank`."""

    member: Member
    view: View | None
    rank: int | None
    is_between: bool
    note_left_out: Callable[[bool], None]


class SimulatedMonitor(threading.Event):
    """A process's monitor for one call; set once another one has taken its place, or the process has ended.

    Args:
        process: whose.
        before: the one for the call before.

    Attributes:
        view: the iteration that the rank says it is in.
        rank: its rank there.
        active: whether it calls the function there.
        between: whether it has left a call in order, and has not made the next one.
        heart: the heartbeat thread.
        seen: what that read last of the rank.
    """

    def __init__(self, process: SimulatedProcess, before: "SimulatedMonitor | None") -> None:
        super().__init__()
        self.process = process
        self.view: View | None = None
        self.rank: int | None = None if before is None else before.rank
        self.active = True
        self.between = False
        self.seen: Seen | None = None
        self._left_out_at = math.inf
        simulation = process.simulation
        name = f"heart {process.name[5:]}" if before is None else f"{before.heart.name}'"
        self.heart: Task = simulation.scheduler.spawn(name, self._beat, daemon=True)
        self.heart.upcoming = ("sleep", (simulation.scenario.heartbeat_interval,))  # so it begins

    def is_set(self) -> bool:
        """Whether its heart is to end."""
        return not self.process.alive or self.process.monitor is not self

    def wait(self, timeout: float | None = None) -> bool:
        """Waits, in virtual time."""
        if timeout:
            self.process.simulation.scheduler.sleep(timeout)
        return self.is_set()

    def _beat(self) -> None:
        """The heartbeat thread: as long as the rank lives, also between two calls."""
        process, simulation = self.process, self.process.simulation
        scenario, now = simulation.scenario, simulation.scheduler.now
        agreement = self._with_lost_beats(simulation.agreement(self.heart.name, process.slot))
        due = now()
        while True:
            due = max(due + scenario.heartbeat_interval, now())
            simulation.scheduler.sleep(max(0.0, due - now()))
            if self.is_set():
                return
            member = process.member
            assert member is not None
            if self.seen is None or self.seen.member != member:
                heart = HeartBeat(agreement, str(member), scenario.limits)
            self.seen = Seen(member, self.view, self.rank, self.between, self._note_left_out)
            heart.tick([self.seen])
            if self.between:
                self._left_out_at = math.inf  # no one looks, until the rank finds out itself
            elif now() - self._left_out_at >= GRACE:
                simulation.invariants.ended_as_left_out(process)
                simulation.give_up(process)
            until = due + scenario.heartbeat_interval
            while (pause := heart.watch.leave_out_suspects()) and until > now():
                if self.wait(min(pause, until - now())):
                    break

    def _with_lost_beats(self, agreement: Agreement) -> Agreement:
        """A client whose heartbeats are lost at times."""
        beat, hearts = agreement.heartbeats.beat_heart, cast(Any, agreement.heartbeats)
        is_mute = self.process.simulation.is_mute
        hearts.beat_heart = lambda *how: None if is_mute(self.process) else beat(*how)
        return agreement

    def _note_left_out(self, left_out: bool) -> None:
        """As its heart tells it; see `RankMonitor`."""
        now = self.process.simulation.scheduler.now()
        self._left_out_at = min(self._left_out_at, now) if left_out else math.inf

    def report(self, name: str, interruption: Interruption) -> None:
        """Tells the others of the rank's death."""
        process, scenario = self.process, self.process.simulation.scenario
        agreement = process.simulation.agreement(name, process.slot)
        assert process.member is not None
        fault: Fault | None = Fault(process.member, self.rank, interruption, "simulated", "h", process.slot)
        active, timeout = self.active, scenario.barrier_timeout
        if self.between:
            fault, active, timeout = None, False, GRACE
        elif not active and self.view is not None:
            process.facts.reported_as_spare_in = self.view.n
        how: dict[str, Any] = {"active": active, "timeout": timeout, "returns": scenario.replaced}
        report_deaths(agreement, self.view, {process.member: fault}, **how)
