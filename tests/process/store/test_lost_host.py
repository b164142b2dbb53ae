"""The host of a TCPStore loses its power: no FIN and no RST comes, and nothing is acknowledged any more."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import cast

import pytest
from silent_host import SilentHost, silent_host
from store_helpers import Background
from test_tcp_store import OPERATIONS

from ft_wrapper.agent.job_in_store import JobInStore
from ft_wrapper.agent.signals import Signalled, queued
from ft_wrapper.exception import StoreError
from ft_wrapper.protocol.operations import Operations
from ft_wrapper.store import TCPStore, tcp

PATIENCE = timedelta(seconds=4)
LONG = timedelta(seconds=1000)
_numbers = itertools.count()
LOST = (
    r"store at localhost:\d+ is lost: its host localhost was silent for 2 s; see whether that machine is up"
)


@pytest.fixture(scope="module")
def only_host() -> Iterator[SilentHost]:
    """The host of all tests."""
    with silent_host() as host:
        yield host


@pytest.fixture
def host(only_host: SilentHost, monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentHost]:
    """A host whose silence is noticed after a second."""
    monkeypatch.setattr(tcp, "_SILENCE", 1.0)
    yield only_host
    only_host.go_on()
    only_host.come_back()


Connect = Callable[..., TCPStore]


@pytest.fixture
def connect(host: SilentHost) -> Iterator[Connect]:
    """Makes clients that find no keys of other tests; they are closed in the end."""
    made = list[TCPStore]()

    def connect(timeout: timedelta = PATIENCE) -> TCPStore:
        made.append(TCPStore("localhost", host.port, timeout=timeout, namespace=f"{next(_numbers)}/"))
        return made[-1]

    yield connect
    for client in made:
        client.close()


def test_no_call_outlasts_the_host(host: SilentHost, connect: Connect) -> None:
    """Each kind of operation is in a client of its own, all at once. Of a lost server all are tried."""

    def twice(store: TCPStore, operation: Callable[[TCPStore], object]) -> None:
        operation(store)  # what is not answered may seem to succeed
        store.add("n", 1)

    operations = [OPERATIONS[what] for what in ("set k", "add n", "wait")]
    stores = [connect() for _ in operations]
    for store in stores:
        store.set("k", "v")
        store.get("k")
    host.lose_power()
    calls = [Background(functools.partial(twice, *each)) for each in zip(stores, operations, strict=True)]
    for call in calls:
        with pytest.raises(StoreError, match=LOST):
            call.join()


WAITS: dict[str, Callable[[TCPStore], object]] = {
    "wait": lambda store: store.wait(["never"], LONG),
    "get": lambda store: store.get("never"),
    "wait_for": lambda store: store.wait_for("never", LONG.total_seconds()),
    "torch's own": lambda store: store.torch_store.wait(["never"], LONG),
}


def test_a_wait_that_is_out_ends_with_the_host(host: SilentHost, connect: Connect) -> None:
    """It may be out for as long as it likes while the host lives."""
    waiting = {}
    for what, wait in WAITS.items():
        store = connect()
        store.set_timeout(LONG)
        waiter = store.clone()
        waiting[what] = waiter, Background(functools.partial(wait, waiter))
        store.add("n", 1)
    host.lose_power()
    for what, (waiter, call) in waiting.items():
        error = "timed out" if what == "torch's own" else LOST
        with pytest.raises((StoreError, RuntimeError), match=error):
            call.join()
        waiter.close()


def test_no_connection_is_made_to_a_lost_host(host: SilentHost, connect: Connect) -> None:
    brief = timedelta(seconds=1)
    store = connect(brief)
    host.lose_power()
    for again in (store.clone, lambda: connect(brief)):
        with pytest.raises(StoreError, match=f"localhost:{host.port}"):
            Background(again).join()


def test_a_server_that_is_stopped_while_a_connection_is_made(host: SilentHost, connect: Connect) -> None:
    """The kernel there has accepted it; torch's client waits for the server's first answer for ever."""
    host.stop()
    connecting = Background(lambda: connect(timedelta(seconds=1)))
    with pytest.raises(StoreError, match=r"no TCPStore answers .* whether that process is stopped"):
        connecting.join()


def test_a_server_that_is_stopped_is_waited_for(host: SilentHost, connect: Connect) -> None:
    """For longer than its host may be silent: it does acknowledge."""
    store = connect()
    waiter = store.clone()
    host.stop()
    calls = [Background(lambda: store.add("n", 1)), Background(lambda: waiter.get("late"))]
    threading.Event().wait(3 * tcp._SILENCE)  # this is what is tried, nothing is waited for
    host.go_on()
    assert calls[0].join() == 1
    store.set("late", "1")
    assert calls[1].join() == b"1"
    waiter.close()


def test_a_host_that_is_back_in_time_is_found_again(
    host: SilentHost, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = connect(timedelta(seconds=100))
    store.add("n", 1)
    host.lose_power()
    connect_again, seen = TCPStore._open, threading.Event()

    def note(*arguments: object) -> object:
        seen.set()
        return connect_again(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(TCPStore, "_open", note)
    adding = Background(lambda: store.add("n", 1))
    assert seen.wait(60.0)
    host.come_back()
    assert adding.join() in (2, 3)  # it may have been carried out, and its answer been lost


def test_two_threads_of_one_client_forget_nothing_that_was_told(connect: Connect) -> None:
    """An answer says nothing of what another thread has told after the question; see ``_unanswered``."""
    store = connect(LONG)
    is_out, is_told = threading.Event(), threading.Event()

    class Client:
        def add(self, key: str, amount: int) -> int:
            is_out.set()
            is_told.wait(0.2)  # in vain, where one thread waits for the other
            return amount

        def set(self, key: str, value: str) -> None: ...

    store._store = cast(Operations, Client())
    asking = Background(lambda: store.add("n", 1))
    assert is_out.wait(60.0)
    store.set("k", "v")
    is_told.set()
    asking.join()
    assert store._unanswered == [("set", (f"{store.namespace}k", "v"))]


# Signals -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stopped(host: SilentHost) -> Iterator[None]:
    """The server is stopped. It goes on after a minute: a call that hears no signal would be out for ever."""
    has_gone_on = threading.Event()

    def go_on() -> None:
        host.go_on()
        has_gone_on.set()

    timer = threading.Timer(60.0, go_on)
    host.stop()
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        host.go_on()
    assert not has_gone_on.is_set(), "the signal was held up"


def test_a_signal_is_not_held_up_by_a_call_that_is_out(host: SilentHost, connect: Connect) -> None:
    store = connect(LONG)
    store.hears_signals = True
    for client in (store, store.clone()):
        signalling = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
        with stopped(host), queued((signal.SIGTERM,)) as signals, pytest.raises(Signalled), signals.raised():
            signalling.start()
            client.add("n", 1)
        signalling.join()
        client.add("n", 1)
    client.close()


def test_a_question_about_the_job_is_given_up_at_a_signal(host: SilentHost, connect: Connect) -> None:
    """At one that comes while the question is out, and at one that nobody has read yet."""
    signalling = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    with queued((signal.SIGTERM,)) as signals:
        job = JobInStore(f"localhost:{host.port}", lambda: False, signals.interruptible)
        with stopped(host):
            signalling.start()
            assert not job.facts_of(0, 7).formed
            assert job.outcome().finished is None
            assert signal.SIGTERM in signals.read()  # who waits for signals gets it
            assert job.outcome().finished is None  # and waits no longer than a second for the next answer
        signalling.join()
        job.facts_of(0, 7)  # all that was asked is answered
        job.close()
