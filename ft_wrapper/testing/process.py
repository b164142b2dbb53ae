"""One simulated process: the rank, which does what the wrapper does, and its monitor."""

from __future__ import annotations

import dataclasses
import math
import threading
from typing import TYPE_CHECKING, Any, cast

from ..attribution import Interruption
from ..exception import InternalError, RestartError
from ..protocol import keys
from ..protocol.agreement import Agreement
from ..protocol.deaths import report_death
from ..protocol.heart import HeartBeat
from ..protocol.housekeeping import note_wanted
from ..rank_assignment import RankAssignment, RankAssignmentCtx, RankDiscarded
from ..restart.loop import Endpoint, Left, Performer
from ..settings import Limits
from ..state import Mode, State
from ..store import Decision, Fault, Member, PrefixStore, View
from .scenario import process_name
from .simulated_job import SimulatedJob
from .tasks import Task

if TYPE_CHECKING:
    from .simulation import Simulation

_GAP_OF_LATE = 20.0
GRACE = Limits.termination_grace_time


class CtrlC(BaseException):
    """Ctrl-C, or SIGTERM: the process leaves the job in order."""


class _Stop(threading.Event):
    """What ends a heart's wait, in virtual time."""

    def __init__(self, process: SimulatedProcess, number: int) -> None:
        super().__init__()
        self._process = process
        self._number = number

    def wait(self, timeout: float | None = None) -> bool:
        if timeout:
            self._process.simulation.scheduler.sleep(timeout)
        return not self._process._is_watched_by(self._number)


class _WatchedRank:
    """A rank as its heart sees it."""

    def __init__(self, process: SimulatedProcess, member: Member) -> None:
        self.member = member
        self.view = process.view
        self.rank = process.rank
        self.is_between = process.between
        self._process = process

    def note_left_out(self, left_out: bool) -> None:
        """See `RankMonitor`."""
        self._process.note_left_out(left_out)


@dataclasses.dataclass(eq=False)
class SimulatedProcess(Performer):
    """One process of a slot, and what its monitor and the invariants know of it without asking the store.

    Args:
        simulation: what it is part of.
        slot: the initial rank.
        life: how many processes of the slot were started before it.

    Attributes:
        name: what it is called in traces.
        task: the rank's main thread.
        heart: the monitor's heartbeat thread.
        member: the incarnation that it has taken.
        view: the iteration that it is in.
        rank: its rank there.
        active: whether it calls the function there.
        inside: the iteration whose function it is in.
        last: the last iteration that it entered.
        fate: ``running``, ``done``, ``late`` (all was done when it came), ``out`` (the others go on without
            it), ``failed``, ``dead`` or ``left``.
        error: why it failed.
        disturbed: whether something was done to it, so that it may be left out.
        told: whether it told the others that it leaves.
        leaving: whether it is about to tell.
        doomed: whether its monitor has given it up.
        monitored: whether it has a monitor: it has none before it has registered.
        between: whether it has left a call in order, and has not made the next one.
        called_at: when it made its last call.
        away: whether it is between two calls, also if it was in none.
        entered_at: when it entered its last iteration.
        died_inside: the iteration that it was killed in, before it had heard of its end.
        heard: the last iteration of whose end it has heard.
        reported_as_spare_in: the iteration in which its monitor knew that it was a spare when it ended.
        started_at: when it began, died_at: when it ended, in virtual seconds.
        wants_since: when it took its incarnation, in order to join.
        entered: number of iterations that it entered.
        completed: the iterations that it returned from.
        broken: whether it has found an invariant broken.
    """

    simulation: Simulation
    slot: int
    life: int = 0
    name: str = ""
    task: Task | None = None
    heart: Task | None = None
    member: Member | None = None
    view: View | None = None
    rank: int | None = None
    active: bool = True
    inside: int | None = None
    last: int = -1
    fate: str = "running"
    error: BaseException | None = None
    disturbed: bool = False
    told: bool = False
    leaving: bool = False
    doomed: bool = False
    monitored: bool = False
    between: bool = False
    called_at: float = 0.0
    away: bool = False
    entered_at: float = 0.0
    died_inside: int | None = None
    heard: int = -1
    reported_as_spare_in: int = -1
    started_at: float = 0.0
    died_at: float = 0.0
    wants_since: float = 0.0
    entered: int = 0
    completed: list[int] = dataclasses.field(default_factory=list)
    broken: bool = False
    _monitors: int = 0
    _left_out_at: float = math.inf

    def __post_init__(self) -> None:
        self._job: SimulatedJob
        self._rank_assignment: RankAssignment
        self.name = process_name(self.slot, self.life)
        self.started_at = self.simulation.scheduler.now()

    @property
    def alive(self) -> bool:
        """Whether it has not come to its end."""
        return self.fate == "running"

    def state(self) -> tuple[object, ...]:
        """All that its monitor and the invariants know of it."""
        return (
            (self.fate, self.disturbed, self.told, self.monitored, self.member, self.inside, self.last),
            (self.between, self.doomed, self.called_at),
            (None if self.view is None else self.view.head, self.rank, self.active, tuple(self.completed)),
            (self.started_at, self.died_at, self.wants_since, self._monitors),
        )

    # The rank ----------------------------------------------------------------------------------------------

    def main(self, after: float = 0.0) -> None:
        """What the wrapper does, in the rank's main thread.

        Args:
            after: virtual seconds until it begins.
        """
        agreement = self.simulation.agreement(self.name, self.slot)
        try:
            if after > 0:
                self.simulation.scheduler.sleep(after)
            self.started_at = self.simulation.scheduler.now()
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
            self.died_at = self.simulation.scheduler.now()
        if self.between:
            self.simulation.report(self, Interruption.TERMINATED)

    def _all_calls(self, agreement: Agreement) -> None:
        simulation, scenario = self.simulation, self.simulation.scenario
        last: SimulatedJob | None = None
        state = State(0, 1)
        for call in range(scenario.calls):
            job = SimulatedJob(agreement, self.slot, list(range(scenario.members)), scenario.limits, call)
            job.process, self._job = self, job
            job.host, job.pid = "host", self.slot  # every run is the same, in whatever process it is made
            job.on_member = self._on_member
            self.called_at, self.away = simulation.scheduler.now(), False
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
                    self.between = True
                    self._ends("quit")
                    return
                self._between_calls(call)
        self._ends("late" if last is None else "done")

    def _go_on(self, job: SimulatedJob, last: SimulatedJob, state: State) -> None:
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
        if self.last >= 0:
            self.between = True
        self.away = True
        gap = self.simulation.scenario.gap(self.slot, call)
        gap = gap if self.last >= 0 else min(gap, _GAP_OF_LATE)  # many that come late would take for ever
        if gap > 0:
            self.simulation.scheduler.sleep(gap)

    def _on_member(self, member: Member) -> None:
        """The rank tells its monitor who it is, through a socket that both share."""
        simulation = self.simulation
        self.member, self.view = member, None
        self.wants_since = simulation.scheduler.now()
        simulation.invariants.registered(self)
        if not self.monitored:
            self._begin_monitor()

    def _begin_monitor(self) -> None:
        """Another monitor for each call; the one before it ends now."""
        simulation = self.simulation
        self.monitored, self.between, self.view, self.active = True, False, None, True
        self._left_out_at = math.inf
        self._monitors += 1
        name = f"heart {self.name[5:]}" + "'" * (self._monitors - 1)
        self.heart = simulation.scheduler.spawn(name, self._beat, name, self._monitors, daemon=True)
        self.heart.upcoming = ("sleep", (simulation.scenario.heartbeat_interval,))  # so it begins
        simulation.heart_began(self)

    # What its restart loop asks for; see `Performer` -------------------------------------------------------

    def know(self, view: View, decision: Decision) -> None:
        self.view, self.rank, self.active = view, None, True

    def take(self, state: State) -> bool:
        self.rank, self.active = state.rank, state.mode == Mode.ACTIVE
        return False

    def serve(self) -> Endpoint | None:
        return ("host", 1) if self.simulation.scenario.endpoint else None

    def settle(self) -> None:
        if self.inside is not None:  # its own fault has ended the iteration: so it is heard
            seconds = self.simulation.scenario.step_seconds
            self._job.agreement.store.hear(keys.wake_end(self.inside), seconds)
            self.inside = None
            self._job.await_completion(None, 0)

    def complete(self) -> None:
        self.simulation.invariants.completed(self, self._job.view)

    def leave(self, error: BaseException, is_missed: bool) -> Interruption | None:
        return Interruption.BASE_EXCEPTION if self._leaves() else None

    def gone(self) -> None:
        self.told = not self._is_silent()

    def assign(self, state: State, decision: Decision) -> State:
        simulation, job = self.simulation, self._job
        if simulation.forgets and self.task is not None:
            known = (job.call, job.member, job.view, job.decision, state.rank, state.world_size)
            simulation.scheduler.forget(self.task, (*known, self.entered, tuple(self.completed)))
        context = RankAssignmentCtx(state, PrefixStore(job.view.n, job.agreement.store), set(decision.ranks))
        try:
            assigned: State = self._rank_assignment(context).state
        except AssertionError:  # an invariant does not hold
            self.broken = True
            raise
        return assigned

    def call_function(self, state: State, entered: int) -> Left:
        simulation, scenario, store = self.simulation, self.simulation.scenario, self._job.agreement.store
        n = self._job.view.n
        simulation.invariants.entered(self, self._job.view, state)
        self.entered += 1
        if state.active_rank is None:
            return Left(has_returned=True)
        if state.active_rank == 0:
            note_wanted(store, n)
        raises = simulation.raises(self)
        for step in range(scenario.steps):
            if raises and step == scenario.steps - 1:
                simulation.raised(self)
                return Left(error=RuntimeError("simulated"))
            # The wrapper waits in another thread, which interrupts this one.
            if store.hear(keys.wake_end(n), scenario.step_seconds) is not None:
                self.inside = None
                self._job.await_completion(None, 0)
                return Left()
        self.inside = None
        simulation.invariants.returned(n, state.active_rank)
        return Left(has_returned=True)

    def _is_silent(self) -> bool:
        """Whether it tells no one how it ends: it was killed, or an invariant is broken."""
        return self.broken or (self.task is not None and self.task.crashed)

    def _leaves(self) -> bool:
        """Whether it is to tell the others that it leaves."""
        if self._is_silent():
            return False
        self.inside, self.died_at = None, self.simulation.scheduler.now()
        self.simulation.invariants.leaves(self)
        return True

    # Its monitor -------------------------------------------------------------------------------------------

    def _beat(self, name: str, number: int) -> None:
        """The monitor's heartbeat thread: as long as the rank lives, also between two calls."""
        simulation, scenario = self.simulation, self.simulation.scenario
        agreement = simulation.agreement(name, self.slot)
        member: Member | None = None
        due = simulation.scheduler.now()
        while True:
            due = max(due + scenario.heartbeat_interval, simulation.scheduler.now())
            simulation.scheduler.sleep(max(0.0, due - simulation.scheduler.now()))
            if not self._observed(self._is_watched_by(number)):
                return
            if member is None or self._observed(self.member) != member:
                assert self.member is not None
                member = self.member
                heart = HeartBeat(self._with_lost_beats(agreement), member, scenario.limits)
                heart.watch = simulation.watch(agreement, member)
            self._observed((self.view, self.rank, self.between))
            heart.tick([_WatchedRank(self, member)])
            if self.between:
                self._left_out_at = math.inf  # no one looks, until the rank finds out itself
            elif simulation.scheduler.now() - self._left_out_at >= GRACE:
                simulation.invariants.ended_as_left_out(self)
                simulation.give_up(self)
            rest = due + scenario.heartbeat_interval - simulation.scheduler.now()
            heart.watch.leave_out_suspects(rest, _Stop(self, number))

    def _with_lost_beats(self, agreement: Agreement) -> Agreement:
        """A client whose heartbeats are lost at times."""
        beat, hearts = agreement.heartbeats.beat_heart, cast(Any, agreement.heartbeats)
        hearts.beat_heart = lambda *how: None if self.simulation.is_mute(self) else beat(*how)
        return agreement

    def _is_watched_by(self, number: int) -> bool:
        return self.alive and self.monitored and self._monitors == number

    def note_left_out(self, left_out: bool) -> None:
        """As its heart tells it; see `RankMonitor`."""
        now = self.simulation.scheduler.now()
        self._left_out_at = min(self._left_out_at, now) if left_out else math.inf

    def _observed(self, value: Any) -> Any:
        """What the monitor reads in the memory that it shares with the rank."""
        self.simulation.scheduler.learn(value)
        return value

    def report(self, name: str, interruption: Interruption) -> None:
        """The monitor after its rank's death."""
        simulation, scenario = self.simulation, self.simulation.scenario
        agreement = simulation.agreement(name, self.slot)
        assert self.member is not None
        fault: Fault | None = Fault(self.member, self.rank, interruption, "simulated", "h", self.slot)
        self._observed((self.view, self.member, self.active, self.between))
        active, timeout = self.active, scenario.barrier_timeout
        if self.between:
            fault, active, timeout = None, False, GRACE
        elif not active and self.view is not None:
            self.reported_as_spare_in = self.view.n
        report_death(
            agreement,
            self.view,
            self.member,
            fault,
            active=active,
            timeout=timeout,
            returns=scenario.replaced,
        )
