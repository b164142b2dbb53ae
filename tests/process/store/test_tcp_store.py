"""TCPStore when the network or the server fails: it tries again, or says what is lost. Never hangs."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import queue
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psutil
import pytest
from store_helpers import Background, Proxy

from ft_wrapper.exception import StoreError
from ft_wrapper.protocol.operations import read_log
from ft_wrapper.store import TCPStore, TCPStoreServer, tcp
from ft_wrapper.store.bounded import call_in_thread
from ft_wrapper.store.plan import plan_store
from ft_wrapper.store.tcp import wait_for_port

SHORT = timedelta(seconds=1)
LONG = timedelta(seconds=20)

OPERATIONS: dict[str, Callable[[TCPStore], object]] = {
    "set k": lambda store: store.set("k", "v"),
    "get k": lambda store: store.get("k"),
    "add n": lambda store: store.add("n", 1),
    "append log": lambda store: store.append("log", "x"),
    "compare_set c": lambda store: store.compare_set("c", "", "v"),
    "wait": lambda store: store.wait(["k"], LONG),
    "check": lambda store: store.check(["k"]),
    "delete_key k": lambda store: store.delete_key("k"),
    "multi_get": lambda store: store.multi_get(["k"]),
    "num_keys": lambda store: store.num_keys(),
}


def test_connection_cut_and_server_alive(proxy: Proxy) -> None:
    store = TCPStore("localhost", proxy.port, timeout=LONG)
    for number, operation in enumerate(OPERATIONS.values(), 1):
        store.set("k", "v")
        store.get("k")
        assert proxy.cut() == 1
        operation(store)
        assert store.add("alive", 1) == number
    store.close()


def test_nothing_written_before_a_cut_is_lost(proxy: Proxy) -> None:
    """TCPStore answers neither set nor append: the first one after a cut goes nowhere, and no one is told."""
    store = TCPStore("localhost", proxy.port, timeout=LONG)
    store.set("before", "1")
    store.get("before")
    proxy.cut()
    store.append("log", "one\n")
    store.append("log", "two\n")
    store.set("key", "value")
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.add("count", 1) == 1
    assert set(read_log(store, "log")) == {"one", "two"}
    assert store.multi_get(["key", "a", "b"]) == [b"value", b"1", b"2"]
    store.close()


def test_a_timeout_that_is_set_is_no_answer(proxy: Proxy) -> None:
    """The client does so without the server, which may not have carried out yet what came before."""
    store = TCPStore("localhost", proxy.port, timeout=LONG)
    store.check(["k"])
    proxy.cut()
    store.set("k", "v")
    store.set_timeout(SHORT)
    assert store.check(["k"])
    store.close()


def test_wait_survives_a_cut(proxy: Proxy) -> None:
    store = TCPStore("localhost", proxy.port, timeout=LONG)
    waiter = store.clone()
    waiter.add("here", 1)
    waiting = Background(lambda: waiter.get("late"))
    proxy.cut()
    store.set("late", "1")  # goes nowhere at first
    store.add("sure", 1)
    assert waiting.join() == b"1"
    waiter.close()
    store.close()


def test_lost_server() -> None:
    server = TCPStoreServer(0)
    stores = {what: TCPStore("localhost", server.port, timeout=SHORT) for what in OPERATIONS}
    for store in stores.values():
        store.set("k", "v")
        store.get("k")
    server.close()

    def twice(what: str) -> None:  # the first write after the loss may seem to succeed
        OPERATIONS[what](stores[what])
        OPERATIONS[what](stores[what])

    calls = {what: Background(functools.partial(twice, what)) for what in OPERATIONS}
    for what, call in calls.items():
        with pytest.raises(StoreError) as caught:
            call.join()
        assert f"localhost:{server.port}" in str(caught.value)
        assert what in str(caught.value)
        stores[what].close()


def test_a_loss_is_waited_for_once_by_a_client_and_its_clones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = TCPStoreServer()
    client = TCPStore("localhost", server.port, timeout=timedelta(seconds=10))
    clone = client.clone()
    client.patience = 0.5
    clone.patience = 1e6
    server.close()
    waiting = Background(lambda: clone.add("n", 1))  # until the other one gives up
    with pytest.raises(StoreError, match=r"add n failed for 0\.5 s"):
        Background(lambda: client.add("n", 1)).join()
    with pytest.raises(StoreError, match=r"add n failed for 0\.5 s"):
        waiting.join()
    caplog.clear()
    for store in (client, clone):
        for operation in OPERATIONS.values():
            with contextlib.suppress(StoreError):
                Background(lambda operation=operation, store=store: operation(store)).join()
        with pytest.raises(StoreError, match=r"add n failed for 0\.5 s"):
            store.add("n", 1)
    assert not [record for record in caplog.records if "trying again" in record.getMessage()]


def test_a_store_that_was_lost_for_a_time_is_found_again(proxy: Proxy) -> None:
    client = TCPStore("localhost", proxy.port, timeout=LONG)
    client.set("k", "v")
    client.check(["k"])
    client._losses.append("lost")
    proxy.cut()
    assert client.get("k") == b"v"


def test_patience_counts_also_where_connections_are_made_and_lost_at_once(proxy: Proxy) -> None:
    """As to a server that is ending: torch's client would try again by itself, twice its timeout long."""
    store = TCPStore("localhost", proxy.port, timeout=timedelta(hours=1))
    store.add("n", 1)
    store.patience = 0.5
    proxy.refuse()
    with pytest.raises(StoreError, match=f"localhost:{proxy.port} is lost: add n failed for 0.5 s"):
        Background(lambda: store.add("n", 1)).join()
    store.close()


def test_server_that_comes_back_empty() -> None:
    server = TCPStoreServer(0)
    store = TCPStore("localhost", server.port, timeout=LONG)
    store.set("k", "v")
    store.get("k")
    server.close()
    again = TCPStoreServer(server.port)
    for act in (store.clone, lambda: store.add("n", 1)):
        with pytest.raises(StoreError, match=rf"localhost:{server.port}.*came back without its contents"):
            Background(act).join()
    store.close()
    again.close()


def test_a_clone_of_a_lost_store_waits_as_long_as_any_operation() -> None:
    """Where torch's own waits for the timeout of operations."""
    server = TCPStoreServer()
    store = TCPStore("localhost", server.port, timeout=timedelta(hours=1))
    store.patience = 0.5
    server.close()
    with pytest.raises(StoreError, match=f"{server.port} is lost: another connection failed for 0.5 s"):
        Background(store.clone).join()
    store.close()


def test_clones_no_longer_try_to_connect_once_the_store_is_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = TCPStoreServer()
    store = TCPStore("localhost", server.port, timeout=timedelta(hours=1))
    clone = store.clone()
    server.close()
    begun = queue.SimpleQueue[object]()

    def note_and_wait(*where: Any) -> None:
        begun.put(where)
        wait_for_port(*where)

    monkeypatch.setattr(tcp, "wait_for_port", note_and_wait)
    trying = [Background(store.clone), Background(lambda: clone.add("n", 1))]
    for _ in trying:
        begun.get(timeout=20)
    store.close()
    for each in trying:
        with pytest.raises(StoreError, match=f"localhost:{server.port}"):
            each.join()
    clone.close()
    caplog.clear()  # what it keeps holds connections


def test_nobody_listens() -> None:
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(StoreError, match=rf"localhost:{port} cannot be reached within 0.3 s"):
        Background(lambda: TCPStore("localhost", port, timeout=timedelta(seconds=0.3))).join()


def test_host_that_does_not_exist() -> None:
    with pytest.raises(StoreError, match=r"no-such-host\.invalid:1234"):
        Background(lambda: TCPStore("no-such-host.invalid", 1234, timeout=timedelta(seconds=0.3))).join()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_server_listens_on_the_loopback_only_if_it_is_published_there(host: str) -> None:
    before = listening()
    server = TCPStoreServer(0, host)
    try:
        client = TCPStore(host, server.port, timeout=timedelta(seconds=10))
        assert listening() - before == {("127.0.0.1", server.port)}
        client.close()
    finally:
        server.close()


def listening() -> set[tuple[str, int]]:
    """Where this process listens."""
    found = psutil.Process().net_connections("inet")
    return {tuple(one.laddr) for one in found if one.status == psutil.CONN_LISTEN}


def test_server_on_a_host_whose_name_is_not_known() -> None:
    with pytest.raises(
        StoreError, match=r"hosted at no-such-host\.invalid:0: .*; see whether the name leads to this host"
    ):
        TCPStoreServer(0, "no-such-host.invalid")


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
def test_server_on_a_host_that_is_another_one_is_there_at_once(host: str) -> None:
    """Its address may be a proxy's. Its own client took that way, too, and waited for five minutes."""
    server = call_in_thread(lambda: TCPStoreServer(0, host), "opening the server", 20)
    with contextlib.closing(server):
        is_v6 = ":" in host
        client = TCPStore("::1" if is_v6 else "127.0.0.1", server.port, timeout=timedelta(seconds=10))
        client.close()


def test_no_descriptors_left_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(StoreError, match=r"localhost:1 can be made: .*Too many open files; raise the limit"):
        Background(lambda: TCPStore("localhost", 1, timeout=timedelta(days=1))).join()


def test_no_descriptors_for_a_server_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = len(os.listdir("/proc/self/fd")) + 4
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    with pytest.raises(StoreError, match=r"Too many open files: .* may have \d+; raise the hard limit"):
        TCPStoreServer(0, "127.0.0.1")


def test_port_in_use() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StoreError, match=f"localhost:{port}: .*in use.*MASTER_PORT"):
            TCPStoreServer(port)


def test_the_port_is_free_once_a_connection_to_the_server_ends() -> None:
    """The next call's host waits for that end, and takes the port."""
    for _ in range(5):
        server = TCPStoreServer(0, "127.0.0.1")
        port = server.port

        def take(line: socket.socket, port: int = port) -> None:
            assert line.recv(1) == b""
            TCPStoreServer(port, "127.0.0.1").close()

        with contextlib.ExitStack() as lines:
            connected = [
                lines.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30.0))
                for _ in range(20)
            ]
            waiting = Background(lambda connected=connected: take(connected[0]))
            server.close()
            waiting.join()


def test_client_may_come_before_the_server() -> None:
    with socket.create_server(("localhost", 0)) as chosen:
        port = chosen.getsockname()[1]
    coming = Background(lambda: TCPStore("localhost", port, timeout=LONG))
    server = TCPStoreServer(port)
    store = coming.join()
    assert store.add("n", 1) == 1
    store.close()
    server.close()


def test_namespaces_keep_jobs_apart() -> None:
    server = TCPStoreServer(0)
    one = TCPStore("localhost", server.port, timeout=LONG, namespace="one/")
    two = TCPStore("localhost", server.port, timeout=LONG, namespace="two/")
    one.set("k", "1")
    assert one.get("k") == b"1" and not two.check(["k"])
    assert not two.clone().check(["k"]) and one.clone().check(["k"])
    for store in (one, two):
        store.close()
    server.close()


@pytest.mark.parametrize(
    "environment, name",
    [
        ({"MASTER_PORT": "1234"}, "MASTER_ADDR"),
        ({"MASTER_ADDR": "localhost"}, "MASTER_PORT"),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "x"}, "MASTER_PORT='x'"),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "65535"}, "MASTER_PORT='65535'"),
    ],
)
def test_address_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], name: str
) -> None:
    for variable in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=name):
        TCPStore(timeout=SHORT)


@pytest.mark.parametrize("port", [0, -1, 65536, "80"])
def test_port_out_of_range(port: int) -> None:
    with pytest.raises(ValueError, match="port="):
        TCPStore("localhost", port, timeout=SHORT)


@pytest.mark.parametrize(("by_rank", "namespace"), [(True, "job/"), (False, "")])
def test_client_knows_whether_a_rank_hosts_the_store(by_rank: bool, namespace: str) -> None:
    server = TCPStoreServer(0, "127.0.0.1", by_rank=by_rank)
    arguments = {"host_name": "127.0.0.1", "port": server.port, "namespace": namespace}
    plan = plan_store(TCPStore, arguments, LONG)
    store = plan.connect()
    try:
        assert plan.port is not None and plan.chosen
        assert plan.is_hosted_by_rank(store) is by_rank
    finally:
        store.close()
        server.close()


def test_plan_says_whether_its_address_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    derived = plan_store(TCPStore, {"timeout": LONG}, LONG)
    monkeypatch.setenv("FT_WRAPPER_STORE", "127.0.0.1:29501")
    announced = plan_store(TCPStore, None, LONG)
    assert derived.port is not None and not derived.chosen
    assert announced.port is None and not announced.chosen


# The limit of open files

HOST_WITH_FEW_FILES = """
import os, resource, sys
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
from ft_wrapper.store import TCPStoreServer
server = TCPStoreServer(0, "127.0.0.1")
print(server.port, flush=True)
sys.stdin.read()  # until the test is through with it
child = os.fork()
if child == 0:
    print(*resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
    os._exit(0)
os.waitpid(child, 0)
server.close()
"""


@contextlib.contextmanager
def hosting(
    code: str, environment: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that hosts a store until it is told to end; and its port."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, **pipes) as host:
        try:
            assert host.stdout is not None
            yield host, int(host.stdout.readline())
        finally:
            host.kill()


@pytest.mark.nightly("it opens some thousand connections")
def test_store_carries_more_ranks_than_the_soft_limit_of_open_files_has_room_for() -> None:
    """40 ranks' connections, where 64 files are allowed; a process that the host forks has the 64 again."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 512:
        pytest.skip(f"this process may open {hard} files")
    with hosting(HOST_WITH_FEW_FILES) as (host, port), contextlib.ExitStack() as owned:
        for rank in range(40):
            client = TCPStore("127.0.0.1", port, timeout=LONG)
            owned.callback(client.close)
            assert client.add("ranks", 1) == rank + 1
            for _ in range(3):
                clone = client.clone()
                owned.callback(clone.close)
                assert clone.add("ranks", 0) == rank + 1
        out, _ = host.communicate(timeout=60.0)
    assert out.split() == ["64", str(hard)]


# What torch's C++ code prints

QUIET_HOST = """
import sys
from ft_wrapper.store import TCPStoreServer
server = TCPStoreServer(0, "127.0.0.1")
print(server.port, flush=True)
sys.stdin.read()
server.close()
"""


ENDS_CONNECTION = (1, 1 << 62)


@pytest.mark.parametrize(
    ("level", "requests"),
    [
        ("", [*itertools.product(range(20), (1 << 31, 1 << 62)), ENDS_CONNECTION]),
        pytest.param("INFO", [ENDS_CONNECTION], marks=pytest.mark.nightly("without a wish always")),
    ],
)
def test_nonsense_costs_no_stack_trace_unless_the_user_wants_it(
    level: str, requests: list[tuple[int, int]]
) -> None:
    """A trace takes 8 ms, in which the server answers no one: 1,000 strangers stopped a job for 8 s."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    if level:
        environment["TORCH_CPP_LOG_LEVEL"] = level
    with hosting(QUIET_HOST, environment) as (host, port):
        for query, length in requests:
            with socket.create_connection(("127.0.0.1", port), 60.0) as stranger:
                stranger.sendall(struct.pack("<BIBQ", 0, 0x3C85F7CE, query, length))  # a hello, and a request
                if (query, length) == ENDS_CONNECTION:
                    with contextlib.suppress(ConnectionResetError):
                        assert stranger.recv(1) == b""
        _, said = host.communicate(timeout=LONG.total_seconds())
    assert bool(said) == bool(level), said


@pytest.mark.parametrize("held", [b"\xff\xfe", b"-"])
def test_a_counter_that_holds_no_number_is_named(held: bytes) -> None:
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(contextlib.closing(TCPStoreServer(0)))
        store = opened.enter_context(contextlib.closing(TCPStore("localhost", server.port)))
        assert (store.add("count", 2), store.add("count", -5), store.add("count", 0)) == (2, -3, -3)
        store.set("count", held)
        with pytest.raises(StoreError, match=r"store key 'count' holds .*, where a number belongs"):
            store.add("count", 1)
        store.set("count", "-7")
        assert store.add("count", 1) == -6
