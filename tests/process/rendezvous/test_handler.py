"""The handler on a real TCPStore, and on etcd: several nodes in one process, each with threads of its own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from memory_backend import MemoryBackend, RealClock
from support.nightly import at_night
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
)

from ft_wrapper.protocol.operations import read
from ft_wrapper.rendezvous import backends, presence
from ft_wrapper.rendezvous.backends import Backend, EtcdBackend, TcpBackend
from ft_wrapper.rendezvous.executor import Executor
from ft_wrapper.rendezvous.handler import EtcdRendezvousHandler, FtRendezvousHandler, create_handler
from ft_wrapper.rendezvous.presence import NodeHeart
from ft_wrapper.rendezvous.record import RendezvousRecord, Seat
from ft_wrapper.rendezvous.register import RECORD_KEY, Board, alive_key, goodbye_key, process_key
from ft_wrapper.rendezvous.settings import Identity, RendezvousSettings, parameters_from_url
from ft_wrapper.store import TCPStore, TCPStoreServer
from ft_wrapper.store.address import EtcdAddress
from ft_wrapper.testing import EtcdServer, FakeStore

TIMEOUT = 30.0


class Nodes:
    """Handlers of several nodes at one endpoint, closed in the end.

    Args:
        make_backend: connects to where the record is kept.
    """

    def __init__(self, make_backend: Callable[[], Backend]) -> None:
        self.make_backend = make_backend
        self._pool = concurrent.futures.ThreadPoolExecutor(8)
        self._made: list[FtRendezvousHandler] = []

    def make(self, node_id: str | None, low: int, high: int, **settings: Any) -> FtRendezvousHandler:
        more = {"nproc": settings.pop("nproc", 1), "is_index": settings.pop("is_index", False)}
        identity = Identity(node_id, "localhost", **more)
        hooks = {name: settings.pop(name) for name in ("on_evicted", "on_change") if name in settings}
        settings = {"join_timeout": TIMEOUT, "last_call_timeout": 0.2, **settings}
        handler = FtRendezvousHandler(
            RendezvousSettings("job", low, high, **settings), identity, self.make_backend(), Board(**hooks)
        )
        self._made.append(handler)
        return handler

    def join(self, handler: FtRendezvousHandler) -> concurrent.futures.Future[RendezvousInfo]:
        return self._pool.submit(handler.next_rendezvous)

    def all_join(self, *handlers: FtRendezvousHandler) -> list[RendezvousInfo]:
        return [future.result(TIMEOUT) for future in [self.join(handler) for handler in handlers]]

    def close(self) -> None:
        for handler in self._made:
            handler.shutdown()
        self._pool.shutdown()


# The handler is the same on both; what differs is the backend.
ON_BOTH = pytest.mark.parametrize("nodes", ["tcp", "etcd"], indirect=True)


@pytest.fixture(params=["tcp", *at_night("the TCPStore runs always", ["etcd"])])
def nodes(
    request: pytest.FixtureRequest, prefix: str, etcd_if_any: object, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Nodes]:
    monkeypatch.setattr(presence, "RECONNECTS", 1.0)  # else a node finds no other silent for 20 s
    if request.param == "etcd":
        etcd = request.getfixturevalue("etcd")
        made = Nodes(lambda: EtcdBackend(EtcdAddress(etcd.endpoints, prefix)))
        yield made
        made.close()
        return
    server = TCPStoreServer(0)
    made = Nodes(lambda: TcpBackend(f"localhost:{server.port}"))
    yield made
    made.close()
    server.close()


def wait_until(
    handler: FtRendezvousHandler, condition: Callable[[RendezvousRecord], bool]
) -> RendezvousRecord:
    """Waits until the handler knows a record for which the condition holds."""
    state = handler.record
    assert state is not None
    while not condition(state):
        newer = handler.board.wait(state.version, TIMEOUT)
        assert newer is not None, f"it never came to that: {state}"
        state = newer
    return state


def freeze(handler: FtRendezvousHandler) -> None:
    """Makes a node silent, as a machine's failure would."""
    assert handler._presence is not None
    handler._presence.heart.stop()
    handler._presence.heart.join(TIMEOUT)


def thaw(handler: FtRendezvousHandler) -> None:
    """Has a frozen node send heartbeats again."""
    presence, settings = handler._presence, handler.settings
    assert presence is not None
    presence.heart = NodeHeart(Executor(presence.node, handler._new_register(), settings))
    presence.heart.start()


def test_a_host_that_may_not_join_stays_until_the_others_know_why() -> None:
    store, joined, ended = FakeStore(RealClock()), threading.Event(), threading.Event()
    settings = RendezvousSettings("job", 2, 2, join_timeout=TIMEOUT)
    others = dataclasses.replace(settings, max_nodes=3)

    def hold(state: RendezvousRecord) -> None:
        joined.set()
        if state.closed:
            ended.wait(0.3)  # until the host has gone too early, if it does

    first = FtRendezvousHandler(settings, Identity("0"), MemoryBackend(store), Board(on_change=hold))
    host = FtRendezvousHandler(others, Identity("1"), MemoryBackend(store, is_host=True))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(first.next_rendezvous)
        try:
            assert joined.wait(TIMEOUT)
            with pytest.raises(RendezvousError, match="nnodes is 2:3 here, but 2:2 there") as refused:
                host.next_rendezvous()
            host.set_closed(str(refused.value))
            assert host.shutdown()
            ended.set()
            assert store.check([goodbye_key("0:0")])
            with pytest.raises(RendezvousClosedError, match="nnodes is 2:3 here, but 2:2 there"):
                waiting.result(TIMEOUT)
        finally:
            first.shutdown()


def test_a_node_that_hears_of_the_end_need_not_tell_it() -> None:
    """The host may be gone, with its store, as soon as all have heard of it."""
    store, ours = FakeStore(RealClock()), threading.Event()
    settings = RendezvousSettings("job", 2, 2, join_timeout=TIMEOUT)
    host = FtRendezvousHandler(settings, Identity("0"), MemoryBackend(store, is_host=True))
    other = FtRendezvousHandler(settings, Identity("1"), MemoryBackend(store))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for joined in [pool.submit(host.next_rendezvous), pool.submit(other.next_rendezvous)]:
            joined.result(TIMEOUT)
        change = other.change

        def change_too_late(close: Any) -> Any:
            ours.set()
            assert released.wait(TIMEOUT)
            return change(close)

        released = threading.Event()
        with mock.patch.object(other, "change", change_too_late):
            ending = pool.submit(other.shutdown)
            assert ours.wait(TIMEOUT)
            try:
                assert host.shutdown()
                assert ending.result(TIMEOUT)
            finally:
                released.set()


@ON_BOTH
def test_each_round_has_a_fresh_store_for_its_workers(nodes: Nodes) -> None:
    a, b = nodes.make("0", 2, 2), nodes.make("1", 2, 2)
    assert (a.use_agent_store, a.get_run_id()) == (True, "job")
    ports = []
    for number in range(3):
        infos = nodes.all_join(a, b)
        assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2)]
        infos[0].store.set("hello", f"from 0 in round {number}")
        assert infos[1].store.get("hello") == f"from 0 in round {number}".encode()
        assert infos[0].bootstrap_store_info == infos[1].bootstrap_store_info
        port = infos[1].bootstrap_store_info.master_port
        workers = TCPStore("localhost", port)
        assert read(workers, "left over") is None
        workers.set("left over", "x")
        assert workers.check(["left over"])
        workers.close()
        ports.append(port)
    assert len(set(ports)) == 3
    state = wait_until(a, lambda state: state.round == 2)
    assert state.restarts == 2


def test_late_node_is_counted_lost_node_is_taken_out_and_comes_back(nodes: Nodes) -> None:
    fast = {"keep_alive_interval": 0.2, "keep_alive_max_attempt": 15}  # 3 s: a busy machine is no fault
    lost: queue.SimpleQueue[tuple[Seat, ...]] = queue.SimpleQueue()
    a = nodes.make("0", 1, 2, on_evicted=lost.put, **fast)
    b = nodes.make("1", 1, 2, nproc=3, **fast)

    def both_meet() -> list[int]:
        """One waits until the other one comes; their ranks."""
        late = nodes.join(b)
        wait_until(a, lambda state: bool(state.waiting))
        assert a.num_nodes_waiting() == 1
        infos = [nodes.join(a), late]
        return sorted(info.result(TIMEOUT).rank for info in infos)

    assert nodes.all_join(a)[0].world_size == 1
    assert both_meet() == [0, 1]
    assert a.num_nodes_waiting() == b.num_nodes_waiting() == 0
    assert a.record is not None and a.record.restarts == 0, "a change of membership is no restart"
    freeze(b)
    wait_until(a, lambda state: len(state.participants) == 1)
    (seat,) = lost.get(timeout=TIMEOUT)
    assert (seat.base_slot, seat.nproc, seat.occupant and seat.occupant.id) == (1, 3, "1")
    wait_until(b, lambda state: len(state.participants) == 1)
    assert b.num_nodes_waiting() == 1, "a node that was taken out has to come again"
    thaw(b)
    assert both_meet() == [0, 1]


def test_same_id_again_supersedes_at_once(nodes: Nodes) -> None:
    a, b = nodes.make("0", 2, 2), nodes.make("1", 2, 2)
    nodes.all_join(a, b)
    again = nodes.make("1", 2, 2)
    coming = nodes.join(again)
    wait_until(b, lambda state: state.find("1").incarnation == 1)
    assert nodes.all_join(a)[0].rank == 0
    assert coming.result(TIMEOUT).rank == 1
    with pytest.raises(RendezvousError, match="node id '1': this agent was superseded"):
        b.next_rendezvous()
    assert b.shutdown()
    assert not a.is_closed(), "a node that is out has ended the others' job"
    assert a.record.restarts == 1


def test_an_index_of_a_scheduler_does_not_supersede_an_agent_that_lives(nodes: Nodes) -> None:
    """A second job step: `srun --overlap … ftrun` counts its processes from 0 again."""
    fast = {"keep_alive_interval": 0.2, "keep_alive_max_attempt": 10, "is_index": True}
    a, b = nodes.make("0", 2, 2, **fast), nodes.make("1", 2, 2, **fast)
    nodes.all_join(a, b)
    again = nodes.make("1", 2, 2, **fast)
    text = "node id '1', from SLURM_PROCID .* to a live agent at localhost: choose another --node-id;"
    with pytest.raises(RendezvousError, match=text):
        nodes.join(again).result(TIMEOUT)
    assert again.shutdown()
    state = a.refresh()
    assert [node.name for node in state.participants] == ["0:0", "1:0"]
    assert (state.closed, state.round, a.num_nodes_waiting()) == (False, 0, 0)


@pytest.mark.parametrize("place", ["another pid namespace", "here, as another process that runs", "unknown"])
def test_an_index_takes_the_place_of_a_silent_agent_and_not_before(
    nodes: Nodes, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fast = {"keep_alive_interval": 0.2, "keep_alive_max_attempt": 10, "is_index": True}
    first = nodes.make("0", 1, 1, **fast)
    nodes.all_join(first)
    assert first.node is not None
    store = first.backend.connect()
    if place == "another pid namespace":  # where that pid is free says nothing
        store.set(process_key("0"), f"0:0 boot pid:[1] {gone_pid()}")
    elif place == "unknown":
        store.delete_key(process_key("0"))
    again = nodes.make("0", 1, 1, **fast)
    coming = nodes.join(again)
    until = time.monotonic() + TIMEOUT
    while "node id 0 is in use: waiting until 0 (localhost) is silent for 2 s" not in caplog.text:
        assert time.monotonic() < until, caplog.text
        time.sleep(0.02)
    assert not coming.done()
    assert first.refresh().nodes == (first.node,)
    freeze(first)
    assert coming.result(TIMEOUT).rank == 0
    assert again.node is not None
    assert again.node.name == "0:1"


def gone_pid() -> int:
    """The pid of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        process.wait(TIMEOUT)
    return process.pid


@pytest.mark.parametrize("how", ["left", "ended here", "closed"])
def test_an_index_whose_agent_is_known_to_be_gone_is_not_waited_for(nodes: Nodes, how: str) -> None:
    """Where it waited it would do so for a minute: longer than the test."""
    fast = {"keep_alive_interval": 60.0, "is_index": True}
    first, other = nodes.make("0", 1, 2, **fast), nodes.make("1", 1, 2, **fast)
    nodes.all_join(first, other)
    if how == "left":
        first.leave()
    elif how == "ended here":
        freeze_now(first)
        store = first.backend.connect()
        here, _, _ = (read(store, process_key("0")) or "").rpartition(" ")
        store.set(process_key("0"), f"{here} {gone_pid()}")
    else:
        other.set_closed("enough")
    again = nodes.make("0", 1, 2, **fast)
    coming = nodes.join(again)
    if how == "closed":
        with pytest.raises(RendezvousClosedError, match="enough"):
            coming.result(TIMEOUT)
        return
    wait_until(other, lambda state: any(one.node.name == "0:1" for one in state.waiting))
    nodes.all_join(other)
    assert coming.result(TIMEOUT).world_size == 2


def freeze_now(handler: FtRendezvousHandler) -> None:
    """As `freeze`, where the next heartbeat is a minute away."""
    assert handler._presence is not None
    handler._presence.heart.stop()


@ON_BOTH
def test_agents_that_are_gone_leave_no_counters(nodes: Nodes) -> None:
    agents = [nodes.make("0", 1, 1, keep_alive_interval=0.05) for _ in range(3)]
    for agent in agents:
        nodes.all_join(agent)
        if agent is not agents[-1]:
            freeze(agent)
    counters = [key for key in nodes.make_backend().connect().list_keys() if "/alive/" in key]
    assert counters in ([], [alive_key("0:2")])


@ON_BOTH
def test_closing_reaches_everyone_and_is_final(nodes: Nodes) -> None:
    a, b, spare, late = (nodes.make(str(number), 2, 2) for number in range(4))
    nodes.all_join(a, b)
    waiting = nodes.join(spare)
    wait_until(a, lambda state: bool(state.spares))
    a.set_closed()
    wait_until(b, lambda state: state.closed)
    assert b.is_closed()
    assert b.num_nodes_waiting() == 0
    with pytest.raises(RendezvousGracefulExitError, match="spare node 2"):
        waiting.result(TIMEOUT)
    for handler in (b, late):
        with pytest.raises(RendezvousClosedError, match="'job' is closed"):
            handler.next_rendezvous()


def test_other_options_are_refused(nodes: Nodes) -> None:
    a, b = nodes.make("0", 1, 2), nodes.make("1", 1, 3)
    nodes.all_join(a)
    with pytest.raises(RendezvousError, match="nnodes is 1:3 here, but 1:2 there"):
        b.next_rendezvous()
    assert b.shutdown()
    assert not a.is_closed()


def test_other_options_are_refused_though_both_come_first(nodes: Nodes) -> None:
    handlers = [nodes.make("0", 2, 2, patience=0.1), nodes.make("1", 2, 3, patience=0.1)]
    both = [nodes.join(handler) for handler in handlers]
    done, waits = concurrent.futures.wait(both, TIMEOUT, concurrent.futures.FIRST_COMPLETED)
    error = done.pop().exception()
    assert error is not None
    assert "nnodes is 2:" in str(error)
    for future in waits:
        handlers[both.index(future)].set_closed()
        with pytest.raises(RendezvousClosedError):
            future.result(TIMEOUT)


def test_garbage_in_the_record_names_the_key(nodes: Nodes) -> None:
    nodes.make_backend().connect().set(RECORD_KEY, "garbage")
    with pytest.raises(RendezvousStateError, match=f"{RECORD_KEY}.*garbage"):
        nodes.make("0", 1, 1).next_rendezvous()


def test_lost_store_is_an_error() -> None:
    server = TCPStoreServer(0)
    backend = TcpBackend(f"localhost:{server.port}", read_timeout=0.5)
    settings = RendezvousSettings("job", 1, 1, keep_alive_interval=0.1, last_call_timeout=0.0)
    handler = FtRendezvousHandler(settings, Identity("0", "localhost"), backend)
    handler.next_rendezvous()
    server.close()
    assert handler._presence is not None
    for thread in (handler._presence.heart, handler._presence.watcher):
        thread.join(TIMEOUT)
    with pytest.raises(RendezvousConnectionError, match="is lost"):
        handler.num_nodes_waiting()
    with pytest.raises(RendezvousConnectionError, match="is lost"):
        handler.next_rendezvous()
    assert not handler.shutdown()


class Interrupted(BaseException):
    """Raised by a signal's handler, as torch's agents have one."""


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Has such a handler; gives what sends the signal to this thread."""
    main = threading.get_ident()

    def handle(signum: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handle)
    yield lambda: signal.pthread_kill(main, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_signal_ends_the_wait_and_the_node_is_gone(nodes: Nodes, interrupt: Callable[[], None]) -> None:
    """The wait is in Python: a handler that raises gets through at once."""

    def noticed(state: RendezvousRecord) -> None:
        if state.participants:
            interrupt()

    alone = nodes.make("0", 2, 2, on_change=noticed, patience=0.1)
    with pytest.raises(Interrupted):
        alone.next_rendezvous()
    assert alone.shutdown()
    infos = nodes.all_join(nodes.make("1", 2, 2), nodes.make("2", 2, 2))
    assert sorted(info.rank for info in infos) == [0, 1]


def test_signal_ends_the_wait_for_the_store_of_the_workers(
    nodes: Nodes, interrupt: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes on waiting for it in vain is not in the way of leaving."""
    wait, opened = backends.call_in_thread, threading.Event()

    def interrupted(function: Callable[[], bool], what: str) -> bool:
        def signalled() -> bool:
            interrupt()
            return function()

        return wait(signalled, what)

    host, other = (
        nodes.make(str(number), 2, 2, keep_alive_interval=TIMEOUT, patience=0.1) for number in range(2)
    )
    at = RendezvousStoreInfo("localhost", 1)
    monkeypatch.setattr(host._workers, "open", lambda *arguments: opened.wait(TIMEOUT) and at)
    monkeypatch.setattr(backends, "call_in_thread", interrupted)
    try:
        hosting = nodes.join(host)
        with pytest.raises(Interrupted):
            other.next_rendezvous()
        other.leave()
        wait_until(host, lambda state: state.complete and len(state.participants) == 1)
    finally:
        opened.set()
    hosting.exception(TIMEOUT)
    backend = nodes.make_backend()
    backends.announce_endpoint(backend.connect(), 0, "localhost:1")  # it comes after all
    for thread in threading.enumerate():
        if thread.name == "ft_wrapper: waiting for the workers' store":
            thread.join(TIMEOUT)
    backend.close()


def test_host_waits_for_the_one_that_closed_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    host = create_handler(parameters_from_url("ft://localhost:0/job?min_nodes=2&max_nodes=2&node_id=0"))
    assert isinstance(host.backend, TcpBackend)
    url = f"ft://localhost:{host.backend.port}/job?min_nodes=2&max_nodes=2&node_id=1&is_host=false"
    other = create_handler(parameters_from_url(url))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for joined in [pool.submit(host.next_rendezvous), pool.submit(other.next_rendezvous)]:
            joined.result(TIMEOUT)
    assert other.shutdown()
    assert host.shutdown()
    assert "not all nodes" not in caplog.text


def test_the_handler_on_etcd_by_a_url(etcd: EtcdServer, prefix: str) -> None:
    handler = EtcdRendezvousHandler(
        f"etcd://{etcd.endpoints}/job?min_workers=1&max_workers=1&etcd_prefix={prefix}"
    )
    assert (handler.get_backend(), handler.get_run_id()) == ("etcd", "job")
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    assert handler.shutdown()


def test_a_url_of_another_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="must begin with etcd://"):
        EtcdRendezvousHandler("ft://localhost:1/job?min_workers=1&max_workers=1")


def test_a_member_of_etcd_on_this_node_does_not_make_it_the_only_one(etcd: EtcdServer, prefix: str) -> None:
    for endpoints, is_only_one in ((etcd.endpoints, True), (f"{etcd.endpoints},elsewhere:2379", False)):
        with contextlib.closing(EtcdBackend(EtcdAddress(endpoints, prefix))) as backend:
            assert (backend.local_address() == "localhost") is is_only_one
            backend.leave("the only one", [])


def test_an_error_in_one_close_skips_no_other() -> None:
    backend, opened = MemoryBackend(FakeStore(RealClock())), mock.Mock()
    with (
        mock.patch.object(backends.WorkerStores, "close", side_effect=OSError("another")),
        mock.patch.object(backend, "close") as closed,
    ):
        handler = FtRendezvousHandler(RendezvousSettings("job", 1, 1), Identity("0"), backend)
        presence = handler.begin()
        handler._opened.callback(opened)
        end = presence.end

        def fail(patience: float) -> None:
            end(patience)
            raise OSError("a mistake")

        with mock.patch.object(presence, "end", fail), pytest.raises(OSError, match="another"):
            handler.leave()
    opened.assert_called_once()
    closed.assert_called_once()
