"""The stores of iterations whose rank 0 a rank is: opened ahead, known to it without asking, ended late."""

from __future__ import annotations

import contextlib
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
def told() -> queue.SimpleQueue[int]:
    return queue.SimpleQueue()


@pytest.fixture
def stores(told: queue.SimpleQueue[int]) -> Iterator[IterationStores]:
    with contextlib.closing(IterationStores(told.put)) as stores:
        yield stores


def test_next_one_is_open_before_it_is_asked_for(
    stores: IterationStores, told: queue.SimpleQueue[int]
) -> None:
    first = stores.next_port(HOST)
    assert told.get(timeout=TIMEOUT) == first
    second = told.get(timeout=TIMEOUT)
    assert second != first
    socket.create_connection((HOST, second), TIMEOUT).close()
    assert stores.next_port(HOST) == second


def test_asked_for_again_at_once(
    stores: IterationStores, told: queue.SimpleQueue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it does not wait until the ranks are back."""
    monkeypatch.setattr(watch, "RESTART", 10 * TIMEOUT)
    ports = [stores.next_port(HOST) for _ in range(5)]
    assert ports == [told.get(timeout=TIMEOUT) for _ in range(5)]
    assert len(set(ports[-2:])) == 2


def test_last_one_serves_until_the_ranks_are_back(
    stores: IterationStores, told: queue.SimpleQueue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clients may not have left it yet."""
    first = stores.next_port(HOST)
    assert {told.get(timeout=TIMEOUT), second := told.get(timeout=TIMEOUT)} > {first}
    monkeypatch.setattr(watch, "RESTART", 10 * TIMEOUT)
    with socket.create_connection((HOST, first), TIMEOUT) as client:
        assert stores.next_port(HOST) == second
        socket.create_connection((HOST, first), TIMEOUT).close()
        client.settimeout(TIMEOUT)
        stores.close()  # waits for what it has begun
        assert client.recv(1) == b""


def test_one_that_could_not_be_opened_ahead_is_tried_again(
    stores: IterationStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was missing then may be there now: no restart fails for it."""
    has_failed, serve, calls = threading.Event(), watch.serve, list[Any]()

    def serve_once(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            return serve(*args)
        has_failed.set()
        raise OSError("no descriptors")

    with monkeypatch.context() as patched:
        patched.setattr(watch, "serve", serve_once)
        first = stores.next_port(HOST)
        assert has_failed.wait(TIMEOUT)
    assert stores.next_port(HOST) not in (0, first)


def test_one_that_cannot_be_opened(stores: IterationStores, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no descriptors")

    with monkeypatch.context() as patched:
        patched.setattr(watch, "serve", fail)
        with pytest.raises(OSError, match="no descriptors"):
            stores.next_port(HOST)
    assert stores.next_port(HOST) > 0
