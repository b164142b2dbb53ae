"""One simulated process: the rank, which does what the wrapper does, and its monitor."""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
from typing import TYPE_CHECKING, Any, cast

from ..attribution import Interruption
from ..exception import InternalError, RankShouldRestart, RestartError, StoreUnavailable
from ..job import Job, Patience
from ..monitor.death import report_death
from ..monitor.heart import HeartBeat
from ..monitor.settings import MonitorSettings
from ..rank_assignment import RankAssignmentCtx, RankDiscarded
from ..state import Mode, State
from ..store import BarrierTimeout, Fault, Member, PrefixStore, StoreMixin, View, keys
from ..store.records import DONE, FAULT
from .scenario import Scenario, process_name
from .scheduler import Task

if TYPE_CHECKING:
    from .simulation import Simulation

LONG = 10_000.0
_GAP_OF_LATE = 20.0
GRACE = 5.0
"""The wrapper's termination_grace_time, in virtual seconds."""


class Leave(BaseException):
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


def _settings(scenario: Scenario) -> MonitorSettings:
    return MonitorSettings(
        soft_timeout=LONG,
        hard_timeout=LONG,
        termination_grace_time=GRACE,
        interval=scenario.heartbeat_interval,
        watchdog_interval=LONG,
        heartbeat_interval=scenario.heartbeat_interval,
        heartbeat_timeout=scenario.heartbeat_timeout,
        barrier_timeout=scenario.barrier_timeout,
        join_window=scenario.join_window,
        replaced=scenario.replaced,
    )


class SimulatedJob(Job):
    """Says, before a process does so, that it publishes a fault or gives up."""

    process: SimulatedProcess

    def wall_clock(self) -> float:
        """Always the same: what is in the store depends on the seed alone."""
        return 0.0

    def publish(self, rank: int | None, error: BaseException) -> None:
        """See `Job`."""
        self.process.simulation.invariants.publishes(self.view.n)
        super().publish(rank, error)

    def _withdraw(self, error: BaseException) -> None:
        task = self.process.task
        if isinstance(error, AssertionError) or (task is not None and task.crashed):
            return
        self.process.simulation.invariants.leaves(self.process)
        super()._withdraw(error)


@dataclasses.dataclass(eq=False)
class SimulatedProcess:
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
    _monitors: int = 0
    _left_out_at: float = math.inf

    def __post_init__(self) -> None:
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
        store = self.simulation.connect(self.name, self.slot)
        try:
            if after > 0:
                self.simulation.scheduler.sleep(after)
            self.started_at = self.simulation.scheduler.now()
            self._all_calls(store)
        except InternalError:
            raise  # a defect
        except RankDiscarded as error:
            self._ends("out", error)
        except Leave as error:
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

    def _all_calls(self, store: StoreMixin) -> None:
        simulation, scenario = self.simulation, self.simulation.scenario
        last: Job | None = None
        state = State(0, 1)
        for call in range(scenario.calls):
            job = SimulatedJob(store, self.slot, list(range(scenario.members)), self._patience(), call)
            job.process = self
            job.host, job.pid = "host", self.slot  # every run is the same, in whatever process it is made
            job.on_member = self._on_member
            self.called_at, self.away = simulation.scheduler.now(), False
            if last is None:
                job.register()
                if self.slot >= scenario.members and scenario.extra_is_early:
                    # As by hand, or from an older version: one that is not expected asks before the first.
                    store.ask_to_join(keys.BEFORE_FIRST, job.member, 0)
                if not job.join():
                    self._between_calls(call)
                    continue
                state = self._first_state(job)
            else:
                # The store outlived the last call: its members go on to the next one's first iteration.
                job.check_terms()
                job.member, job.view = last.member, last.view
                self._begin_monitor()
                try:
                    self._go_on(job, state)
                except BaseException as error:
                    self._leave(job, state, error, ends=False)
                    raise
            state = self._call(job, state)
            last = job
            if call < scenario.calls - 1:
                if simulation.quits(self, call):
                    self.between = True
                    self._ends("quit")
                    return
                self._between_calls(call)
        self._ends("late" if last is None else "done")

    def _between_calls(self, call: int) -> None:
        """The program does something else; the monitor goes on, if it had one."""
        if self.last >= 0:
            self.between = True
        self.away = True
        gap = self.simulation.scenario.gap(self.slot, call)
        gap = gap if self.last >= 0 else min(gap, _GAP_OF_LATE)  # many that come late would take for ever
        if gap > 0:
            self.simulation.scheduler.sleep(gap)

    def _patience(self) -> Patience:
        scenario = self.simulation.scenario
        return Patience(
            barrier=scenario.barrier_timeout,
            heartbeat=scenario.heartbeat_timeout,
            completion=scenario.completion_timeout,
            min_world_size=scenario.min_world_size,
            on_join=scenario.on_join,
            join_window=scenario.join_window,
            rejoin_wait=scenario.rejoin_wait,
            replaced=scenario.replaced,
            hard=scenario.heartbeat_timeout,  # for a log line alone: a simulated hang is ended by its fault
        )

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

    def _first_state(self, job: Job) -> State:
        members = self.simulation.scenario.members
        world_size = job.decision.world_size
        rank = job.decision.rank_of(job.member, None)
        return State(rank, world_size, initial_rank=self.slot, initial_world_size=members)

    def _go_on(self, job: Job, state: State) -> None:
        """From the rank in the iteration that ended to the one in the widened world of the next."""
        assert state.rank is not None
        job.go_on(state.rank, state.world_size)
        state.rank = job.decision.rank_of(job.member, state.rank)
        state.world_size = job.decision.world_size
        if job.decision.joined:
            state.active_world_size = None  # there may be more active ranks again

    def _call(self, job: Job, base: State) -> State:
        """One wrapped call."""
        assign = self.simulation.rank_assignment()
        while True:
            try:
                outcome, base = self._iterate(job, base, assign)
                self.inside = None
                if outcome == DONE:
                    self.simulation.invariants.completed(self, job.view)
                    return base
                self._go_on(job, base)
            except BaseException as error:
                self._leave(job, base, error, ends=self.active and not isinstance(error, RankDiscarded))
                raise

    def _iterate(self, job: Job, base: State, assign: Any) -> tuple[str, State]:
        """One iteration: how it ended, and the ranks in it."""
        simulation, scenario, store = self.simulation, self.simulation.scenario, job.store
        n = job.view.n
        if simulation.forgets and self.task is not None:
            known = (job.call, job.member, job.view, job.decision, base.rank, base.world_size)
            simulation.scheduler.forget(self.task, (*known, self.entered, tuple(self.completed)))
        fresh = copy.copy(base)
        fresh.iteration = n
        context = RankAssignmentCtx(fresh, PrefixStore(n, store), set(job.decision.ranks))
        self.view, self.rank, self.active = job.view, None, True  # before others wait for this rank
        try:
            state: State = assign(context).state
        except Exception as error:
            if not self._is_others_fault(job, base, error):
                raise
            return FAULT, base
        except RankShouldRestart:
            return FAULT, base
        self.rank, self.active = state.rank, state.mode == Mode.ACTIVE
        active_rank, active = state.active_rank, state.active_world_size or 0
        endpoint = ("host", 1) if scenario.endpoint and active_rank == 0 else None
        store.check_assignment(n, job.member, active_rank, state.world_size, active, endpoint=endpoint)
        if scenario.endpoint and job.await_endpoint(state.rank, 1.0) is None:
            return FAULT, state
        simulation.invariants.entered(self, job.view, state)
        self.entered += 1
        if active_rank is None:
            return self._await_completion(job, None, 0), state
        if active_rank == 0:
            store.note_wanted(n)
        raises = simulation.raises(self)
        for step in range(scenario.steps):
            if raises and step == scenario.steps - 1:
                simulation.raised(self)
                job.publish(state.rank, RuntimeError("simulated"))
            # The wrapper waits in another thread, which interrupts this one.
            if store.wait_for(keys.wake_end(n), scenario.step_seconds):
                self.inside = None
                return self._await_completion(job, None, 0), state
        self.inside = None
        simulation.invariants.returned(n, active_rank)
        return self._await_completion(job, active_rank, active), state

    def _await_completion(self, job: Job, active_rank: int | None, active: int) -> str:
        outcome = job.await_completion(active_rank, active)
        self.simulation.invariants.heard_of_end(self, job.view.n)
        self.heard = job.view.n
        self.simulation.left(self)
        return outcome

    def _is_others_fault(self, job: Job, base: State, error: Exception) -> bool:
        """As the wrapper tells whether a rank assignment failed because of another rank."""
        if isinstance(error, BarrierTimeout):
            job.publish(base.rank, error)
            return True
        if isinstance(error, AssertionError):
            return False  # an invariant does not hold
        return not isinstance(error, StoreUnavailable) and job.store.outcome_of(job.view.n) == FAULT

    def _leave(self, job: Job, state: State, error: BaseException, *, ends: bool) -> None:
        """As the wrapper leaves the job on any error."""
        if self.task is not None and self.task.crashed:
            return
        if isinstance(error, AssertionError):
            return  # an invariant does not hold
        self.inside, self.died_at = None, self.simulation.scheduler.now()
        self.simulation.invariants.leaves(self)
        job.leave(state.rank, Interruption.BASE_EXCEPTION, error, ends=ends)
        if ends and self.rank == 0:
            job.await_others()
        self.told = True  # unless it was told to leave once more meanwhile

    # Its monitor -------------------------------------------------------------------------------------------

    def _beat(self, name: str, number: int) -> None:
        """The monitor's heartbeat thread: as long as the rank lives, also between two calls."""
        simulation, scenario = self.simulation, self.simulation.scenario
        store = simulation.connect(name, self.slot)
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
                heart = HeartBeat(self._with_lost_beats(store), member, _settings(scenario))
                heart.watch = simulation.watch(store, member)
            self._observed((self.view, self.rank, self.between))
            heart.tick([_WatchedRank(self, member)])
            if self.between:
                self._left_out_at = math.inf  # no one looks, until the rank finds out itself
            elif simulation.scheduler.now() - self._left_out_at >= GRACE:
                simulation.invariants.ended_as_left_out(self)
                simulation.end_left_out(self)
            rest = due + scenario.heartbeat_interval - simulation.scheduler.now()
            heart.watch.leave_out_suspects(rest, _Stop(self, number))

    def _with_lost_beats(self, store: StoreMixin) -> StoreMixin:
        """A client whose heartbeats are lost at times."""
        beat, client = store.beat_heart, cast(Any, store)
        client.beat_heart = lambda *how: None if self.simulation.is_mute(self) else beat(*how)
        return store

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
        store = simulation.connect(name, self.slot)
        assert self.member is not None
        fault: Fault | None = Fault(self.member, self.rank, interruption, "simulated", "h", self.slot)
        self._observed((self.view, self.member, self.active, self.between))
        active, timeout = self.active, scenario.barrier_timeout
        if self.between:
            fault, active, timeout = None, False, GRACE
        elif not active and self.view is not None:
            self.reported_as_spare_in = self.view.n
        report_death(
            store, self.view, self.member, fault, active=active, timeout=timeout, returns=scenario.replaced
        )
