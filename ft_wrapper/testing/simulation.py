"""A job of simulated processes on the real store code, which runs a scenario and checks the invariants.

Each process is a task that does what the wrapper does: register, join, enter, leave, arrive, go on, complete.
Beside it is its monitor: a task that sends heartbeats and watches the next members, and, once the process has
died, a task that reports the death. Every client has a clock of its own, hours apart from the others'.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from ..attribution import Interruption
from ..compose import Compose
from ..exception import StoreError
from ..monitor.neighbours import NeighbourWatch
from ..rank_assignment import MaxActiveWorldSize, RankAssignment, RankAssignmentCtx, ShiftRanks
from ..store import Member, StoreMixin
from .fake_store import FakeStore
from .invariants import Invariants, Violation
from .policies import Policy
from .process import Leave, SimulatedProcess
from .scenario import Disturbance, Scenario
from .scheduler import Deadlock, Scheduler, Task, TooLong

Connect = Callable[[str], StoreMixin]
StoreFactory = Callable[[Scheduler, Scenario], Connect]
"""Makes the shared contents for one run, and returns what connects a client, by its name, to them."""

LOOPS = 40
MAX_STEPS = 60_000
MAX_TIME = 1_500.0
_EXCHANGE_TIMEOUT = timedelta(seconds=10_000)


# Read as sets: nobody tells the order of their entries.
_LOG = re.compile(r"ft_wrapper/1/(?:(?:arrived|dead|join|finished|faults)/|goodbyes)")


class SimulatedStore(FakeStore):
    """A client that reads as `TCPStore` does: in one step."""

    def essence(self, key: str, value: Any) -> Any:
        if isinstance(value, bytes) and _LOG.match(key):
            return frozenset(value.split(b"\n"))
        return value

    def try_get(self, key: str) -> str | None:
        # With libuv this wakes those who wait for an absent key.
        if not self._contents.use_libuv:
            return super().try_get(key)
        value = self.compare_set(key, "never", "never").decode()
        return None if value == "never" else value


def simulated_stores(scheduler: Scheduler, scenario: Scenario) -> Connect:
    """The usual stores of a simulation."""
    return SimulatedStore(scheduler, use_libuv=scenario.use_libuv).clone


class Simulation:
    """Runs a scenario and checks the invariants after every step.

    Args:
        scenario: what the job is to do, and what happens to it.
        seed: what the order of the steps is chosen from.
        choices: the first choices of that order, as ``scheduler.choices`` of another run told them.
        policy: who goes on; at random, from the seed, when None.
        stores: the stores that are tested; clients of a `FakeStore` when None. A client must take its steps
            on the scheduler; its clock and its nonces are given to it.
        rank_assignment: makes the rank assignment that is tested, one for each process and call; the first
            ranks are active, and all move up, when None.

    Attributes:
        scheduler: runs it.
        invariants: what is checked.
        processes: all processes that were started.
        forgets: whether nothing but the last decision counts for a process that is in.
    """

    def __init__(
        self,
        scenario: Scenario,
        seed: int = 0,
        choices: Sequence[int] = (),
        *,
        policy: Policy | None = None,
        stores: StoreFactory | None = None,
        rank_assignment: Callable[[], RankAssignment] | None = None,
    ) -> None:
        self.scenario = scenario
        self.scheduler = Scheduler(seed, choices, policy=policy, max_steps=MAX_STEPS, max_time=MAX_TIME)
        self.forgets = rank_assignment is None  # another one may remember something
        self.rank_assignment = rank_assignment or functools.partial(
            default_assignment, scenario.active, scenario.exchange
        )
        self._connect = (stores or self.stores)(self.scheduler, scenario)
        self.processes: list[SimulatedProcess] = []
        self.invariants = Invariants(self, self._connect("invariants"), slot_order=rank_assignment is None)
        self.scheduler.add_state(self.known)
        self.scheduler.after_each_step(self.invariants.check)
        self.scheduler.at_end(self.invariants.check_end)
        self.stops: list[tuple[float, float]] = []  # of paused processes: from when to when
        self._respawned: set[tuple[int, int]] = set()
        self._planned: dict[tuple[int, int], list[Disturbance]] = {}
        for disturbance in scenario.disturbances:
            self._planned.setdefault((disturbance.slot, disturbance.life), []).append(disturbance)
        for slot in range(scenario.members):
            self.start(slot)

    stores: StoreFactory = staticmethod(simulated_stores)

    def run(self) -> Simulation:
        """Runs it to its end.

        Raises:
            SchedulerError: an invariant does not hold, somebody waits for ever, or something raised.
        """
        try:
            self.scheduler.run()
        except (Deadlock, TooLong) as error:
            error.what = f"I10: not everybody comes to an end: {error.what}"
            raise
        return self

    @property
    def finished(self) -> bool:
        """Whether every process has come to its end."""
        return not any(process.alive for process in self.processes)

    def known(self) -> object:
        """What monitors and invariants know of the processes otherwise than from the store."""
        return self.invariants.known(), tuple(process.state() for process in self.processes)

    def connect(self, name: str, slot: int) -> StoreMixin:
        """A client of the store, with its own clock: hours apart, before or after."""
        store: Any = self._connect(name)
        skew = 5_000.0 * (slot * 7 % 5 - 2)
        scheduler = self.scheduler
        store.now = lambda: scheduler.now() + skew
        nonces = itertools.count()
        store.new_nonce = lambda: f"{name}-{next(nonces)}".replace(" ", "")
        client: StoreMixin = store
        return client

    def watch(self, store: StoreMixin, member: Member) -> NeighbourWatch:
        """Who watches the neighbours for a member's monitor."""
        return NeighbourWatch(store, member, self.scenario.heartbeat_timeout)

    # Processes ---------------------------------------------------------------------------------------------

    def start(self, slot: int, after: float = 0.0) -> SimulatedProcess:
        """Starts a process for a slot, whether another one lives or not.

        Args:
            slot: the slot.
            after: virtual seconds until it begins.
        """
        life = sum(1 for process in self.processes if process.slot == slot)
        process = SimulatedProcess(self, slot, life)
        self.processes.append(process)

        def main() -> None:
            process.main(after)
            self._respawn(process)

        process.task = self.scheduler.spawn(process.name, main)
        for disturbance in self._planned.get((slot, life), ()):
            self._plan(process, disturbance)
        return process

    def crash(self, process: SimulatedProcess, *, host: bool = False, reported: bool = False) -> None:
        """Kills a process.

        Args:
            process: which.
            host: its monitor with it; otherwise that reports the death.
            reported: the monitor has reported it already.
        """
        task = process.task
        assert task is not None
        if task.done:
            return
        process.fate, process.inside, process.died_at = "dead", None, self.scheduler.now()
        process.disturbed = True
        if host and process.heart is not None:
            self.scheduler.crash(process.heart)
        if not process.monitored:
            self.invariants.nobody_tells()
        elif not host and not reported:
            self._report(process, Interruption.TERMINATED)
        self._respawn(process)
        self.scheduler.crash(task)

    def _report(self, process: SimulatedProcess, interruption: Interruption) -> None:
        name = f"report {process.name[5:]}"
        reporter = self.scheduler.spawn(name, process.report, name, interruption)
        for disturbance in self._of(process, "reporter"):
            self.scheduler.crash_at(reporter, disturbance.step)

    def _respawn(self, process: SimulatedProcess) -> None:
        """Starts the next process of the slot, if that is planned and was not done."""
        for disturbance in self._of(process, "respawn"):
            if (process.slot, process.life) not in self._respawned:
                self._respawned.add((process.slot, process.life))
                self.start(process.slot, disturbance.seconds)

    # What happens to them ----------------------------------------------------------------------------------

    def _of(self, process: SimulatedProcess, kind: str) -> list[Disturbance]:
        planned = self._planned.get((process.slot, process.life), ())
        return [disturbance for disturbance in planned if disturbance.kind == kind]

    def raises(self, process: SimulatedProcess) -> bool:
        """Whether the function raises that a process has just entered."""
        return any(disturbance.step == process.entered for disturbance in self._of(process, "exception"))

    def is_mute(self, process: SimulatedProcess) -> bool:
        """Whether a process's heartbeats are lost at present."""
        now = self.scheduler.now()
        return any(d.step <= now < d.step + d.seconds for d in self._of(process, "mute"))

    def heart_began(self, process: SimulatedProcess) -> None:
        """A process's monitor began to send heartbeats."""
        assert process.heart is not None
        for disturbance in self._of(process, "deaf"):
            self.scheduler.pause_at(process.heart, disturbance.step, disturbance.seconds)

    def _plan(self, process: SimulatedProcess, disturbance: Disturbance) -> None:
        kind, seconds, task = disturbance.kind, disturbance.seconds, process.task
        assert task is not None
        actions: dict[str, Callable[[], None]] = {
            "crash": lambda: self.crash(process),
            "host": lambda: self.crash(process, host=True),
            "leave": lambda: _leave(process),
            "doom": lambda: self._doom(process),
            "loop": lambda: self._crash_loop(process, seconds),
            "pause": lambda: self._stop(task, seconds),
            "freeze": lambda: self._freeze(process, seconds),
            "outage": lambda: self._outage(seconds),
            "error": lambda: self._fake(process).fail(client=process.name, error=StoreError("simulated")),
            "repeat": lambda: self._fake(process).repeat(client=process.name),
            "respawn": lambda: self._respawn(process),
        }
        if kind not in ("repeat", "reporter", "exception", "respawn", "outage"):
            process.disturbed = True
        if kind in actions:
            self.scheduler.at_step(task, disturbance.step, actions[kind])

    def _fake(self, process: SimulatedProcess) -> FakeStore:
        client = self._connect(process.name)
        inner = getattr(client, "torch_store", client)
        if not isinstance(inner, FakeStore):
            raise TypeError(f"only a FakeStore, or what holds one, loses replies and fails; not {client!r}")
        return inner

    def _doom(self, process: SimulatedProcess) -> None:
        """The monitor gives the process up and reports its death; it lives on until it is killed."""
        if not process.alive or not process.monitored:
            return
        self._report(process, Interruption.HARD_TIMEOUT)

        def kill() -> None:
            self.scheduler.sleep(0.05)
            self.crash(process, reported=True)

        self.scheduler.spawn(f"kill {process.name[5:]}", kill)

    def _crash_loop(self, process: SimulatedProcess, seconds: float) -> None:
        """The host is lost, and the slot is taken again elsewhere, over and over, without success."""
        name = f"again {process.name[5:]}"

        def again() -> None:
            store = self.connect(name, process.slot)
            for _ in range(LOOPS):
                self.scheduler.sleep(seconds)
                store.register(process.slot, "{}")

        self.scheduler.spawn(name, again)
        self.crash(process, host=True)

    def _freeze(self, process: SimulatedProcess, seconds: float) -> None:
        assert process.task is not None
        if process.heart is not None:
            self.scheduler.pause(process.heart, seconds)
        self._stop(process.task, seconds)

    def _stop(self, task: Task, seconds: float) -> None:
        now = self.scheduler.now()
        self.stops.append((now, now + seconds))
        self.scheduler.pause(task, seconds)

    def _outage(self, seconds: float) -> None:
        for task in self.scheduler.tasks:
            self.scheduler.pause(task, seconds)


def _leave(process: SimulatedProcess) -> None:
    if process.alive:
        raise Leave


@functools.cache
def default_assignment(active: int, exchange: bool) -> RankAssignment:
    """The first ranks are active, and all move up.

    Args:
        active: the most active ranks.
        exchange: whether the ranks talk to each other as well.
    """
    parts: tuple[RankAssignment, ...] = (MaxActiveWorldSize(active), ShiftRanks())
    made: RankAssignment = Compose(*parts, Exchange()) if exchange else Compose(*parts)
    return made


class Exchange(RankAssignment):
    """Changes nothing, but lets all ranks wait for each other."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Exchanges ranks; see `RankAssignment`."""
        mine = str(ctx.state.rank)
        count = ctx.state.world_size - len(ctx.terminated_ranks)
        assert ctx.state.rank is not None
        got = ctx.store.compute_once("exchange", ctx.state.rank, mine, count, dict, _EXCHANGE_TIMEOUT)
        if got != mine:
            raise Violation(f"compute_once gave rank {mine} the result of another: {got}")
        return ctx
