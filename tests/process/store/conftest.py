"""Stores of every kind, and what a test needs beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_helpers import Make, Relay
from store_helpers import Proxy
from store_jobs import Script
from support.store_kinds import REAL, TIMEOUT, real_store

from ft_wrapper.protocol import Agreement
from ft_wrapper.store import EtcdStore, FileStore, PrefixStore, StoreMixin, TCPStoreServer
from ft_wrapper.testing import EtcdServer, FakeStore

KINDS = ["fake", "tcp", "file", "etcd", "prefix over fake"]


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path, etcd_if_any: object) -> Iterator[StoreMixin]:
    """A store of each kind."""
    kind = request.param.removeprefix("prefix over ")
    with contextlib.ExitStack() as exits:
        inner: StoreMixin
        if kind in REAL:
            inner = exits.enter_context(real_store(kind, request))()
        elif kind == "file":
            inner = FileStore(str(tmp_path / "store"), timeout=TIMEOUT)
        else:
            inner = FakeStore(timeout=TIMEOUT)
        yield inner if request.param == kind else PrefixStore(5, inner)


@pytest.fixture
def job() -> Agreement:
    """A job in memory. What its store has to do is in test_operations.py and test_steps.py."""
    return Agreement(FakeStore(Script()))


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A TCPStore server behind a proxy."""
    server = TCPStoreServer(0)
    made = Proxy(server.port)
    yield made
    made.close()
    server.close()


@pytest.fixture
def relay(etcd: EtcdServer) -> Iterator[Relay]:
    """A way to etcd that notes requests, and loses and holds back what a test says."""
    made = Relay(etcd.endpoints)
    yield made
    made.close()


@pytest.fixture
def make(prefix: str) -> Iterator[Make]:
    """Makes stores of one job, which are closed at the end."""
    made: list[EtcdStore] = []

    def make_one(endpoints: str, **arguments: object) -> EtcdStore:
        made.append(EtcdStore(endpoints, **{"prefix": prefix, "timeout": TIMEOUT, **arguments}))  # type: ignore[arg-type]
        return made[-1]

    yield make_one
    for store in made:
        store.close()


@pytest.fixture
def cluster() -> Iterator[EtcdServer]:
    """Three members of the test's own."""
    with EtcdServer(3) as server:
        yield server
