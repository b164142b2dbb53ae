"""A job of a few nodes in which one or two things happen, at any step of any of them: where is drawn.

Each node is one task, its agent: it joins, stays in its round, and joins again when others wait. Only once a
node has died do the others have hearts, which know that at once and take it out; that silence is noticed, and
threads that keep the record fresh, are left to the worlds of `simulated_nodes`, which are run at random.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from simulated_nodes import StoreBoard, check_change, check_record, neighbours
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from ft_wrapper.agent.ft_nodes import what_follows
from ft_wrapper.agent.rounds import What
from ft_wrapper.rendezvous.executor import Executor
from ft_wrapper.rendezvous.moves import adopt_rank_policy, close
from ft_wrapper.rendezvous.operations import nodes_waiting
from ft_wrapper.rendezvous.record import Admission, Node, NodePlace, RendezvousRecord, RoundPolicy, Seat
from ft_wrapper.rendezvous.register import RECORD_KEY, Board, RecordRegister, log_key
from ft_wrapper.rendezvous.settings import RendezvousSettings
from ft_wrapper.testing import Scheduler, Task
from ft_wrapper.testing.scheduler import Step
from tests.explorer.stores import SimulatedStore

QUIET = 50.0
"""From then on nothing happens any more."""
END = 150.0
"""Then everybody is where they belong."""
REFRESH = 60.0

CRASH, EXIT, CLOSE, FAILURE, AGAIN, LATE, SUSPECT = HAPPENINGS = (
    "crash",  # a node's machine is lost
    "exit",  # an agent is told to leave: it is interrupted wherever it is, and gives up its place
    "close",  # an agent ends it all
    "failure",  # a worker fails: an agent that is in a round comes again
    "again",  # another agent is started with the id of a node, whether that one lives or not
    "late",  # one node more
    "suspect",  # a node that lives is taken out, as if it had been silent
)


@dataclasses.dataclass(frozen=True)
class Job:
    """What is run.

    Args:
        nodes: so many agents start at once.
        low: nodes that a round needs.
        high: nodes that a round has at the most.
        rank_policy: whether each agent goes over to the policy ``rank`` once it is in a round.
        happenings: what may happen, each at any step of any node.
        most: so many of those in one run, at the most.
        hosted: whether the node of group rank 0 hosts the store of the workers.
    """

    nodes: int
    low: int
    high: int
    rank_policy: bool = False
    happenings: tuple[str, ...] = HAPPENINGS
    most: int = 1
    hosted: bool = True

    def __str__(self) -> str:
        what = f"{self.nodes} nodes, {self.low}:{self.high}, policy {'rank' if self.rank_policy else 'group'}"
        what += "" if self.hosted else ", the store of the workers outlives the nodes"
        return f"{what}, at the most {self.most} of {', '.join(self.happenings)}"


@dataclasses.dataclass(eq=False)
class Event:
    """Something that may happen between any two steps, once.

    Args:
        name: shown in the trace.
        action: what happens.
        allowed: whether it may happen now.
    """

    name: str
    action: Callable[[], None]
    allowed: Callable[[], bool]


class DrawingScheduler(Scheduler):
    """Draws what happens, and when; and seldom another task than the one that could run on.

    Attributes:
        events: what may happen.
    """

    def __init__(self, seed: int, **bounds: Any) -> None:
        super().__init__(seed, policy=self, **bounds)
        self.events: list[Event] = []
        self._dice = random.Random(seed)
        self._happens = self._dice.choice([0.02, 0.1, 0.3])
        self._departs = self._dice.choice([0.0, 0.02, 0.2, 1.0])
        self._free = False  # whether anybody may go on: something has just happened

    def choose(self, tasks: Sequence[Task], current: Task | None) -> int:
        """See `TurnPolicy`."""
        if current is None or current not in tasks:
            return 0 if self._dice.random() < 0.5 else self._dice.randrange(len(tasks))
        departs, self._free = self._free or self._dice.random() < self._departs, False
        return self._dice.randrange(len(tasks)) if departs else tasks.index(current)

    def _next(self) -> Task | None:
        while self._required and self._dice.random() < self._happens:
            self._check()
            offered = [event for event in self.events if event.allowed()]
            if not offered:
                break
            event = self._dice.choice(offered)
            self.events.remove(event)
            self.trace_steps.append(Step(self._now, "", event.name))
            self._free = True
            event.action()
        return super()._next()


class ExploredNode:
    """One agent with its node."""

    def __init__(self, job: ExploredJob, node: Node) -> None:
        self.job = job
        self.node = node
        self.memory = Board()
        self.fate = ""
        self.inside: int | None = None
        self.last_round: int | None = None
        self.leaving = False
        self.executor, self.board = self._make("agent")
        self.agent = job.scheduler.spawn(f"agent {node.name}", self._begin, daemon=True)
        self.tasks = [self.agent]

    @property
    def alive(self) -> bool:
        """Whether it has not come to an end."""
        return not self.fate

    def _make(self, what: str) -> tuple[Executor, StoreBoard]:
        job = self.job
        register = RecordRegister(job.client(f"{what} {self.node.name}"), job.initial)
        board = register.board = StoreBoard(register, self.memory)
        return Executor(self.node, register, job.settings), board

    def _spawn(self, what: str, function: Callable[[], None]) -> Task:
        task = self.job.scheduler.spawn(f"{what} {self.node.name}", function, daemon=True)
        self.tasks.append(task)
        self.job.offer(self, task)
        return task

    # What its agent does -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.executor.register.read()
        self._work()

    def _work(self) -> None:
        try:
            while not self._is_over():
                self._join()
                if self.job.what.rank_policy:
                    self.executor.register.change(adopt_rank_policy)
                self._stay()
            self._end("closed")
        except (RendezvousClosedError, RendezvousGracefulExitError):
            assert self.job.record.closed
            self._end("closed")
        except RendezvousTimeoutError:
            self.job.check_timeout()
            self._end("timed out")
        except RendezvousError:
            assert self.job.nodes_of(self.node.id)[-1] is not self, "no one has superseded it"
            self.leaving = True
            self.executor.exit()  # as the handler does in the end, whatever was raised
            self._end("superseded")

    def _join(self) -> None:
        leaving, self.inside = self.last_round, None
        state = self.executor.join(leaving)
        self.job.check_told(self, state)
        self.inside = self.last_round = state.round

    def _stay(self) -> None:
        """Stays in the round until it has to come again."""
        assert self.last_round is not None
        while not self._is_over():
            state = self._state()
            if self._has_to_come(state, self.last_round):
                return
            if self.board.wait(state.version, REFRESH) is None:
                self.executor.sweep()

    def _has_to_come(self, state: RendezvousRecord, number: int) -> bool:
        if self.job.what.rank_policy:  # as our own agent sees it
            news = what_follows(state, self.node, number)
            return news is not None and news.what in (What.COME, What.GONE)
        return nodes_waiting(state, self.node, number) > 0

    def _is_over(self) -> bool:
        return self._state().closed

    def _state(self) -> RendezvousRecord:
        return self.executor.register.latest()

    def _end(self, fate: str) -> None:
        self.fate, self.inside = fate, None
        for task in self.tasks:
            if task is not self.job.scheduler.current:
                self.job.scheduler.crash(task)

    # What happens to it ------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Its agent is interrupted and gives up its place."""

        def leave() -> None:
            self.executor.exit()
            self._end("left")

        self.inside, self.leaving = None, True
        self._interrupt("leaving", leave)

    def fail(self) -> None:
        """One of its workers fails."""
        self.inside = None
        self._interrupt("again", self._work)

    def close(self) -> None:
        """Somebody ends it all here, beside what the agent does."""
        executor, _ = self._make("closing")
        self._spawn("closing", lambda: executor.register.change(close) and None)

    def watch(self) -> None:
        """Begins to watch its neighbours."""
        executor, board = self._make("heart")

        def beat() -> None:
            while True:
                state = executor.register.latest()
                if state.closed:
                    return
                dead = [other for other in neighbours(state, self.node) if self.job.is_dead(other)]
                if dead:
                    executor.evict(dead)
                board.wait(state.version, REFRESH)

        self._spawn("heart", beat)

    def suspect(self, other: Node) -> None:
        """Takes a node out that was silent for too long in its eyes, though it lives."""
        executor, _ = self._make(f"heart against {other.name} of")
        self._spawn(f"heart against {other.name} of", lambda: executor.evict([other]))

    def _interrupt(self, what: str, function: Callable[[], None]) -> None:
        interrupted = self.agent
        self.agent = self.job.scheduler.spawn(f"{what} {self.node.name}", function, daemon=True)
        self.tasks.append(self.agent)
        self.job.offer(self, self.agent)
        self.job.scheduler.crash(interrupted)  # comes last: if it is the current task, nothing follows


class ExploredJob:
    """A job whose order of steps is drawn.

    Args:
        what: the job.
        seed: of the order, and of what happens in it.
    """

    def __init__(self, what: Job, seed: int) -> None:
        self.what = what
        self.scheduler = DrawingScheduler(seed, max_steps=2_000, max_time=2 * END)
        self.settings = RendezvousSettings(
            "job", what.low, what.high, join_timeout=40.0, last_call_timeout=3.0
        )
        self.initial = RendezvousRecord(what.low, what.high, self.settings.options(), hosted=what.hosted)
        self.store = SimulatedStore(self.scheduler)
        self.nodes: list[ExploredNode] = []
        self.record = self.initial
        self.happened: list[str] = []
        self.disturbed_at = 0.0
        self._text = ""
        self._versions: dict[int, RendezvousRecord] = {}
        self._removed: set[str] = set()
        self._watched = False
        self.scheduler.after_each_step(self._check)
        self.scheduler.at_end(self._check_end)
        self.scheduler.spawn("end", lambda: self.scheduler.sleep(END))
        for number in range(what.nodes):
            self.start(str(number))
        self._offer(LATE, str(what.nodes), lambda: self.start(str(what.nodes)))

    # The nodes ---------------------------------------------------------------------------------------------

    def client(self, name: str) -> SimulatedStore:
        """A client of the store that names what it writes by itself: it writes each version once at most."""
        store = self.store.clone(name)
        store.nonces = itertools.repeat(name)
        return store

    def start(self, node_id: str) -> None:
        """Starts an agent."""
        made = ExploredNode(self, Node(node_id, len(self.nodes_of(node_id)), f"host{node_id}"))
        self._offer_to_be_started(made)
        self.nodes.append(made)
        self.offer(made, made.agent)
        if self._watched:
            made.watch()

    def nodes_of(self, node_id: str) -> list[ExploredNode]:
        """All agents that had an id, the first one first."""
        return [node for node in self.nodes if node.node.id == node_id]

    def find(self, node: Node) -> ExploredNode:
        """The agent of a node."""
        return next(other for other in self.nodes if other.node.name == node.name)

    def is_dead(self, node: Node) -> bool:
        """Whether a node's machine was lost."""
        return self.find(node).fate == "dead"

    # What happens ------------------------------------------------------------------------------------------

    def offer(self, node: ExploredNode, task: Task) -> None:
        """Offers what may happen to a node just before a step of one of its tasks."""

        def offer(kind: str, action: Callable[[], None], allowed: Callable[[], bool] = lambda: True) -> None:
            def may() -> bool:
                return node.alive and not task.done and allowed()

            self._offer(kind, node.node.name, action, may)

        if task is node.agent:
            offer(CRASH, lambda: self._die(node))
            offer(EXIT, node.leave)
            offer(FAILURE, node.fail, lambda: node.inside is not None)

    def _offer_to_be_started(self, node: ExploredNode) -> None:
        """Offers what begins with a new task. It may do so at any time."""
        self._offer(AGAIN, node.node.name, lambda: self.start(node.node.id))
        self._offer(CLOSE, node.node.name, node.close, lambda: node.alive)
        for one in self.nodes:
            self._offer_suspicion(one, node)
            self._offer_suspicion(node, one)

    def _offer_suspicion(self, watcher: ExploredNode, other: ExploredNode) -> None:
        self._offer(
            SUSPECT,
            f"{other.node.name} by {watcher.node.name}",
            lambda: watcher.suspect(other.node),
            lambda: watcher.alive and other.alive and other.node in neighbours(self.record, watcher.node),
        )

    def _offer(
        self,
        kind: str,
        whom: str,
        action: Callable[[], None],
        allowed: Callable[[], bool] = lambda: True,
    ) -> None:
        if kind not in self.what.happenings:
            return

        def happen() -> None:
            self.happened.append(f"{kind} {whom}")
            self.disturbed_at = self.scheduler.now()
            action()

        def may_happen() -> bool:
            return len(self.happened) < self.what.most and self.scheduler.now() < QUIET and allowed()

        self.scheduler.events.append(Event(f"{kind} {whom}", happen, may_happen))

    def _die(self, node: ExploredNode) -> None:
        node.fate, node.inside = "dead", None
        if not self._watched:
            self._watched = True
            for other in self.nodes:
                if other.alive:
                    other.watch()
        # The current task last: it does not come back from that.
        current = self.scheduler.current
        for task in sorted(node.tasks, key=lambda task: task is current):
            self.scheduler.crash(task)

    # What must hold ----------------------------------------------------------------------------------------

    def _check(self) -> None:
        text = self.store.snapshot().get(RECORD_KEY, b"").decode()
        if text == self._text:
            return
        self._text, before, after = text, self.record, RendezvousRecord.from_json(text, RECORD_KEY)
        self.record = self._versions[after.version] = after
        check_record(after)
        check_change(before, after)
        if before.closed:
            assert (after.round, after.complete) == (before.round, before.complete), "it goes on, closed"
            assert set(after.nodes) <= set(before.nodes), "a node was let in though all is over"
        if before.complete:
            for seat in before.seats:
                if seat.occupant is not None:
                    self._check_seat(seat, seat.occupant, before, after)
        self._check_groups()

    def _check_seat(
        self, seat: Seat, occupant: Node, before: RendezvousRecord, after: RendezvousRecord
    ) -> None:
        """A node keeps its seat until it leaves, dies, is superseded, or was silent."""
        now = after.seat_of(occupant)
        if now is not None and after.round == before.round:
            assert (now.group_rank, now.base_slot) == (seat.group_rank, seat.base_slot), "a node was moved"
            return
        node = self.find(occupant)
        superseded = node is not self.nodes_of(occupant.id)[-1]
        silent = after.writer.startswith("heart")
        if superseded or silent:
            self._removed.add(occupant.name)
        if silent:
            watcher = next(node for node in self.nodes if after.writer.endswith(f" {node.node.name}"))
            self._check_unseating(watcher, before, after)
            return
        comes_again = node.inside is None and node.last_round == before.round
        if self._has_said_that_it_leaves(occupant, before):
            # Under `RoundPolicy.RANK` it stayed nevertheless. Since then all have to meet again, it too.
            self._removed.add(occupant.name)
            return
        assert superseded or comes_again or node.leaving or not node.alive, f"{occupant} has lost its seat"

    def _has_said_that_it_leaves(self, node: Node, before: RendezvousRecord) -> bool:
        lines = self.store.snapshot().get(log_key(before.epoch), b"").decode().splitlines()
        entries = [Admission.from_json(line, "log") for line in lines]
        return any(entry.node == node and entry.leaves == before.round for entry in entries)

    @staticmethod
    def _check_unseating(watcher: ExploredNode, before: RendezvousRecord, after: RendezvousRecord) -> None:
        """Who takes others out is in the record itself; with a seat, unless all are lost that have one."""
        place = before.place_of(watcher.node)
        assert place is not None, "taken out by a node that is out itself"
        if before.policy is RoundPolicy.RANK and place is not NodePlace.SEAT:
            left = [node for node in before.participants if after.place_of(node) is not None]
            assert not left, "taken out by a node that has no seat"

    def _check_groups(self) -> None:
        """Who was told that it is in a round is so, with the rank that no one else has, or was taken out."""
        ranks: set[int | None] = set()
        for node in self.nodes:
            if node.inside is None or node.node.name in self._removed:
                continue
            seat = self.record.seat_of(node.node)
            assert self.record.complete, "two groups: a round forms while a node is in the last one"
            assert self.record.round == node.inside, "two groups: a node is still in an earlier round"
            assert seat is not None, f"{node.node} is in a round without a seat"
            assert seat.group_rank not in ranks, "two nodes with one group rank"
            ranks.add(seat.group_rank)

    def check_told(self, node: ExploredNode, state: RendezvousRecord) -> None:
        """What a node is told was in the record."""
        assert state == self._versions[state.version]
        assert state.complete
        assert not state.closed
        assert state.place_of(node.node) is NodePlace.SEAT
        if self.record.seat_of(node.node) is not None:
            self._removed.discard(node.node.name)

    def check_timeout(self) -> None:
        """No one gives up while there are enough nodes, and nothing happens."""
        alive = sum(node.alive and not node.leaving for node in self.nodes)
        assert alive < self.what.low or self.disturbed_at == self.scheduler.now(), "gave up too early"

    def _check_end(self) -> None:
        """Everybody is in the round, spare, waiting for more nodes, or was told that all is over."""
        state, live = self.record, {node.node.name: node for node in self.nodes if node.alive}
        if state.closed:
            assert not live, f"all is over, and {sorted(live)} do not know it"
            return
        assert not any(node.fate == "closed" for node in self.nodes)
        if not live:
            # Of the dead no one is left to see it.
            left = [node.name for node in state.nodes if not self.is_dead(node)]
            assert not left, f"no one lives, and {left} are left in the record"
            return
        there = {node.name for node in state.nodes}
        assert there == set(live), f"live nodes are {sorted(live)}, in the record are {sorted(there)}"
        if len(live) >= state.min_nodes or state.policy is RoundPolicy.RANK:
            assert state.complete, "there are enough nodes, and they do not come together"
            assert len(state.participants) == min(state.max_nodes, len(live)), "a node could be in and is not"
        for node in live.values():
            seated = state.complete and state.place_of(node.node) is NodePlace.SEAT
            assert node.inside == (state.round if seated else None), f"{node.node} is not where it should be"


def run_jobs(what: Job, seeds: Iterable[int]) -> None:
    """Runs a job once for each seed.

    Raises:
        SchedulerError: something does not hold.
    """
    for seed in seeds:
        ExploredJob(what, seed).scheduler.run()


def drawn_job(seed: int) -> ExploredJob:
    """A job that is drawn, too."""
    dice = random.Random(seed)
    nodes, most = dice.randint(1, 4), dice.randint(0, 3)
    high = dice.randint(1, nodes + 1)
    happenings = tuple(dice.sample(HAPPENINGS, dice.randint(1, 3)))
    job = Job(
        nodes,
        dice.randint(1, high),
        high,
        rank_policy=dice.random() < 0.5,
        happenings=happenings,
        most=most,
        hosted=dice.random() < 0.5,
    )
    return ExploredJob(job, seed)
