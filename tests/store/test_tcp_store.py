"""TCPStore when the network or the server fails: it tries again, or says what is lost. Never hangs."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta

import pytest
from store_helpers import Background, Proxy

from ft_wrapper.exception import StoreError
from ft_wrapper.store import TCPStore, TCPStoreServer

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


@pytest.mark.parametrize("what", OPERATIONS)
def test_connection_cut_and_server_alive(proxy: Proxy, what: str) -> None:
    store = TCPStore("localhost", proxy.port, timeout=LONG)
    store.set("k", "v")
    store.get("k")
    assert proxy.cut() == 1
    OPERATIONS[what](store)
    assert store.add("alive", 1) == 1
    store.close()


def test_nothing_written_before_a_cut_is_lost(proxy: Proxy) -> None:
    """TCPStore answers neither set nor append: the first one after a cut goes nowhere, and nobody is told."""
    store = TCPStore("localhost", proxy.port, timeout=LONG)
    store.set("before", "1")
    store.get("before")
    proxy.cut()
    store.append("log", "one\n")
    store.append("log", "two\n")
    store.set("key", "value")
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.add("count", 1) == 1
    assert set(store.log_read("log")) == {"one", "two"}
    assert store.multi_get(["key", "a", "b"]) == [b"value", b"1", b"2"]
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


@pytest.mark.parametrize("what", OPERATIONS)
def test_lost_server(what: str) -> None:
    server = TCPStoreServer(0)
    store = TCPStore("localhost", server.port, timeout=SHORT)
    store.set("k", "v")
    store.get("k")
    server.close()

    def twice() -> None:  # the first write after the loss may seem to succeed
        OPERATIONS[what](store)
        OPERATIONS[what](store)

    with pytest.raises(StoreError) as caught:
        Background(twice).join()
    assert f"localhost:{server.port}" in str(caught.value)
    assert what in str(caught.value)
    store.close()


def test_patience_counts_also_where_connections_are_made_and_lost_at_once(proxy: Proxy) -> None:
    """As to a server that is ending: torch's client would try again by itself, twice its timeout long."""
    store = TCPStore("localhost", proxy.port, timeout=timedelta(hours=1))
    store.add("n", 1)
    store.set_patience(0.5)
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
    with pytest.raises(StoreError, match=rf"localhost:{server.port}.*came back without its contents"):
        Background(lambda: store.add("n", 1)).join()
    store.close()
    again.close()


def test_nobody_listens() -> None:
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(StoreError, match=rf"localhost:{port} cannot be reached within 0.3 s"):
        Background(lambda: TCPStore("localhost", port, timeout=timedelta(seconds=0.3))).join()


def test_host_that_does_not_exist() -> None:
    with pytest.raises(StoreError, match=r"no-such-host\.invalid:1234"):
        Background(lambda: TCPStore("no-such-host.invalid", 1234, timeout=timedelta(seconds=0.3))).join()


def test_somebody_else_listens() -> None:
    with socket.create_server(("localhost", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(StoreError, match=f"localhost:{port}"):
            Background(lambda: TCPStore("localhost", port, timeout=SHORT)).join()


def test_port_in_use() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StoreError, match=f"port {port} cannot be used.*MASTER_PORT"):
            TCPStoreServer(port)


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
