"""Stores that tests run on, each kind by its name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from ft_wrapper.store import EtcdStore, StoreMixin, TCPStore, TCPStoreServer

REAL = ["tcp", "etcd"]
"""Kinds that several processes can share."""

ON_REAL = [pytest.param(kind, marks=pytest.mark.nightly("on a store in memory always")) for kind in REAL]
"""The same for tests in which the store does not matter: they run on them at night."""

TIMEOUT = timedelta(seconds=20)


@contextlib.contextmanager
def real_store(
    kind: str, request: pytest.FixtureRequest, timeout: timedelta = TIMEOUT
) -> Iterator[Callable[[], StoreMixin]]:
    """A store that ends with the block.

    Args:
        kind: one of `REAL`. Without an etcd, ``etcd`` fails the test.
        request: of a fixture that has asked for `etcd_if_any`.
        timeout: of operations that wait.

    Returns:
        What makes a client of it, as every process makes one of its own; the block closes them.
    """
    with contextlib.ExitStack() as owned:

        def connect() -> StoreMixin:
            store: StoreMixin
            if kind == "tcp":
                store = TCPStore("localhost", server.port, timeout=timeout)
            else:
                store = EtcdStore(etcd.endpoints, prefix, timeout=timeout)
            owned.callback(store.close)
            if isinstance(store, EtcdStore):
                owned.callback(store.remove)
            return store

        if kind == "tcp":
            server = TCPStoreServer(0)
            owned.callback(server.close)
        else:
            etcd = request.getfixturevalue("etcd")
            prefix = request.getfixturevalue("prefix")
        yield connect
