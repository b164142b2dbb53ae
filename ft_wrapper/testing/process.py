"""One simulated process: the rank, which does what the wrapper does, and its monitor."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

from ..attribution import Interruption
from ..exception import InternalError, RankShouldRestart, RestartError
from ..job import Job, Patience
from ..monitor.death import report_death
from ..monitor.housekeeper import Housekeeper
from ..rank_assignment import RankAssignmentCtx, RankDiscarded
from ..state import Mode, State
from ..store import Fault, Member, PrefixStore, StoreMixin, View, keys
from ..store.records import DONE, FAULT
from .scenario import process_name
from .scheduler import Task

if TYPE_CHECKING:
    from .simulation import Simulation

LONG = 10_000.0


class Leave(BaseException):
    """Ctrl-C, or SIGTERM: the process leaves the job in order."""


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
        monitored: whether it has a monitor: it has none before it has registered, and between calls.
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
    monitored: bool = False
    started_at: float = 0.0
    died_at: float = 0.0
    wants_since: float = 0.0
    entered: int = 0
    completed: list[int] = dataclasses.field(default_factory=list)
    _monitors: int = 0

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
        self.fate, self.error = fate, error
        if not self.told:
            self.died_at = self.simulation.scheduler.now()

    def _all_calls(self, store: StoreMixin) -> None:
        scenario = self.simulation.scenario
        last: Job | None = None
        state = State(0, 1)
        for call in range(scenario.calls):
            job = Job(store, self.slot, list(range(scenario.members)), self._patience(), call)
            job.host, job.pid = "host", self.slot  # every run is the same, in whatever process it is made
            job.on_member = self._on_member
            if last is None:
                job.register()
                if not job.join():
                    self._between_calls()
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
                self._between_calls()
        self._ends("late" if last is None else "done")

    def _between_calls(self) -> None:
        """The program does something else; nobody watches."""
        self.monitored = False
        if self.simulation.scenario.between > 0:
            self.simulation.scheduler.sleep(self.simulation.scenario.between)

    def _patience(self) -> Patience:
        scenario = self.simulation.scenario
        return Patience(
            barrier=scenario.barrier_timeout,
            heartbeat=scenario.heartbeat_timeout,
            completion=LONG,
            min_world_size=scenario.min_world_size,
            on_join=scenario.on_join,
            join_window=scenario.join_window,
            rejoin_wait=scenario.rejoin_wait,
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
        simulation = self.simulation
        self.monitored, self.view = True, None
        self._monitors += 1
        name = f"heart {self.name[5:]}" + "'" * (self._monitors - 1)
        self.heart = simulation.scheduler.spawn(name, self._beat, name, self._monitors, daemon=True)
        self.heart.upcoming = ("sleep", (simulation.scenario.heartbeat_interval,))  # so it begins
        simulation.heart_began(self)

    def _first_state(self, job: Job) -> State:
        members = self.simulation.scenario.members
        world_size = job.decision.world_size
        if job.member in job.decision.joined:
            rank = job.decision.rank_of(job.member)
        else:
            raise InternalError(f"{job.member} joined in {job.view.n}, whose decision does not say so")
        return State(rank, world_size, initial_rank=self.slot, initial_world_size=members)

    def _go_on(self, job: Job, state: State) -> None:
        """From the rank in the iteration that ended to the one in the widened world of the next."""
        assert state.rank is not None
        job.go_on(state.rank, state.world_size)
        state.rank = job.decision.rank_after(state.rank)
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
                self._leave(job, base, error, ends=not isinstance(error, RankDiscarded))
                raise

    def _iterate(self, job: Job, base: State, assign: Any) -> tuple[str, State]:
        """One iteration: how it ended, and the ranks in it."""
        simulation, scenario, store = self.simulation, self.simulation.scenario, job.store
        n = job.view.n
        if simulation.forgets and self.task is not None:
            known = (job.call, job.member, job.view, job.decision, base.rank, base.world_size)
            simulation.scheduler.forget(self.task, (*known, self.entered, tuple(self.completed)))
        self.view, self.rank, self.active = job.view, base.rank, True
        fresh = copy.copy(base)
        fresh.iteration = n
        context = RankAssignmentCtx(fresh, PrefixStore(n, store), set(job.decision.ranks))
        try:
            state: State = assign(context).state
        except RankShouldRestart:
            return FAULT, fresh
        self.rank, self.active = state.rank, state.mode == Mode.ACTIVE
        active_rank, active = state.active_rank, state.active_world_size or 0
        endpoint = ("host", 1) if scenario.endpoint and active_rank == 0 else None
        store.check_assignment(n, job.member, active_rank, state.world_size, active, endpoint=endpoint)
        if scenario.endpoint and job.await_endpoint(state.rank, 1.0) is None:
            return FAULT, state
        simulation.invariants.entered(self, job.view, state)
        self.entered += 1
        if active_rank is None:
            return job.await_completion(None, 0), state
        raises = simulation.raises(self)
        for step in range(scenario.steps):
            if raises and step == scenario.steps - 1:
                job.publish(state.rank, RuntimeError("simulated"))
            # The wrapper waits in another thread, which interrupts this one.
            if store.wait_for(keys.wake_end(n), scenario.step_seconds):
                self.inside = None
                return job.await_completion(None, 0), state
        self.inside = None
        return job.await_completion(active_rank, active), state

    def _leave(self, job: Job, state: State, error: BaseException, *, ends: bool) -> None:
        """As the wrapper leaves the job on any error."""
        if self.task is not None and self.task.crashed:
            return
        if isinstance(error, AssertionError):
            return  # an invariant does not hold
        self.inside, self.died_at = None, self.simulation.scheduler.now()
        job.leave(state.rank, Interruption.BASE_EXCEPTION, error, ends=ends)
        self.told = True  # unless it was told to leave once more meanwhile

    # Its monitor -------------------------------------------------------------------------------------------

    def _beat(self, name: str, number: int) -> None:
        """The monitor's heartbeat thread: as long as the rank lives and is in a call."""
        simulation, scenario = self.simulation, self.simulation.scenario
        store = simulation.connect(name, self.slot)
        member: Member | None = None
        while True:
            simulation.scheduler.sleep(scenario.heartbeat_interval)
            if not self._observed(self.alive and self.monitored and self._monitors == number):
                return
            if member is None or self._observed(self.member) != member:
                assert self.member is not None
                member = self.member
                watch = simulation.watch(store, member)
                house = Housekeeper(store, scenario.join_window)
            if not simulation.is_mute(self):
                store.send_heartbeat(member)
            view, rank = self._observed((self.view, self.rank))
            if view is not None:
                watch.look(view)
                house.keep(view, rank)

    def _observed(self, value: Any) -> Any:
        """What the monitor reads in the memory that it shares with the rank."""
        self.simulation.scheduler.learn(value)
        return value

    def report(self, name: str, interruption: Interruption) -> None:
        """The monitor after its rank's death."""
        store = self.simulation.connect(name, self.slot)
        assert self.member is not None
        fault = Fault(self.member, self.rank, interruption, "simulated", "h", self.slot)
        self._observed((self.view, self.member, self.active))
        report_death(
            store,
            self.view,
            self.member,
            fault,
            active=self.active,
            timeout=self.simulation.scenario.barrier_timeout,
        )
