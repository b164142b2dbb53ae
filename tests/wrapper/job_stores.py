"""Runs tests of jobs of rank processes on every store that a job may have: on a TCPStore and on etcd alike.

Except for those marked `tcp_only`. To keep the suite short some of the slow ones run on etcd only if
`EVERY_TEST_ON_ETCD` is set in the environment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from rank_harness import Job, Template, running

from ft_wrapper.store.etcd_address import EtcdAddress
from ft_wrapper.store.etcd_gateway import EtcdGateway
from ft_wrapper.store.etcd_messages import Range, Span
from ft_wrapper.testing import EtcdServer

EVERY_TEST_ON_ETCD = "FT_WRAPPER_EVERY_TEST_ON_ETCD"


def parametrize(metafunc: pytest.Metafunc) -> None:
    """For ``pytest_generate_tests``: gives each test that asks for a `job` one on every store."""
    if "job" in metafunc.fixturenames:
        tcp_only = metafunc.definition.get_closest_marker("tcp_only") is not None
        metafunc.parametrize("job", ["tcp"] if tcp_only else ["tcp", "etcd"], indirect=True)


def leave_out(config: pytest.Config, items: list[pytest.Item], folder: Path, patterns: Sequence[str]) -> None:
    """For ``pytest_collection_modifyitems``: leaves out what is too much for every run.

    Args:
        config: pytest's.
        items: the tests.
        folder: those of this one are meant.
        patterns: of the names of those whose job is on etcd.
    """
    if EVERY_TEST_ON_ETCD in os.environ:
        return

    def is_left_out(item: pytest.Item) -> bool:
        callspec = getattr(item, "callspec", None)
        if item.path.parent != folder or callspec is None or callspec.params.get("job") != "etcd":
            return False
        return any(fnmatchcase(item.name, pattern) for pattern in patterns)

    left_out = [item for item in items if is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


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
        with contextlib.closing(address.connect(timedelta(seconds=20))) as store:
            store.remove()
        left = _keys(client, prefix)
        assert not left, f"keys that do not go with the job: {left}"


def _keys(client: EtcdGateway, prefix: str) -> list[bytes]:
    every = Range(Span.prefix(f"{prefix}/".encode()), keys_only=True)
    return [kv.key for kv in client.range(every)]
