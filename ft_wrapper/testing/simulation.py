"""A job of simulated processes on the real store code, which runs a scenario and checks the invariants.

Each process is a task that runs the wrapper's own restart loop. Beside it is its monitor: a task that sends
heartbeats and watches the next members, and, once the process has died, a task that reports the death. Every
client has a clock of its own, hours apart from the others'.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ..attribution import Interruption
from ..exception import StoreError
from ..protocol.agreement import Agreement
from ..protocol.deaths import holders, report_lost
from ..protocol.neighbours import NeighbourWatch
from ..rank_assignment import (
    RankAssignment,
)
from ..restart.loop import RestartLoop
from ..state import State
from ..store import Fault, Member, StoreMixin
from .assignments import default_assignment
from .fake_store import FakeStore
from .invariants import Invariants
from .policies import Policy
from .process import CtrlC, SimulatedProcess
from .scenario import HARD_TIMEOUT, LOOPS, Disturbance, Scenario
from .scheduler import Deadlock, Scheduler, TooLong
from .simulated_job import SimulatedJob
from .simulated_store import StoreFactory, simulated_stores
from .tasks import Task

MAX_STEPS = 60_000
MAX_TIME = 4_000.0
_FLAPS = 6
_SOFT_TIMEOUT = 15.0
_MOST_LIVES = 3
# What keeps somebody from acting for a while is bad luck, for which all are excused; less than that is none.
_HARMLESS = 4.0
_OUTAGE_SPREAD = 0.2  # of heartbeat_timeout: within that all clients reach the store again


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
        knows_store: whether the store is a `FakeStore`, whose operations are known.
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
        self.scheduler = self.schedulers(seed, choices, policy=policy, max_steps=MAX_STEPS, max_time=MAX_TIME)
        # Another one may remember something.
        self.forgets = rank_assignment is None and scenario.exchange != "tree"
        self.rank_assignment = rank_assignment or functools.partial(
            default_assignment, scenario.active, scenario.exchange, scenario.node_size
        )
        self.knows_store = stores is None  # another store may take many for one
        self._connect = (stores or self.stores)(self.scheduler, scenario)
        self.processes: list[SimulatedProcess] = []
        self.invariants = Invariants(
            self, Agreement(self._connect("invariants"), self.parts), slot_order=self.forgets
        )
        self.scheduler.add_state(self.known)
        self.scheduler.after_each_step(self.invariants.check)
        self.scheduler.at_end(self.invariants.check_end)
        self.stops: list[tuple[float, float]] = []  # of paused processes: from when to when
        # Of all that happened: from when to when, and what.
        self.troubles: list[tuple[float, float, str]] = []
        self._when_raised: dict[str, list[tuple[Disturbance, Callable[[], None]]]] = {}
        self._in_a_restart: dict[str, list[tuple[Disturbance, Callable[[], None]]]] = {}
        self._flapping: dict[int, tuple[int, float]] = {}
        self._replaced = set[tuple[int, int]]()
        self._agents = 0
        self._respawned: set[tuple[int, int]] = set()
        self._planned: dict[tuple[int, int], list[Disturbance]] = {}
        for disturbance in scenario.disturbances:
            self._planned.setdefault((disturbance.slot, disturbance.life), []).append(disturbance)
        for slot in range(scenario.members + scenario.extra):
            self.start(slot, slot * scenario.stagger)

    stores: StoreFactory = staticmethod(simulated_stores)
    parts: ClassVar[Mapping[type, Any]] = {}
    """Parts of the protocol that take the place of others."""
    schedulers: type[Scheduler] = Scheduler

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
        store.nonces = (f"{name}-{number}".replace(" ", "") for number in itertools.count())
        client: StoreMixin = store
        return client

    def agreement(self, name: str, slot: int) -> Agreement:
        """What the ranks agree on, seen by such a client."""
        return Agreement(self.connect(name, slot), self.parts)

    def watch(self, agreement: Agreement, member: Member) -> NeighbourWatch:
        """Who watches the neighbours for a member's monitor."""
        return NeighbourWatch(agreement, member, self.scenario.heartbeat_timeout)

    def restart_loop(self, member: SimulatedJob, base: State, process: SimulatedProcess) -> RestartLoop:
        """What a process does in one wrapped call."""
        return RestartLoop(member, base, self.scenario.limits, process)

    def quits(self, process: SimulatedProcess, call: int) -> bool:
        """Whether a process ends after a call, numbered from 0, and makes no other one."""
        ends = any(disturbance.step == call + 1 for disturbance in self._of(process, "quit"))
        if ends:
            self._note_trouble("quit")
            process.disturbed = True
        return ends

    def entered(self, process: SimulatedProcess) -> None:
        """A process has entered an iteration: one of a crash loop dies of it."""
        if process.slot in self._flapping and process.life > 0 and process.task is not None:
            self.scheduler.at_step(process.task, process.task.steps + 1, lambda: self._die(process))

    def left(self, process: SimulatedProcess) -> None:
        """A process has left an iteration that it had entered."""
        task = process.task
        for disturbance, happen in self._in_a_restart.get(process.name, ()):
            if disturbance.since_end == process.entered and task is not None:
                self.scheduler.at_step(task, task.steps + disturbance.step, happen)

    def _note_trouble(self, kind: str, seconds: float = 0.0) -> None:
        now = self.scheduler.now()
        self.troubles.append((now, now + seconds, kind))

    # Processes ---------------------------------------------------------------------------------------------

    def start(self, slot: int, after: float = 0.0) -> SimulatedProcess:
        """Starts a process for a slot, whether another one lives or not.

        Args:
            slot: the slot.
            after: virtual seconds until it begins.
        """
        life = self._lives(slot)
        process = SimulatedProcess(self, slot, life)
        self.processes.append(process)

        def main() -> None:
            process.main(after)
            if process.fate in ("left", "failed"):
                self._note_trouble(process.fate)
                self._replace(process)
            self._respawn(process)

        process.task = self.scheduler.spawn(process.name, main)
        process.task.delay = self.scenario.delay(slot)
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
        process.died_inside = process.last if process.heard < process.last else None
        process.fate, process.inside, process.died_at = "dead", None, self.scheduler.now()
        process.disturbed = True
        if host and process.heart is not None:
            self.scheduler.crash(process.heart)
        if not process.monitored:
            self.invariants.nobody_tells()
        elif not host and not reported:
            self.report(process, Interruption.TERMINATED)
        self._replace(process)
        self._respawn(process)
        self.scheduler.crash(task)

    def report(self, process: SimulatedProcess, interruption: Interruption) -> None:
        """The monitor of a process tells the others of its end."""
        name = f"report {process.name[5:]}"
        reporter = self.scheduler.spawn(name, process.report, name, interruption)
        reporter.delay = self.scenario.delay(process.slot)
        for disturbance in self._of(process, "reporter"):
            self.scheduler.crash_at(reporter, disturbance.step)

    def _respawn(self, process: SimulatedProcess) -> None:
        """Starts the next process of the slot, if that is planned and was not done."""
        for disturbance in self._of(process, "respawn"):
            if (process.slot, process.life) not in self._respawned:
                self._respawned.add((process.slot, process.life))
                self.start(process.slot, disturbance.seconds)

    def _replace(self, process: SimulatedProcess) -> None:
        """Starts the next process of the slot, as an agent does."""
        left, seconds = self._flapping.get(process.slot, (0, 0.0))
        life = (process.slot, process.life)
        if left > 0:
            self._flapping[process.slot] = left - 1, seconds
        elif self.scenario.replaced and process.life < _MOST_LIVES and life not in self._replaced:
            self._replaced.add(life)
            seconds = self.scenario.replaced_after
        else:
            return
        self._note_trouble("respawn", seconds)
        self.start(process.slot, seconds)

    # What happens to them ----------------------------------------------------------------------------------

    def _of(self, process: SimulatedProcess, kind: str) -> list[Disturbance]:
        planned = self._planned.get((process.slot, process.life), ())
        return [disturbance for disturbance in planned if disturbance.kind == kind]

    def raises(self, process: SimulatedProcess) -> bool:
        """Whether the function raises that a process has just entered."""
        return any(disturbance.step == process.entered for disturbance in self._of(process, "exception"))

    def raised(self, process: SimulatedProcess) -> None:
        """The function has raised, and the process is about to say so."""
        for disturbance, happen in self._when_raised.pop(process.name, ()):
            if process.task is not None:
                self.scheduler.at_step(process.task, process.task.steps + disturbance.step, happen)

    def is_mute(self, process: SimulatedProcess) -> bool:
        """Whether a process's heartbeats are lost at present."""
        now = self.scheduler.now()
        return any(d.step <= now < d.step + d.seconds for d in self._of(process, "mute"))

    def heart_began(self, process: SimulatedProcess) -> None:
        """A process's monitor began to send heartbeats."""
        assert process.heart is not None
        heart = process.heart
        for disturbance in self._of(process, "deaf"):
            seconds = disturbance.seconds

            def stop(seconds: float = seconds) -> None:
                self._note_trouble("deaf", seconds)
                self.scheduler.pause(heart, seconds)

            self.scheduler.at_step(heart, disturbance.step, stop)

    def _plan(self, process: SimulatedProcess, disturbance: Disturbance) -> None:
        kind, seconds, task = disturbance.kind, disturbance.seconds, process.task
        assert task is not None
        actions: dict[str, Callable[[], None]] = {
            "crash": lambda: self.crash(process),
            "host": lambda: self.crash(process, host=True),
            "node": lambda: self._lose_node(process, seconds),
            "leave": lambda: _leave(process),
            "doom": lambda: self.give_up(process),
            "hang": lambda: self._hang(process),
            "flap": lambda: self._flap(process, seconds),
            "loop": lambda: self._crash_loop(process, seconds),
            "pause": lambda: self._stop(task, seconds),
            "freeze": lambda: self._freeze(process, seconds),
            "outage": lambda: self._outage(seconds),
            "error": lambda: self._fake(process).fail(client=process.name, error=StoreError("simulated")),
            "repeat": lambda: self._fake(process).repeat(client=process.name),
            "respawn": lambda: self._respawn(process),
        }
        if kind in ("pause", "freeze", "deaf", "mute"):
            process.disturbed = process.disturbed or seconds > _HARMLESS
        elif kind not in ("repeat", "reporter", "exception", "respawn", "outage", "quit"):
            process.disturbed = True
        if kind == "mute":
            self.troubles.append((disturbance.step, disturbance.step + seconds, kind))
        if kind in actions:
            action = actions[kind]

            def happen() -> None:
                self._note_trouble(kind, disturbance.lasts())
                action()

            if disturbance.since_end < 0:
                self._when_raised.setdefault(process.name, []).append((disturbance, happen))
            elif disturbance.since_end:
                self._in_a_restart.setdefault(process.name, []).append((disturbance, happen))
            else:
                self.scheduler.at_step(task, disturbance.step, happen)

    def _fake(self, process: SimulatedProcess) -> FakeStore:
        client = self._connect(process.name)
        inner = getattr(client, "torch_store", client)
        if not isinstance(inner, FakeStore):
            raise TypeError(f"only a FakeStore, or what holds one, loses replies and fails; not {client!r}")
        return inner

    def _die(self, process: SimulatedProcess) -> None:
        self._note_trouble("crash")
        self.crash(process)

    def give_up(self, process: SimulatedProcess) -> None:
        """The monitor gives a process up and reports its death; it lives on until it is killed."""
        if not process.alive or not process.monitored or process.between or process.doomed:
            return
        process.doomed = process.disturbed = True
        self._note_trouble("doom")
        self.report(process, Interruption.HARD_TIMEOUT)

        def kill() -> None:
            self.scheduler.sleep(0.05)
            self.crash(process, reported=True)

        self.scheduler.spawn(f"kill {process.name[5:]}", kill)

    def _hang(self, process: SimulatedProcess) -> None:
        """The process stops for good; its monitor publishes a fault first, and ends it then."""
        name = f"hang {process.name[5:]}"

        def watch() -> None:
            agreement = self.agreement(name, process.slot)
            self.scheduler.sleep(_SOFT_TIMEOUT)
            view, member = process.view, process.member
            if view is not None and member is not None and not process.between and process.alive:
                fault = Fault(member, process.rank, Interruption.SOFT_TIMEOUT, "simulated", "h", process.slot)
                self.invariants.publishes(view.n)
                agreement.ends.report_fault(view.n, fault)
            self.scheduler.sleep(HARD_TIMEOUT - _SOFT_TIMEOUT)
            if process.between or not process.monitored:
                self.crash(process)
            else:
                self.give_up(process)

        self.scheduler.spawn(name, watch)
        assert process.task is not None
        self._stop(process.task, 2 * HARD_TIMEOUT)

    def _lose_node(self, process: SimulatedProcess, seconds: float) -> None:
        """A node is lost, and after a while another one's agent has evidence of that."""
        node = self.scenario.node_of(process.slot)
        self._agents += 1
        name = f"agent {self._agents}"

        def tell() -> None:
            agreement = self.agreement(name, process.slot)
            if seconds > 0:
                self.scheduler.sleep(seconds)
            # Those who take the slots elsewhere come later than this, in a job with agents.
            for member in [member for member in holders(agreement, node) if member in lost]:
                teller = f"{name} of {member.slot}.{member.incarnation}"
                client = self.agreement(teller, process.slot)
                self.scheduler.spawn(
                    teller,
                    functools.partial(report_lost, returns=self.scenario.replaced),
                    client,
                    member,
                    "its node was lost",
                )
            if self.scenario.replaced:
                for slot in node:
                    if slot < self.scenario.members and self._lives(slot) <= _MOST_LIVES:
                        self.start(slot, self.scenario.replaced_after)

        there = [other for other in self.processes if other.slot in node and other is not process]
        lost = {other.member for other in [*there, process]}
        self.scheduler.spawn(name, tell)
        for other in [*there, process]:  # this one last: it is the one that runs
            self._replaced.add((other.slot, other.life))
            self.crash(other, host=True)

    def _lives(self, slot: int) -> int:
        return sum(process.slot == slot for process in self.processes)

    def _flap(self, process: SimulatedProcess, seconds: float) -> None:
        """The process dies, and so do those that come after it, as soon as they are in."""
        self._flapping[process.slot] = _FLAPS, seconds
        self.crash(process)

    def _crash_loop(self, process: SimulatedProcess, seconds: float) -> None:
        """The host is lost, and the slot is taken again elsewhere, over and over, without success."""
        name = f"again {process.name[5:]}"

        def again() -> None:
            agreement = self.agreement(name, process.slot)
            for _ in range(LOOPS):
                self.scheduler.sleep(seconds)
                agreement.joining.register(process.slot, "{}")

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
        """No one reaches the store, and the clients find it again one after the other."""
        spread = min(seconds, _OUTAGE_SPREAD * self.scenario.heartbeat_timeout)
        for task in self.scheduler.tasks:
            self.scheduler.pause(task, seconds + spread * (task.number * 7 % 5) / 4)


def _leave(process: SimulatedProcess) -> None:
    if process.alive:
        raise CtrlC
