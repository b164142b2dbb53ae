"""Runs tests of jobs of rank processes on the stores that a job may have: on a TCPStore, and on etcd."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from rank_harness import Job, Template, running
from support import nightly

from ft_wrapper.store.address import EtcdAddress
from ft_wrapper.store.etcd_client import EtcdClient
from ft_wrapper.store.etcd_messages import Range
from ft_wrapper.store.plan import connect_etcd
from ft_wrapper.testing import EtcdServer


def parametrize(metafunc: pytest.Metafunc) -> None:
    """For ``pytest_generate_tests``: gives each test that asks for a `job` one on every store."""
    if "job" in metafunc.fixturenames:
        tcp_only = metafunc.definition.get_closest_marker("tcp_only") is not None
        metafunc.parametrize("job", ["tcp"] if tcp_only else ["tcp", "etcd"], indirect=True)


def run_on_stores(metafunc: pytest.Metafunc, on_etcd: Collection[str], at_night: Collection[str]) -> None:
    """For ``pytest_generate_tests``: gives each test that asks for a `job` one on a TCPStore.

    Args:
        metafunc: the test.
        on_etcd: names of the tests that get one on etcd as well.
        at_night: of those that do so at night.
    """
    if "job" in metafunc.fixturenames:
        name = metafunc.function.__name__
        night = nightly.at_night("it runs on a TCPStore always", ["etcd"] if name in at_night else [])
        stores = ["tcp", *(["etcd"] if name in on_etcd else []), *night]
        metafunc.parametrize("job", stores, indirect=True)


def nightly_on_etcd(items: list[pytest.Item], folder: Path, always: Sequence[str]) -> None:
    """For ``pytest_collection_modifyitems``: marks as nightly what need not run on etcd each time.

    Args:
        items: the tests.
        folder: those of this one are meant.
        always: patterns of the names of those that are not nightly.
    """
    for item in items:
        callspec = getattr(item, "callspec", None)
        if item.path.parent != folder or callspec is None or callspec.params.get("job") != "etcd":
            continue
        if not any(fnmatchcase(item.name, pattern) for pattern in always):
            item.add_marker(pytest.mark.nightly("it runs on a TCPStore"))


@contextlib.contextmanager
def job_on(request: pytest.FixtureRequest, template: Template, folder: Path) -> Iterator[Job]:
    """A job on the store that the test is run on.

    Args:
        request: of the fixture `job`, which has asked for `etcd_if_any`.
        template: what its ranks are forked from.
        folder: for its files.
    """
    if request.param == "tcp":
        with running(template, folder) as job:
            yield job
        return
    etcd: EtcdServer = request.getfixturevalue("etcd")
    prefix: str = request.getfixturevalue("prefix")
    with running(template, folder, EtcdAddress(etcd.endpoints, prefix)) as job:
        yield job
    template.await_ends()
    with contextlib.closing(etcd.get_client()) as client:
        assert _keys(client, prefix), "the job was on another store; see Rank.store_settings"
        address = EtcdAddress(etcd.endpoints, prefix)
        with contextlib.closing(connect_etcd(address, timedelta(seconds=20))) as store:
            store.remove()
        left = _keys(client, prefix)
        assert not left, f"keys that do not go with the job: {left}"


def _keys(client: EtcdClient, prefix: str) -> list[bytes]:
    return [kv.key for kv in client.read(Range.prefix(f"{prefix}/".encode()))]
