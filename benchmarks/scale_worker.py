"""What the processes of `scale.py` do: the store's server, and the simulated ranks."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import resource
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from typing import Any

from scale_wire import Connection, Loop, WireStore

from ft_wrapper.store import Decision, Member, TCPStoreServer, View

HOST = "127.0.0.1"
PATIENCE = 600.0  # seconds that a rank waits for the others, and until a missing one is silent
_NEVER = 86400.0
GO = "scale/go"
_LIST = "scale/list"
_FULL = "scale/full"


@dataclasses.dataclass
class Stamps:
    """When the last rank of a process was through a part of a restart; monotonic seconds, 0.0 for none."""

    woken: float = 0.0
    proposing: float = 0.0
    decided: float = 0.0
    placed: float = 0.0
    entered: float = 0.0


@dataclasses.dataclass
class Costs:
    """What the ranks of a process did in a part of a restart; lists have an entry for each rank."""

    stamps: Stamps
    operations: list[int]
    sent: list[int]
    received: list[int]
    looks: int
    proposers: list[int]  # positions in the lists
    cpu: float


class Roster(tuple[Member, ...]):
    """Members, with their positions known: so that what each rank looks up in them is paid once a process."""

    def __new__(cls, members: tuple[Member, ...]) -> Roster:
        roster = super().__new__(cls, members)
        roster.positions = {member: position for position, member in enumerate(members)}
        return roster

    positions: dict[Member, int]

    def index(self, member: Member, *_: Any) -> int:
        return self.positions[member]

    def __contains__(self, member: object) -> bool:
        return member in self.positions


class SharedView(View):
    """A view that all ranks of a process share. The first one to need the next view makes it."""

    @classmethod
    def of(cls, view: View) -> SharedView:
        """Returns the same view, to be shared."""
        fields = {field.name: getattr(view, field.name) for field in dataclasses.fields(view)}
        return cls(**fields | {"members": Roster(view.members)})

    def after(self, decision: Decision, nonce: str) -> View:
        following = self.__dict__.get("following")
        if following is None or following.nonce != nonce:
            following = SharedView.of(super().after(decision, nonce))
            self.__dict__["following"] = following
        return following


class RankStore(WireStore):
    """A simulated rank's client, which stamps its proposals."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.stamps = Stamps()
        self.proposed = False

    def advance(self, *args: Any, **kwargs: Any) -> bool:
        begin = time.monotonic()
        moved = super().advance(*args, **kwargs)
        if moved and self.stamps.decided == 0.0:
            self.stamps.proposing, self.stamps.decided = begin, time.monotonic()
            self.proposed = True
        return moved


class Ranks:
    """Some of the simulated ranks, in this process.

    Args:
        port: where the server listens.
        slots: the ranks, in the first iteration.
        world_size: number of all ranks.
        connections: how many connections they share.
    """

    def __init__(self, port: int, slots: range, world_size: int, connections: int) -> None:
        self._loop = Loop()
        self._world_size = world_size
        links = [Connection(self._loop, HOST, port) for _ in range(min(connections, len(slots)))]
        self._stores = [RankStore(links[i % len(links)]) for i in range(len(slots))]
        self._slots = slots
        self._all_slots = frozenset(range(world_size))
        self._members: list[Member] = [Member(slot, 0) for slot in slots]
        self._view: View
        self._barriers = 0

    def join(self) -> None:
        """All ranks join the job; the last one of all forms it."""
        record = json.dumps({"host": socket.gethostname(), "pid": os.getpid()})

        def join(i: int) -> None:
            self._members[i] = self._stores[i].register(self._slots[i], record)
            self._stores[i].join_first(self._members[i], self._all_slots)

        self._run(join)

    def read_view(self) -> None:
        """Reads the first iteration's members, once for all ranks."""

        def read(i: int) -> None:
            if i == 0:
                head = self._stores[0].read_head()
                assert head is not None
                self._view = SharedView.of(self._stores[0].read_view(head))

        self._run(read)

    def advance(self, ready: Callable[[], None]) -> Costs:
        """Waits for the iteration's end, and goes on to the next iteration with all ranks."""
        view = self._view

        def go_on(i: int) -> None:
            store, member = self._stores[i], self._members[i]
            outcome = None
            while outcome is None:
                outcome = store.wait_for_end(view.n, _NEVER, lambda: False)
            store.stamps.woken = time.monotonic()
            rank = view.members.index(member)
            store.arrive(view, member, rank, len(view.members))
            step = store.await_next(view, member, timeout=PATIENCE, heartbeat_timeout=PATIENCE)
            if step is None:
                raise RuntimeError(f"{member} was left out")
            self._view, _ = step
            assert self._view.members.index(member) == rank
            store.stamps.placed = time.monotonic()

        costs = self._measure(go_on, ready)
        assert self._view.n == view.n + 1
        return costs

    def enter(self, ready: Callable[[], None]) -> Costs:
        """Does what a rank does between knowing its place and calling the function."""
        view = self._view

        def enter(i: int) -> None:
            store, member = self._stores[i], self._members[i]
            store.wait_for(f"{GO}/{view.n}", _NEVER)
            store.reset_counts()
            rank, size = view.members.index(member), len(view.members)
            endpoint = (HOST, 1) if rank == 0 else None
            store.check_assignment(view.n, member, rank, size, size, endpoint=endpoint)
            assert endpoint or store.await_endpoint(view.n, PATIENCE, PATIENCE) is not None
            store.stamps.entered = time.monotonic()

        return self._measure(enter, ready)

    def barrier(self, ready: Callable[[], None]) -> Costs:
        """A barrier in which each rank enters itself into a list and then reads the whole list."""
        self._barriers += 1
        name = f"{self._barriers}"

        def come(i: int) -> None:
            store = self._stores[i]
            store.wait_for(f"{GO}/barrier/{name}", _NEVER)
            store.reset_counts()
            store.append(f"{_LIST}/{name}", f"{self._slots[i]},")
            here = store.get(f"{_LIST}/{name}").count(b",")  # a rank would take the list apart
            if here == self._world_size:
                store.set(f"{_FULL}/{name}", "1")
            store.wait_for(f"{_FULL}/{name}", _NEVER)
            store.stamps.placed = time.monotonic()

        return self._measure(come, ready)

    def close(self) -> None:
        """Closes the connections."""
        self._loop.close()

    def _run(self, task: Callable[[int], None]) -> None:
        for i, store in enumerate(self._stores):
            self._loop.start(store, lambda i=i: task(i))  # type: ignore[misc]
        self._loop.run()

    def _measure(self, task: Callable[[int], None], ready: Callable[[], None]) -> Costs:
        stamps = Stamps()
        for i, store in enumerate(self._stores):
            store.reset_counts()
            store.stamps, store.proposed = stamps, False
            self._loop.start(store, lambda i=i: task(i))  # type: ignore[misc]
        self._loop.run_until(self._loop.all_wait)
        ready()
        begin = time.process_time()
        self._loop.run()
        cpu = time.process_time() - begin
        return Costs(
            stamps,
            [store.operations for store in self._stores],
            [store.sent for store in self._stores],
            [store.received for store in self._stores],
            sum(store.looks for store in self._stores),
            [i for i, store in enumerate(self._stores) if store.proposed],
            cpu,
        )


def raise_file_limit() -> int:
    """Allows this process as many open files as it may have; returns how many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


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


def run_ranks(pipe: Pipe, port: int, slots: range, world_size: int, connections: int) -> None:
    """Simulated ranks: does what comes through the pipe, ``join`` for instance, until that closes."""
    raise_file_limit()
    ranks = Ranks(port, slots, world_size, connections)
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection walks all ranks' stacks; none of theirs would on its own machine
    pipe.send("connected")
    try:
        while True:
            name = pipe.recv()
            if name in ("join", "read_view"):
                pipe.send(getattr(ranks, name)())
            else:
                pipe.send(getattr(ranks, name)(lambda: pipe.send("ready")))
    except EOFError:
        pass
    ranks.close()
