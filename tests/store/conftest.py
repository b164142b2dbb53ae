"""Stores of every kind, and what a test needs beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from store_helpers import Proxy

from ft_wrapper.store import EtcdStore, FileStore, PrefixStore, StoreMixin, TCPStore, TCPStoreServer
from ft_wrapper.testing import FakeStore

KINDS = ["fake", "fake without libuv", "tcp", "file", "etcd"]
TIMEOUT = timedelta(seconds=20)


@pytest.fixture(params=[*KINDS, *(f"prefix over {kind}" for kind in KINDS)])
def store(request: pytest.FixtureRequest, tmp_path: Path, etcd_if_any: object) -> Iterator[StoreMixin]:
    """A store of each kind."""
    kind = request.param.removeprefix("prefix over ")
    with contextlib.ExitStack() as exits:
        inner: StoreMixin
        if kind == "tcp":
            server = TCPStoreServer(0)
            exits.callback(server.close)
            inner = TCPStore("localhost", server.port, timeout=TIMEOUT)
            exits.callback(inner.close)
        elif kind == "file":
            inner = FileStore(str(tmp_path / "store"), timeout=TIMEOUT)
        elif kind == "etcd":
            server = request.getfixturevalue("etcd")
            inner = EtcdStore(server.endpoints, request.getfixturevalue("prefix"), timeout=TIMEOUT)
            exits.callback(inner.close)
            exits.callback(inner.remove)
        else:
            inner = FakeStore(use_libuv=kind == "fake", timeout=TIMEOUT)
        yield inner if request.param == kind else PrefixStore(5, inner)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A TCPStore server behind a proxy."""
    server = TCPStoreServer(0)
    made = Proxy(server.port)
    yield made
    made.close()
    server.close()
