"""Nodes on a FakeStore under the deterministic scheduler, and what must hold after every step.

Each node is three tasks, as it is three threads in a process: its agent, which joins, works, and joins again
when others wait; its watcher and its heart, which are the ones that the handler has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousError

from ft_wrapper.protocol.operations import Heartbeat, Step
from ft_wrapper.rendezvous.executor import Executor
from ft_wrapper.rendezvous.moves import adopt_rank_policy, close
from ft_wrapper.rendezvous.operations import nodes_waiting
from ft_wrapper.rendezvous.presence import NodeHeart, Watcher, nearest, ring
from ft_wrapper.rendezvous.record import Node, NodePlace, RendezvousRecord, RoundPolicy, Seat
from ft_wrapper.rendezvous.register import RECORD_KEY, Board, RecordRegister
from ft_wrapper.rendezvous.settings import RendezvousSettings
from ft_wrapper.testing import Scheduler, Task
from ft_wrapper.testing.fake_store import Waiter
from tests.explorer.stores import SimulatedStore


def neighbours(record: RendezvousRecord, node: Node) -> list[Node]:
    """The nodes that this one watches while nothing is wrong."""
    return nearest(record, ring(record, node))


class StoreBoard(Board):
    """A board on which a task waits in the store, with its own client.

    Args:
        register: the record.
        memory: where the newest record is, which the tasks of a node share.
    """

    def __init__(self, register: RecordRegister, memory: Board) -> None:
        super().__init__()
        self._register = register
        self._memory = memory

    @property
    def record(self) -> RendezvousRecord | None:
        return self.latest()

    @record.setter
    def record(self, record: RendezvousRecord | None) -> None:
        assert record is None

    def latest(self) -> RendezvousRecord | None:
        """The newest record."""
        return self._memory.record

    def learn(self, record: RendezvousRecord) -> RendezvousRecord:
        return self._memory.learn(record)

    def wait(self, version: int, seconds: float) -> RendezvousRecord | None:
        known = self.latest()
        if known is not None and known.version > version:
            return known
        self._register.wait(version, seconds)
        known = self.latest()
        return known if known is not None and known.version > version else None


class SimulatedBoard(Board):
    """A board on which tasks of the scheduler wait."""

    def __init__(self, scheduler: Scheduler, *callbacks: Any) -> None:
        super().__init__(*callbacks)
        self._scheduler = scheduler
        self._waiters: list[Waiter] = []

    def learn(self, record: RendezvousRecord) -> RendezvousRecord:
        super().learn(record)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.missing.clear()
            waiter.woken = True
            self._scheduler.woke(waiter)
        return record

    def lose(self, error: Exception) -> None:
        raise AssertionError(f"the store is lost: {error}") from error

    def wait(self, version: int, seconds: float) -> RendezvousRecord | None:
        self._scheduler.step("", "wait for the board", (version, seconds))  # that a busy loop ends
        deadline = self._scheduler.now() + seconds
        while not self._newer(version) and self._scheduler.now() < deadline:
            waiter = Waiter({"a newer record"})
            self._waiters.append(waiter)
            self._scheduler.block(waiter, deadline)
        return self.record if self._newer(version) else None


class VirtualStop:
    """What tells a thread to stop, by the scheduler's clock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def wait(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)


class SimulatedNode:
    """One agent with its node."""

    def __init__(self, world: World, node: Node, plan: Callable[[SimulatedNode], None]) -> None:
        self.world = world
        self.node = node
        self.plan = plan
        self.inside: int | None = None
        self.last_round: int | None = None
        self.rounds: list[int] = []
        self.error: BaseException | None = None
        self.dead = False
        self.leaving = False
        self.joins_since: float | None = None
        self.slow_to_note = 0.0
        self.excused_until = 0.0  # it was stopped, and may be called silent
        self.joined: RendezvousRecord | None = None
        self.died_at = 0.0
        self.unseated: list[Seat] = []
        self.board = SimulatedBoard(world.scheduler, self.unseated.extend, self._note)
        self.on_begin: Callable[[], None] = lambda: None
        self.told: RendezvousRecord | None = None
        self.heard_at = world.scheduler.now()
        self.began_at = world.scheduler.now()
        self.agent = world.scheduler.spawn(f"agent {node.name}", self._run, daemon=False)
        self.others: list[Task] = []

    @property
    def alive(self) -> bool:
        return not self.dead and not self.agent.done

    @property
    def state(self) -> RendezvousRecord:
        return self.board.known()

    def _make(self, what: str) -> tuple[Executor, SimulatedStore]:
        store = self.world.store.clone(f"{what} {self.node.name}")
        register = RecordRegister(store, self.world.initial, self.board)
        return Executor(self.node, register, self.world.settings), store

    def _run(self) -> None:
        self.executor, _ = self._make("agent")
        self.executor.register.read()
        self.told = self.state
        spawn = self.world.scheduler.spawn
        self.others = [
            spawn(f"watch {self.node.name}", self._make_watcher().run, daemon=True),
            spawn(f"heart {self.node.name}", self._beat, daemon=True),
        ]
        self.on_begin()
        try:
            self.plan(self)
        except RendezvousError as error:
            self.error = error
        finally:
            self.inside = None
            if not self.dead:
                self.stop_others()

    def stop_others(self) -> None:
        for task in self.others:
            if task is not self.world.scheduler.current:
                self.world.scheduler.crash(task)

    def _make_watcher(self) -> Watcher:
        store = self.world.store.clone(f"watch {self.node.name}")
        return Watcher(self.node, RecordRegister(store, self.world.initial, self.board))

    def _note(self, state: RendezvousRecord) -> None:
        assert self.told is None or state.version > self.told.version, "told an older record"
        self.told = state
        seconds, self.slow_to_note = self.slow_to_note, 0.0
        if seconds:
            self.world.scheduler.sleep(seconds)

    def _beat(self) -> None:
        executor, store = self._make("heart")
        scheduler = self.world.scheduler
        heart = NodeHeart(executor)
        execute = store.execute

        def note_beat(steps: Sequence[Step]) -> list[str | None]:
            given = execute(steps)
            if any(isinstance(step, Heartbeat) for step in steps):
                self.heard_at = scheduler.now()
            return given

        store.execute = note_beat  # type: ignore[method-assign]
        heart._stopping = VirtualStop(scheduler)  # type: ignore[assignment]
        look = heart._watch.silent

        def silent(state: RendezvousRecord, outside: Iterable[Node] = ()) -> list[Node]:
            began = scheduler.now()
            found = look(state, outside)
            for other in found:
                self.world.is_silent(other, self, began)
            return found

        heart._watch.silent = silent  # type: ignore[method-assign]
        heart.run()

    # What a plan does --------------------------------------------------------------------------------------

    def join(self) -> RendezvousRecord:
        """Takes part in the next round, or the running one."""
        leaving, self.inside = self.last_round, None
        self.joins_since = self.world.scheduler.now()
        state = self.executor.join(leaving)
        self.joins_since, self.joined = None, state
        seat = state.seat_of(self.node)
        assert state.complete
        assert seat is not None
        assert seat.group_rank is not None
        self.world.entered(self, state, seat)
        self.inside = self.last_round = state.round
        self.rounds.append(state.round)
        return state

    def leave(self) -> None:
        """Gives up its place; an agent stops its workers first."""
        self.inside, self.leaving = None, True
        self.executor.exit()

    def work(self, until: float, fails: Callable[[], bool] = lambda: False) -> None:
        """What a stock agent does with workers that run: joins again when others wait, or a worker failed."""
        while self.world.scheduler.now() < until:
            self.world.scheduler.sleep(1.0)
            assert self.last_round is not None
            if nodes_waiting(self.state, self.node, self.last_round) or fails():
                self.join()


class World:
    """The store, the nodes, and what must hold."""

    def __init__(
        self,
        scheduler: Scheduler,
        settings: RendezvousSettings,
        use_libuv: bool = True,
        pauses: bool = False,
        hosted: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.settings = settings
        self.store = SimulatedStore(scheduler, use_libuv=use_libuv)
        self.initial = RendezvousRecord(
            settings.min_nodes, settings.max_nodes, settings.options(), hosted=hosted
        )
        self.nodes: list[SimulatedNode] = []
        self.disturbed_at = 0.0
        self.pauses = pauses
        self.groups: dict[int, dict[int, str]] = {}
        self.changes: dict[int, float] = {}  # when each version came
        self.expected: dict[int, int] = {}
        self.ranked: set[int] = set()  # rounds in which nodes have come and gone
        self.silenced: set[str] = set()  # nodes that an observer may have taken out
        self.by_name: dict[str, SimulatedNode] = {}
        self._incarnations: dict[str, int] = {}
        self._text = b""
        self._contents = self.store._contents.values  # a copy at each step would take longer than the steps
        self.record = self.initial
        scheduler.after_each_step(self._check)

    def start(self, node_id: str, plan: Callable[[SimulatedNode], None], nproc: int = 1) -> SimulatedNode:
        incarnation = self._incarnations.get(node_id, -1) + 1
        self._incarnations[node_id] = incarnation
        self.disturbed_at = self.scheduler.now()
        made = SimulatedNode(self, Node(node_id, incarnation, f"host{node_id}", nproc), plan)
        self.nodes.append(made)
        self.by_name[made.node.name] = made
        return made

    def kill(self, node: SimulatedNode) -> None:
        """As a machine's failure would."""
        if not node.alive:
            return
        node.dead, node.inside, node.died_at = True, None, self.scheduler.now()
        self.disturbed_at = self.scheduler.now()
        current = self.scheduler.current
        for task in sorted([node.agent, *node.others], key=lambda task: task is current):
            self.scheduler.crash(task)

    def entered(self, node: SimulatedNode, state: RendezvousRecord, seat: Seat) -> None:
        """A node is in the group: the same for all of them, and no one else has its rank."""
        assert seat.group_rank is not None
        size = self.expected.setdefault(state.round, len(state.seats))
        grows = state.policy is RoundPolicy.RANK or state.round in self.ranked
        assert grows or size == len(state.seats), "sizes of one round differ"
        group = self.groups.setdefault(state.round, {})
        other = group.get(seat.group_rank)
        assert grows or other in (None, node.node.name), "two nodes with one group rank"
        group[seat.group_rank] = node.node.name

    def is_silent(self, node: Node, observer: SimulatedNode, looked_at: float) -> None:
        """A node is about to be taken out: no sign of life may have come from it for the timeout."""
        made, now = self.by_name[node.name], self.scheduler.now()
        self.silenced.add(node.name)
        if made.heard_at >= looked_at:
            return  # while others were looked at
        silence, timeout = now - made.heard_at, self.settings.keep_alive_timeout
        assert silence >= timeout, f"{node} was heard {silence:g} s ago, {observer.node} calls it silent"
        assert not made.alive or self.pauses or now < made.excused_until, (
            f"{node} lives and is healthy, and {observer.node} calls it silent"
        )

    def _check_gone(self, before: RendezvousRecord, after: RendezvousRecord) -> None:
        """No one is out that lives, was heard, and has not said that it goes."""
        there = {node.name for node in after.nodes}
        for node in before.nodes:
            if node.name in there or node.name in self.silenced:
                continue
            made = self.by_name[node.name]
            superseded = self._incarnations[node.id] > node.incarnation
            since = made.joins_since
            gives_up = since is not None and self.scheduler.now() >= since + self.settings.join_timeout
            assert made.dead or made.leaving or superseded or made.agent.done or gives_up, (
                f"{node} lives, was heard, and is out"
            )

    def _check(self) -> None:
        text = self._contents.get(RECORD_KEY, b"")
        if text is self._text:
            return
        self._text, before, after = text, self.record, RendezvousRecord.from_json(text.decode(), RECORD_KEY)
        if after == before:
            return
        self.record = after
        self.changes[after.version] = self.scheduler.now()
        self._check_gone(before, after)
        if after.policy is RoundPolicy.RANK:
            self.ranked.add(after.round)
        check_record(after)
        check_change(before, after)
        if after.complete and (after.round > before.round or not before.complete):
            inside = [node for node in self.nodes if node.alive and node.inside is not None]
            late = [
                n.node.name
                for n in inside
                if n.inside != after.round
                and n.node.name not in self.silenced
                and self._incarnations[n.node.id] == n.node.incarnation
            ]
            assert self.pauses or not late, f"two groups: {late} are still in an earlier round"


def check_record(state: RendezvousRecord) -> None:
    """What holds for every record."""
    ids = [node.id for node in state.nodes]
    assert len(ids) == len(set(ids)), "a node is in two places"
    assert len(state.participants) <= state.max_nodes, "more nodes have seats than may"
    assert all(seat.occupant is None or seat.last == seat.occupant.id for seat in state.seats)
    if state.complete:
        ranks = [seat.group_rank for seat in state.seats]
        assert ranks == list(range(len(state.seats))), f"group ranks are {ranks}"
        slots = [s for seat in state.seats for s in range(seat.base_slot, seat.base_slot + seat.nproc)]
        assert sorted(slots) == list(range(state.next_slot)), "slots overlap, or have gaps"
        assert state.formation_size <= len(slots)
        assert state.policy is RoundPolicy.RANK or state.participants or state.closed
        assert len(state.seats) >= state.min_nodes
    else:
        assert state.policy is not RoundPolicy.RANK
        assert not state.waiting
        assert not state.spares
        assert len(state.participants) < state.max_nodes or state.closed
    if state.policy is RoundPolicy.RANK:
        assert not state.waiting
        assert not state.hosted or state.seats[0].occupant is not None, "the store of the workers is lost"


def check_change(before: RendezvousRecord, after: RendezvousRecord) -> None:
    """What holds for every change."""
    assert after.version == before.version + 1, "a version was passed over"
    assert not before.closed or after.closed, "closed is final"
    assert after.restarts >= before.restarts
    assert before.round <= after.round  # several entries of the log may each begin one
    assert after.hosted == before.hosted
    if before.policy is RoundPolicy.RANK != after.policy:
        assert before.hosted, "nothing was lost by which the ranks go on"
        host = before.seats[0].occupant
        assert after.round > before.round or after.seats[0].occupant is None, f"{host} is there yet"
    elif before.policy is RoundPolicy.RANK:
        assert (after.formation_size, after.round) == (before.formation_size, before.round)
        assert [(s.base_slot, s.nproc, s.role) for s in after.seats[: len(before.seats)]] == [
            (s.base_slot, s.nproc, s.role) for s in before.seats
        ], "a seat has moved"
    elif (
        before.complete
        and after.complete
        and before.round == after.round
        and after.policy is not RoundPolicy.RANK
    ):
        was = {s.group_rank: s.occupant for s in before.seats}
        now = {s.group_rank: s.occupant for s in after.seats}
        assert was.keys() == now.keys(), "the size of a complete round has changed"
        assert all(now[r] in (None, was[r]) for r in now), "somebody came into a complete round"


def random_world(seed: int) -> World:
    """A job of two to four nodes with things happening to it, all from a seed."""
    dice = random.Random(seed)
    scheduler = Scheduler(seed, max_time=2000.0)
    max_nodes = dice.randint(1, 4)
    settings = RendezvousSettings(
        "job",
        dice.randint(1, max_nodes),
        max_nodes,
        join_timeout=300.0,
        last_call_timeout=dice.choice([0.0, 3.0, 10.0]),
    )
    world = World(scheduler, settings, use_libuv=dice.random() < 0.7, hosted=dice.random() < 0.7)
    end = 200.0
    quiet = 40.0
    settle = 150.0
    rank_policy = dice.random() < 0.5
    if dice.random() < 0.3:  # an answer was lost, and the store was asked again
        for operation in ("append", "add", "compare_set"):
            world.store.repeat(operation, "*/[slc]*", times=dice.randint(1, 4))

    def plan(node: SimulatedNode) -> None:
        scheduler.sleep(dice.choice([0.0, 0.0, dice.uniform(0, quiet)]))
        node.join()
        for _ in range(dice.randint(0, 2)):
            until = scheduler.now() + dice.uniform(0, 10)
            node.work(min(until, quiet))
            if scheduler.now() < quiet:
                what = dice.random()
                if what < 0.4:
                    node.join()
                elif what < 0.55:
                    node.leave()
                    return
        if rank_policy and dice.random() < 0.5:
            node.executor.register.change(adopt_rank_policy)
        while scheduler.now() < max(end, world.disturbed_at + settle):
            node.work(max(end, world.disturbed_at + settle))
        check_settled(world)
        node.executor.register.change(close)

    for number in range(dice.randint(1, 4)):
        node = world.start(str(number), plan)
        if dice.random() < 0.5:
            respawns = dice.random() < 0.6
            delay = dice.choice([0.0, 1.0, dice.uniform(0, 30)])
            scheduler.at_step(
                node.agent,
                dice.randint(1, 25),
                lambda node=node, respawns=respawns, delay=delay: _die(world, node, plan, respawns, delay),
            )
    return world


def _die(
    world: World, node: SimulatedNode, plan: Callable[[SimulatedNode], None], respawns: bool, delay: float
) -> None:
    def reborn() -> None:
        world.scheduler.sleep(delay)
        world.start(node.node.id, plan)

    if respawns:
        world.scheduler.spawn(f"start of {node.node.id}", reborn)
    world.kill(node)


def check_settled(world: World) -> None:
    """Long after the last disturbance all live nodes are where they belong."""
    state = world.record
    if state.closed:
        return
    live = {node.node.name for node in world.nodes if node.alive}
    if not live:
        return  # no node is left to take the dead ones out
    assert {node.name for node in state.nodes} == live, (
        "the record still has dead nodes, or not all live ones"
    )
    if len(live) >= state.min_nodes or state.policy is RoundPolicy.RANK:
        assert state.complete
        assert len(state.participants) == min(state.max_nodes, len(live))
        assert all(
            state.place_of(node.node) is not NodePlace.SEAT or node.inside == state.round
            for node in world.nodes
            if node.alive
        )
