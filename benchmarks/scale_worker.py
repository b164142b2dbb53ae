"""What the processes of `scale.py` do: the store's server, and the simulated ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import resource
import sys
import time
import types
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection as Pipe
from typing import Any

from scale_wire import Connection, Event, Loop, Threading, WireStore

from ft_wrapper.monitor.heart import Heart
from ft_wrapper.monitor.watch import RankMonitor
from ft_wrapper.protocol import Agreement, joining, keys, neighbours, records
from ft_wrapper.protocol.ends import Ends
from ft_wrapper.protocol.entering import Entered
from ft_wrapper.protocol.housekeeping import note_active_target
from ft_wrapper.protocol.membership import Membership
from ft_wrapper.protocol.records import Decision, Member, View
from ft_wrapper.settings import AllLimits
from ft_wrapper.store import TCPStoreServer

HOST = "127.0.0.1"
PATIENCE = 600.0  # seconds that a rank waits for the others
_NEVER = 86400.0
GO = "scale/go"
_LIST = "scale/list"
_FULL = "scale/full"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is simulated.

    Args:
        ranks: how many there are.
        connections: that each process of ranks has for all that its ranks do; 0 for a real rank's, each.
        interval: seconds between two heartbeats.
        timeout: seconds without one after which a member is silent.
        node: how many ranks share a heart, as those of an agent do, where there are such hearts.
    """

    ranks: int
    connections: int
    interval: float
    timeout: float
    node: int = 1


@dataclasses.dataclass
class Stamps:
    """When the last rank of a process was through a part; monotonic seconds, 0.0 for none."""

    formed: float = 0.0
    woken: float = 0.0
    decided: float = 0.0
    placed: float = 0.0
    entered: float = 0.0


@dataclasses.dataclass
class Costs:
    """What the ranks of a process did in a while; lists have an entry for each rank that is there.

    Args:
        stamps: when the last one was through each part.
        operations: requests of its process: its own client's and its monitor thread's.
        sent: bytes of these to the server.
        received: bytes of these from the server.
        looks: waits of these that timed out.
        beats: requests of all of their monitors.
        beat_bytes: bytes of these, both ways.
        cpu: seconds of this process.
        connections: that this process has.
    """

    stamps: Stamps
    operations: list[int]
    sent: list[int]
    received: list[int]
    looks: list[int]
    beats: int
    beat_bytes: int
    cpu: float
    connections: int


# What each rank computes for itself, on its own machine, is computed once in each process: or the ranks that
# share these two cores would be measured, and not the store.


class Roster(tuple[Member, ...]):
    """Members, with their positions known, of which parts are taken for nothing."""

    positions: dict[Member, int]

    @classmethod
    def of(cls, members: Sequence[Member]) -> Roster:
        """Returns the same members."""
        roster = cls(members)
        roster.positions = {member: position for position, member in enumerate(members)}
        return roster

    def index(self, member: Member, *_: Any) -> int:
        return self.positions[member]

    def __contains__(self, member: object) -> bool:
        return member in self.positions

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return Part([(self, range(len(self))[key])])
        return super().__getitem__(key)


class Part(Sequence[Member]):
    """Some of a roster's members, in a row, and others behind them."""

    def __init__(self, parts: list[tuple[Roster, range]]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(len(places) for _, places in self._parts)

    def __iter__(self) -> Iterator[Member]:
        return (roster[place] for roster, places in self._parts for place in places)

    def __getitem__(self, key: Any) -> Any:
        if key != 0:
            return tuple(self)[key]
        return next(iter(self))

    def __add__(self, other: Part) -> Part:
        return Part(self._parts + other._parts)


class Slots(list[int]):
    """All slots, in order: each of them is its own place."""

    def index(self, slot: int, *_: Any) -> int:  # type: ignore[override]
        return slot


def once(make: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """Makes something again only if its key is another one than last time.

    Args:
        make: makes it of some arguments.
        key: tells, of the same arguments, for what it is.
    """
    last: list[Any] = []

    def made(*arguments: Any) -> Any:
        wanted = key(*arguments)
        if not last or last[0] != wanted:
            last[:] = [wanted, make(*arguments)]
        return last[1]

    return made


@contextlib.contextmanager
def computed_once(slots: frozenset[int]) -> Iterator[None]:
    """Has what all ranks of a process read and compute alike done once.

    Args:
        slots: those that the job begins with, from 0 on.
    """
    after = View.after
    read_decision = Decision.from_json
    roster_from_json = records.roster_from_json

    def view_after(view: View, decision: Decision, nonce: str) -> View:
        following = after(view, decision, nonce)
        return dataclasses.replace(following, members=Roster.of(following.members))

    replaced: list[tuple[Any, str, Any]] = [
        (View, "after", once(view_after, lambda view, decision, nonce: (view.n, view.nonce, nonce))),
        (Decision, "from_json", staticmethod(once(read_decision, lambda text, key: text))),
    ]

    def read_roster(text: str, key: str) -> Roster:
        return Roster.of(roster_from_json(text, key))

    replaced.append((records, "roster_from_json", once(read_roster, lambda text, key: text)))
    decide = joining.first_decision
    replaced.append((joining, "first_decision", once(decide, lambda members, limits: id(members))))
    replaced.append((neighbours.NeighbourWatch, "_starts", _starts))
    in_order = Slots(sorted(slots))
    sort: Any = lambda what, **how: in_order if what is slots else sorted(what, **how)  # noqa: E731
    with contextlib.ExitStack() as exits:
        exits.enter_context(unittest.mock.patch.object(joining, "sorted", sort, create=True))
        for owner, name, value in replaced:
            exits.enter_context(unittest.mock.patch.object(owner, name, value))
        yield


def _starts(watch: Any, view: View, own: frozenset[Member]) -> tuple[int, ...]:
    """What `NeighbourWatch` works out once in an iteration by going through all members."""
    places = sorted(view.members.index(member) for member in own if member in view.members)
    size = len(view.members)
    return tuple(place for place in places if view.members[(place + 1) % size] not in own)


class Rank:
    """One simulated rank: its process with two clients, and its monitor with its own.

    Args:
        ranks: the process's.
        slot: its slot.
    """

    def __init__(self, ranks: Ranks, slot: int) -> None:
        self._ranks = ranks
        self.slot = slot
        self._opened: list[WireStore] = []
        self.store = self._connect()
        self.thread_store = self._connect()
        slots: Any = ranks.slots  # one set for all: each would sort and hash its own
        self.job = Membership(Agreement(self.store), slot, slots, ranks.settings, 0, ranks.terms)
        self.job.on_member = self._join_monitor
        self.monitor: RankMonitor | None = None
        self._heart: Heart | None = None  # of its own
        # Of the shared memory: all else is for the part that watches the rank's process.
        self.memory: Any = types.SimpleNamespace(rank=None)
        self.end = Event(ranks.loop)
        self.stamps = Stamps()

    @property
    def own(self) -> tuple[WireStore, WireStore]:
        """The clients of its process."""
        return self.store, self.thread_store

    @property
    def monitors(self) -> list[WireStore]:
        """The clients of its monitor."""
        return self._opened[2:]

    def form(self) -> None:
        """Gets into the first iteration."""
        self.job.register()
        if not self.job.join():
            raise RuntimeError(f"slot {self.slot} did not get in")
        self.stamps.formed = time.monotonic()
        self.enter()

    def watch(self) -> None:
        """What the monitor thread does: waits until the iteration has ended, and frees the rank."""
        n, outcome = self.job.view.n, None
        if self.job.view.members.index(self.job.member) == 0:
            note_active_target(self.thread_store, n)
        while outcome is None:
            outcome = Ends(self.thread_store).wait_for_end(n, _NEVER, lambda: False)
        self.stamps.woken = time.monotonic()
        self.end.set()

    def restart(self) -> None:
        """Waits for the iteration's end, and goes on to the next one, up to the call of the function."""
        self.end.wait()
        self.end.clear()
        view = self.job.view
        self.job.go_on(view.members.index(self.job.member), len(view.members))
        self.stamps.placed = time.monotonic()
        self.enter()

    def enter(self) -> None:
        """From knowing its place to calling the function."""
        view, member = self.job.view, self.job.member
        rank, size = view.members.index(member), len(view.members)
        assert self.monitor is not None
        self.memory.rank = rank
        self.monitor.view = view
        endpoint = (HOST, 1) if rank == 0 else None
        entry, sizes = Entered(member, rank), (size, size)
        endpoint = self.job.agreement.entering.enter(view.n, entry, sizes, endpoint)
        if endpoint is None and self.job.await_endpoint(rank, sizes) is None:
            raise RuntimeError(f"{member} was told no endpoint")
        self.stamps.entered = time.monotonic()
        if not view.is_first:  # the monitor thread does this
            Agreement(self.thread_store).entering.count_active(view.n)

    def lose(self) -> None:
        """Its host is gone."""
        assert self.monitor is not None
        self.monitor.stop()
        if self._heart is not None:
            self._heart.stop()
        for store in self._opened:
            store.is_lost = True
            if not store.connection.is_shared:
                store.connection.close()

    def _connect(self) -> WireStore:
        self._opened.append(WireStore(self._ranks.connection(self.slot, len(self._opened))))
        return self._opened[-1]

    def _join_monitor(self, member: Member) -> None:
        heart = self._ranks.shared_heart(self.slot, self._connect)
        if heart is None:
            heart = self._heart = Heart(self._connect, str(member), self._ranks.settings)
        else:
            self.job.record = dataclasses.replace(self.job.record, heart=heart.name)
            self.job.say_who()
        self.monitor = RankMonitor(self._connect, member, self.memory, 0, self._ranks.settings, heart)


class Ranks:
    """Some of the simulated ranks, in this process.

    Args:
        plan: what is simulated.
        port: where the server listens.
        slots: the ranks of this process, in the first iteration.
        every: those of all processes.
    """

    def __init__(self, plan: Plan, port: int, slots: range, every: frozenset[int]) -> None:
        self.loop = Loop()
        self._plan = plan
        self._port = port
        self._shared: list[Connection] = []
        self._hearts: dict[int, Heart] = {}
        self.slots = every
        self.terms: dict[str, object] = {"function": "train", "formation_size": plan.ranks}
        self.settings = AllLimits(
            soft_timeout=PATIENCE,
            hard_timeout=PATIENCE,
            termination_grace_time=5.0,
            monitor_process_interval=1.0,
            progress_watchdog_interval=1.0,
            heartbeat_interval=plan.interval,
            heartbeat_timeout=plan.timeout,
            barrier_timeout=PATIENCE,
            completion_timeout=PATIENCE,
            rejoin=True,
            max_same_faults=None,
        )
        stand_in = Threading(self.loop)
        for name, module in list(sys.modules.items()):
            if name.startswith(("ft_wrapper.monitor.", "ft_wrapper.protocol.")) and hasattr(
                module, "threading"
            ):
                module.threading = stand_in
        self._ranks = [Rank(self, slot) for slot in slots]
        self._barriers = 0

    def connection(self, slot: int, number: int) -> Connection:
        """A connection for a rank: its own, or one of those that all share.

        Args:
            slot: the rank's.
            number: how many it has already.
        """
        if not self._plan.connections:
            return Connection(self.loop, HOST, self._port)
        if len(self._shared) < self._plan.connections:
            self._shared.append(Connection(self.loop, HOST, self._port, is_shared=True))
            return self._shared[-1]
        return self._shared[(4 * slot + number) % len(self._shared)]

    def shared_heart(self, slot: int, connect: Callable[[], WireStore]) -> Heart | None:
        """The heart that a rank shares; None where each has its own."""
        if self._plan.node == 1:
            return None
        node = slot // self._plan.node
        if node not in self._hearts:
            self._hearts[node] = Heart(connect, keys.shared_heart(f"{node:016x}"), self.settings)
        return self._hearts[node]

    def form(self, ready: Callable[[], None], _: range) -> Costs:
        """All ranks join the job, and call the function."""
        return self._measure([rank.form for rank in self._ranks], ready, f"{GO}/form")

    def restart(self, ready: Callable[[], None], lost: range) -> Costs:
        """Some hosts are lost, or none; the others wait for the end of the iteration, and go on."""
        for rank in self._ranks:
            if rank.slot in lost:
                rank.lose()
        self._ranks = [rank for rank in self._ranks if rank.slot not in lost]
        for rank in self._ranks:
            self.loop.start(rank.watch)
        return self._measure([rank.restart for rank in self._ranks], ready)

    def train(self, ready: Callable[[], None], seconds: float) -> Costs:
        """Nothing happens for a while, but heartbeats."""
        over = Event(self.loop)
        self.loop.call_at(time.monotonic() + seconds, over.set)
        return self._measure([over.wait], ready)

    def barrier(self, ready: Callable[[], None], _: range) -> Costs:
        """A barrier in which each rank enters itself into a list and then reads the whole list."""
        self._barriers += 1
        name = f"{self._barriers}"

        def come(rank: Rank) -> None:
            store = rank.store
            store.append(f"{_LIST}/{name}", f"{rank.slot},")
            here = store.get(f"{_LIST}/{name}").count(b",")  # a rank would take the list apart
            if here == self._plan.ranks:
                store.set(f"{_FULL}/{name}", "1")
            store.wait_for(f"{_FULL}/{name}", _NEVER)
            rank.stamps.placed = time.monotonic()

        tasks = [functools.partial(come, rank) for rank in self._ranks]
        return self._measure(tasks, ready, f"{GO}/barrier/{name}")

    def close(self) -> None:
        """Closes the connections."""
        self.loop.close()

    def _measure(
        self, tasks: Sequence[Callable[[], object]], ready: Callable[[], None], go: str | None = None
    ) -> Costs:
        """Runs tasks; with ``go``, once that key is there, for which this process waits."""
        stores = [store for rank in self._ranks for store in rank._opened]
        for store in stores:
            store.reset_counts()
        for rank in self._ranks:
            rank.stamps = Stamps()
        gate = WireStore(Connection(self.loop, HOST, self._port))

        def begin() -> None:
            gate.wait_for(go or "", _NEVER)
            for task in tasks:
                self.loop.start(task)

        if go is not None:
            self.loop.start(begin)
        else:
            for task in tasks:
                self.loop.start(task)
        self.loop.run_until(lambda: True)
        ready()
        cpu = time.process_time()
        self.loop.run()
        cpu = time.process_time() - cpu
        gate.connection.close()
        own = [rank.own for rank in self._ranks]
        monitors = [store for rank in self._ranks for store in rank.monitors]
        names = [field.name for field in dataclasses.fields(Stamps)]
        return Costs(
            Stamps(**{name: max(getattr(rank.stamps, name) for rank in self._ranks) for name in names}),
            [sum(store.operations for store in two) for two in own],
            [sum(store.sent for store in two) for two in own],
            [sum(store.received for store in two) for two in own],
            [sum(store.looks for store in two) for two in own],
            sum(store.operations for store in monitors),
            sum(store.sent + store.received for store in monitors),
            cpu,
            len(self.loop.connections),
        )


def run_server(pipe: Pipe) -> None:
    """The store's server, in a process of its own, until the other end of the pipe closes."""
    raise_file_limit()
    server = TCPStoreServer(host_name=HOST)
    pipe.send(server.port)
    try:
        pipe.recv()
    except EOFError:
        pass
    server.close()


def raise_file_limit() -> int:
    """Allows this process as many open files as it may have; returns how many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def run_ranks(pipe: Pipe, plan: Plan, port: int, slots: range) -> None:
    """Simulated ranks: does what comes through the pipe, ``form`` for instance, until that closes."""
    raise_file_limit()
    logging.getLogger("ft_wrapper").setLevel(logging.ERROR)
    every = frozenset(range(plan.ranks))
    with computed_once(every):
        ranks = Ranks(plan, port, slots, every)
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection walks all ranks' stacks; none of theirs would on its own machine
        pipe.send("connected")
        try:
            while True:
                name, argument = pipe.recv()
                pipe.send(getattr(ranks, name)(lambda: pipe.send("ready"), argument))
        except EOFError:
            pass
        ranks.close()


def run_connections(pipe: Pipe, port: int, connections: int) -> None:
    """Opens connections, asks something on each, and keeps them until the pipe closes."""
    raise_file_limit()
    loop = Loop()
    stores = [WireStore(Connection(loop, HOST, port)) for _ in range(connections)]
    for store in stores:
        loop.start(functools.partial(store.check, ["scale/nothing"]))
    loop.run()
    pipe.send("connected")
    try:
        pipe.recv()
    except EOFError:
        pass
    loop.close()
