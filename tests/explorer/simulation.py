"""A job of simulated processes on the real store code, which runs a scenario and checks the invariants.

Each process is a task that runs the wrapper's own restart loop. Beside it is its monitor: a task that sends
heartbeats and watches the next members, and, once the process has died, a task that reports the death. Every
client has a clock of its own, hours apart from the others'.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from ft_wrapper.attribution import Interruption
from ft_wrapper.exception import StoreError
from ft_wrapper.protocol import Agreement
from ft_wrapper.protocol.deaths import holders, report_lost
from ft_wrapper.protocol.records import Fault
from ft_wrapper.rank_assignment import RankAssignment
from ft_wrapper.restart.loop import RestartLoop
from ft_wrapper.state import State
from ft_wrapper.store import StoreMixin
from ft_wrapper.testing.fake_store import FakeStore
from ft_wrapper.testing.scheduler import (
    Deadlock,
    Scheduler,
    Task,
    TooLong,
    TurnPolicy,
    describe,
    shorter,
)

from .history import HARMLESS
from .invariants import Invariants
from .process import CtrlC, SimulatedJob, SimulatedMonitor, SimulatedProcess
from .scenario import (
    HARD_TIMEOUT,
    LOOPS,
    SENTENCES,
    Disturbance,
    Scenario,
    StoreFactory,
    simulated_assignment,
    simulated_stores,
)

Act = Callable[[], None]

MAX_STEPS = 60_000
MAX_TIME = 4_000.0
_FLAPS = 6
_SOFT_TIMEOUT = 15.0
_MOST_LIVES = 3
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
        troubles: all that happened: from when to when, and what.
        story: what was done to the processes, in sentences, each with the number of steps before it.
    """

    def __init__(
        self,
        scenario: Scenario,
        seed: int = 0,
        choices: Sequence[int] = (),
        *,
        policy: TurnPolicy | None = None,
        stores: StoreFactory | None = None,
        rank_assignment: Callable[[], RankAssignment] | None = None,
    ) -> None:
        self.scenario = scenario
        self.scheduler = self.schedulers(seed, choices, policy=policy, max_steps=MAX_STEPS, max_time=MAX_TIME)
        self.rank_assignment = rank_assignment or functools.partial(simulated_assignment, scenario)
        self.knows_store = stores is None  # another store may take many for one
        self._connect = (stores or self.stores)(self.scheduler, scenario)
        self.processes: list[SimulatedProcess] = []
        self.invariants = Invariants(
            self,
            Agreement(self._connect("invariants"), self.parts),
            slot_order=rank_assignment is None and scenario.exchange != "tree",
        )
        self.scheduler.after_each_step(self.invariants.check)
        self.scheduler.at_end(self.invariants.check_end)
        self.troubles: list[tuple[float, float, str]] = []
        self.story: list[tuple[int, str]] = []
        # By process, and the iteration since whose end steps are counted: after how many what happens.
        self._later: dict[tuple[str, int], list[tuple[int, Act]]] = {}
        self._flapping: dict[int, tuple[int, float]] = {}
        self._agents = itertools.count(1)
        for slot in range(scenario.members + scenario.extra):
            self.start(slot, slot * scenario.stagger)

    stores: StoreFactory = staticmethod(simulated_stores)
    parts: ClassVar[Mapping[type, Any]] = {}
    """Parts of the protocol that take the place of others."""
    schedulers: type[Scheduler] = Scheduler

    def run(self) -> "Simulation":
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

    def restart_loop(self, member: SimulatedJob, base: State, process: SimulatedProcess) -> RestartLoop:
        """What a process does in one wrapped call."""
        return RestartLoop(member, base, process)

    def quits(self, process: SimulatedProcess, call: int) -> bool:
        """Whether a process ends after a call, numbered from 0, and makes no other one."""
        for disturbance in self._of(process, "quit"):
            if disturbance.step == call + 1:
                self._tell(process, disturbance)
                self._note_trouble("quit")
                process.facts.disturbed = True
                return True
        return False

    def entered(self, process: SimulatedProcess) -> None:
        """A process has entered an iteration: one of a crash loop dies of it."""
        if process.slot in self._flapping and process.life > 0:
            self._count_steps(process, [(1, lambda: self._die(process))])

    def left(self, process: SimulatedProcess) -> None:
        """A process has left an iteration that it had entered."""
        self._count_steps(process, self._later.get((process.name, process.facts.entered), ()))

    def raised(self, process: SimulatedProcess, disturbance: Disturbance) -> None:
        """The function has raised, and the process is about to say so."""
        self._tell(process, disturbance)
        self._count_steps(process, self._later.pop((process.name, -1), ()))

    def _count_steps(self, process: SimulatedProcess, planned: Iterable[tuple[int, Act]]) -> None:
        for step, happen in planned:
            self.scheduler.at_step(process.task, process.task.steps + step, happen)

    def _note_trouble(self, kind: str, seconds: float = 0.0) -> None:
        now = self.scheduler.now()
        self.troubles.append((now, now + seconds, kind))

    def _tell(
        self, process: SimulatedProcess, disturbance: Disturbance, task: Task | None = None, other: str = ""
    ) -> None:
        upcoming = (task or process.task).upcoming
        sentence = SENTENCES[disturbance.kind].format(
            who=process.name,
            what="its end" if upcoming is None else shorter(describe(*upcoming)),
            step=disturbance.step,
            seconds=disturbance.seconds,
            other=other,
        )
        self.story.append((len(self.scheduler.trace_steps), sentence))

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
        for disturbance in self.scenario.disturbances:
            if (disturbance.slot, disturbance.life) == (slot, life):
                self._plan(process, disturbance)
        return process

    def crash(self, process: SimulatedProcess, *, host: bool = False, reported: bool = False) -> None:
        """Kills a process.

        Args:
            process: which.
            host: its monitor with it; otherwise that reports the death.
            reported: the monitor has reported it already.
        """
        facts = process.facts
        if process.task.done:
            return
        facts.died_inside = facts.last if facts.heard < facts.last else None
        process.fate, process.inside, facts.died_at = "dead", None, self.scheduler.now()
        facts.disturbed = True
        if process.monitor is None:
            self.invariants.nobody_tells()
        elif host:
            self.scheduler.crash(process.monitor.heart)
        elif not (reported or facts.doomed):  # a monitor reports once
            self.report(process, Interruption.TERMINATED)
        self._replace(process)
        self._respawn(process)
        self.scheduler.crash(process.task)

    def report(self, process: SimulatedProcess, interruption: Interruption) -> None:
        """The monitor of a process tells the others of its end."""
        name = f"report {process.name[5:]}"
        assert process.monitor is not None
        reporter = self.scheduler.spawn(name, process.monitor.report, name, interruption)
        reporter.delay = self.scenario.delay(process.slot)
        for disturbance in self._of(process, "reporter"):
            crash = functools.partial(self.scheduler.crash, reporter)
            happen = functools.partial(self._happen, process, disturbance, crash, reporter)
            self.scheduler.at_step(reporter, disturbance.step, happen)

    def _respawn(self, process: SimulatedProcess) -> None:
        """Starts the next process of the slot, if that is planned and was not done."""
        for disturbance in self._of(process, "respawn"):
            if not process.facts.respawned:
                process.facts.respawned = True
                started = self.start(process.slot, disturbance.seconds)
                later = f", {disturbance.seconds:g} s later" if disturbance.seconds else ""
                self._tell(process, disturbance, other=started.name + later)

    def _replace(self, process: SimulatedProcess) -> None:
        """Starts the next process of the slot, as an agent does."""
        left, seconds = self._flapping.get(process.slot, (0, 0.0))
        if left > 0:
            self._flapping[process.slot] = left - 1, seconds
        elif self.scenario.replaced and process.life < _MOST_LIVES and not process.facts.replaced:
            process.facts.replaced = True
            seconds = self.scenario.replaced_after
        else:
            return
        self._note_trouble("respawn", seconds)
        self.start(process.slot, seconds)

    # What happens to them ----------------------------------------------------------------------------------

    def _of(self, process: SimulatedProcess, kind: str) -> list[Disturbance]:
        whose = process.slot, process.life
        return [of for of in self.scenario.of(kind) if (of.slot, of.life) == whose]

    def raises(self, process: SimulatedProcess) -> Disturbance | None:
        """What makes the function raise that a process has just entered; None if it does not."""
        planned = self._of(process, "exception")
        return next((of for of in planned if of.step == process.facts.entered), None)

    def is_mute(self, process: SimulatedProcess) -> bool:
        """Whether a process's heartbeats are lost at present."""
        now = self.scheduler.now()
        return any(d.step <= now < d.step + d.seconds for d in self._of(process, "mute"))

    def heart_began(self, monitor: SimulatedMonitor) -> None:
        """A process's monitor began to send heartbeats."""
        for disturbance in self._of(monitor.process, "deaf"):
            stop = functools.partial(self.scheduler.pause, monitor.heart, disturbance.seconds)
            happen = functools.partial(self._happen, monitor.process, disturbance, stop, monitor.heart)
            self.scheduler.at_step(monitor.heart, disturbance.step, happen)

    def _plan(self, process: SimulatedProcess, disturbance: Disturbance) -> None:
        kind, seconds = disturbance.kind, disturbance.seconds
        actions: dict[str, Act] = {
            "crash": lambda: self.crash(process),
            "host": lambda: self.crash(process, host=True),
            "node": lambda: self._lose_node(process, seconds),
            "leave": lambda: _leave(process),
            "doom": lambda: self.give_up(process),
            "hang": lambda: self._hang(process),
            "flap": lambda: self._flap(process, seconds),
            "loop": lambda: self._crash_loop(process, seconds),
            "pause": lambda: self.scheduler.pause(process.task, seconds),
            "freeze": lambda: self._freeze(process, seconds),
            "outage": lambda: self._outage(seconds),
            "error": lambda: self._fake(process).fail(client=process.name, error=StoreError("simulated")),
            "repeat": lambda: self._fake(process).repeat(client=process.name),
            "respawn": lambda: self._respawn(process),
        }
        if kind in ("pause", "freeze", "deaf", "mute"):
            process.facts.disturbed |= seconds > HARMLESS
        elif kind not in ("repeat", "reporter", "exception", "respawn", "outage", "quit"):
            process.facts.disturbed = True
        if kind == "mute":
            self._tell(process, disturbance)
            self.troubles.append((disturbance.step, disturbance.step + seconds, kind))
        if kind not in actions:
            return
        happen = functools.partial(self._happen, process, disturbance, actions[kind])
        if disturbance.since_end:
            later = self._later.setdefault((process.name, disturbance.since_end), [])
            later.append((disturbance.step, happen))
        else:
            self.scheduler.at_step(process.task, disturbance.step, happen)

    def _happen(
        self, process: SimulatedProcess, disturbance: Disturbance, act: Act, task: Task | None = None
    ) -> None:
        if disturbance.kind != "reporter":  # who reports a trouble
            self._note_trouble(disturbance.kind, disturbance.lasts())
        if disturbance.kind != "respawn":  # told when it is done
            self._tell(process, disturbance, task)
        act()

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
        if not process.alive or process.monitor is None or process.between or process.facts.doomed:
            return
        process.facts.doomed = process.facts.disturbed = True
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
            monitor, member = process.monitor, process.member
            view = None if monitor is None or monitor.between else monitor.view
            if monitor is not None and view is not None and member is not None and process.alive:
                fault = Fault(member, monitor.rank, Interruption.SOFT_TIMEOUT, "simulated", "h", process.slot)
                self.invariants.history.published.add(view.n)
                agreement.ends.report_fault(view.n, fault)
            self.scheduler.sleep(HARD_TIMEOUT - _SOFT_TIMEOUT)
            if process.between or process.monitor is None:
                self.crash(process)
            else:
                self.give_up(process)

        self.scheduler.spawn(name, watch)
        self.scheduler.pause(process.task, 2 * HARD_TIMEOUT)

    def _lose_node(self, process: SimulatedProcess, seconds: float) -> None:
        """A node is lost, and after a while another one's agent has evidence of that."""
        node = self.scenario.node_of(process.slot)
        name = f"agent {next(self._agents)}"

        def tell() -> None:
            agreement = self.agreement(name, process.slot)
            if seconds > 0:
                self.scheduler.sleep(seconds)
            # Those who take the slots elsewhere come later than this, in a job with agents.
            dead = {member: "its node was lost" for member in holders(agreement, node) if member in lost}
            teller = f"{name} of {sorted(node)}"
            client = self.agreement(teller, process.slot)
            self.scheduler.spawn(teller, report_lost, client, dead, returns=self.scenario.replaced)
            if self.scenario.replaced:
                for slot in node:
                    if slot < self.scenario.members and self._lives(slot) <= _MOST_LIVES:
                        self.start(slot, self.scenario.replaced_after)

        there = [other for other in self.processes if other.slot in node and other is not process]
        lost = {other.member for other in [*there, process]}
        self.scheduler.spawn(name, tell)
        for other in [*there, process]:  # this one last: it is the one that runs
            other.facts.replaced = True
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
                agreement.joining.register(process.slot)

        self.scheduler.spawn(name, again)
        self.crash(process, host=True)

    def _freeze(self, process: SimulatedProcess, seconds: float) -> None:
        if process.monitor is not None:
            self.scheduler.pause(process.monitor.heart, seconds)
        self.scheduler.pause(process.task, seconds)

    def _outage(self, seconds: float) -> None:
        """No one reaches the store, and the clients find it again one after the other."""
        spread = min(seconds, _OUTAGE_SPREAD * self.scenario.heartbeat_timeout)
        for task in self.scheduler.tasks:
            self.scheduler.pause(task, seconds + spread * (task.number * 7 % 5) / 4)


def _leave(process: SimulatedProcess) -> None:
    if process.alive:
        raise CtrlC
