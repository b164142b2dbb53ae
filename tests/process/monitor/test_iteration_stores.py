"""The stores of iterations whose rank 0 a rank is: opened ahead, ended late."""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ft_wrapper.monitor import watch
from ft_wrapper.monitor.watch import IterationStores

HOST = "127.0.0.1"
TIMEOUT = 30.0


@pytest.fixture
def stores() -> Iterator[IterationStores]:
    with contextlib.closing(IterationStores([])) as stores:
        yield stores


def is_open(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), TIMEOUT).close()
    except ConnectionRefusedError:
        return False
    return True


def fail(*_: Any) -> None:
    raise OSError("no descriptors")


def test_next_one_is_open_before_it_is_asked_for(
    stores: IterationStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: queue.SimpleQueue[int] = queue.SimpleQueue()
    open_server = watch.serve

    def serve(*args: Any) -> Any:
        server = open_server(*args)
        opened.put(server.port)
        return server

    monkeypatch.setattr(watch, "serve", serve)
    assert stores.due_in() == math.inf
    first = stores.next_port(HOST)
    assert opened.get(timeout=TIMEOUT) == first
    assert 0.0 < stores.due_in() <= watch.RESTART
    stores.open_ahead()
    assert stores.due_in() == math.inf
    second = opened.get(timeout=TIMEOUT)
    assert second != first and is_open(second)
    assert stores.next_port(HOST) == second


def test_asked_for_again_at_once(stores: IterationStores) -> None:
    ports = [stores.next_port(HOST) for _ in range(5)]
    assert len(set(ports)) == 5
    assert [is_open(port) for port in ports] == [False, False, False, True, True]


def test_last_one_serves_until_the_ranks_are_back(stores: IterationStores) -> None:
    """Its clients may not have left it yet."""
    first = stores.next_port(HOST)
    with socket.create_connection((HOST, first), TIMEOUT) as client:
        second = stores.next_port(HOST)
        assert is_open(first)
        client.settimeout(TIMEOUT)
        stores.open_ahead()
        assert client.recv(1) == b""
    assert is_open(second)


def test_one_that_could_not_be_opened_ahead_is_tried_again(
    stores: IterationStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was missing then may be there now: no restart fails for it."""
    has_failed = threading.Event()

    def fail_ahead(*_: Any) -> None:
        has_failed.set()
        raise RuntimeError("no descriptors")

    first = stores.next_port(HOST)
    with monkeypatch.context() as patched:
        patched.setattr(watch, "serve", fail_ahead)
        stores.open_ahead()
        assert has_failed.wait(TIMEOUT)
    assert is_open(first)
    assert is_open(stores.next_port(HOST))


def test_one_that_cannot_be_opened(stores: IterationStores, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(watch, "serve", fail)
        with pytest.raises(OSError, match="no descriptors"):
            stores.next_port(HOST)
    assert stores.next_port(HOST) > 0


def test_close_ends_them(stores: IterationStores) -> None:
    ports = [stores.next_port(HOST) for _ in range(2)]
    stores.close()
    assert not any(is_open(port) for port in ports) and stores.due_in() == math.inf
