from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from rank_harness import Job, Template, running

from ft_wrapper.exception import StoreError
from ft_wrapper.store.etcd_address import EtcdAddress
from ft_wrapper.store.etcd_messages import Range, Span
from ft_wrapper.testing import EtcdServer

HERE = Path(__file__).parent

# The tests of jobs run on a TCPStore and on etcd alike, except for those marked `tcp_only`. To keep the suite
# short some of the slow ones run on etcd only if this variable is set:
EVERY_TEST_ON_ETCD = "FT_WRAPPER_EVERY_TEST_ON_ETCD"
LEFT_OUT_ON_ETCD = (
    # They mostly wait for timeouts inside one process, in which no store has a part.
    "test_who_stops_pinging_is_restarted[[]*",
    "test_hang_protection_can_be_suspended[[]*",
    "test_the_function_may_run_outside_the_main_thread[[]*",
    "test_a_c_call_that_never_returns_is_ended[[]*",
    "test_a_collective_behind_a_stopped_peer_is_freed_before_that_is_ended[[]*",
    "test_no_progress_for_soft_timeout_restarts_everybody_in_their_processes[[]*collective*",
    # One of several that ask the same of the store: the one with most deaths and joins runs.
    "test_the_proposer_is_killed_while_it_advances_and_comes_back[[]etcd-False]",
    "test_a_paused_host_never_comes_back_as_what_it_was[[]etcd-False-False]",
    "test_a_paused_host_never_comes_back_as_what_it_was[[]etcd-True-False]",
    "test_killed_ranks_come_back_after_the_others_have_gone_on[[]etcd-victims[01]]",
    "test_killed_ranks_come_back_before_the_others_go_on[[]etcd-victims[01]]",
    "test_rank_assignments_with_newcomers[[]etcd-FillGaps-*",
    "test_rank_assignments_with_newcomers[[]etcd-divisible-*",
    "test_who_differs_from_the_job_is_refused[[]etcd-trains-*",
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "tcp_only(reason): the test is about the TCPStore, and runs its job on no other store"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs every test of a job on every store that a job may have."""
    if "job" in metafunc.fixturenames:
        tcp_only = metafunc.definition.get_closest_marker("tcp_only") is not None
        metafunc.parametrize("job", ["tcp"] if tcp_only else ["tcp", "etcd"], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is too much for every run."""
    if EVERY_TEST_ON_ETCD in os.environ:
        return
    left_out = [item for item in items if _is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _is_left_out(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    if item.path.parent != HERE or callspec is None or callspec.params.get("job") != "etcd":
        return False
    return any(fnmatchcase(item.name, pattern) for pattern in LEFT_OUT_ON_ETCD)


@pytest.fixture(scope="package")
def template() -> Iterator[Template]:
    """One process imports torch, and all ranks are forked from it."""
    template = Template()
    yield template
    template.close()


@pytest.fixture
def job(
    request: pytest.FixtureRequest, template: Template, tmp_path: Path, etcd_if_any: object, prefix: str
) -> Iterator[Job]:
    """A job of rank processes, on a store of each kind."""
    if request.param == "tcp":
        with running(template, tmp_path) as job:
            yield job
        return
    etcd: EtcdServer = request.getfixturevalue("etcd")
    with running(template, tmp_path, EtcdAddress(etcd.endpoints, prefix)) as job:
        yield job
    template.await_ends()
    left = _remove_job(etcd, prefix)
    assert not left, f"keys that do not go with the job: {left}"


def _remove_job(etcd: EtcdServer, prefix: str) -> list[bytes]:
    """Removes what a job has in etcd, if it has begun; returns the keys that are there still."""
    with contextlib.suppress(StoreError):
        store = EtcdAddress(etcd.endpoints, prefix).connect(timedelta(seconds=20))
        store.remove()
        store.close()
    with contextlib.closing(etcd.get_client()) as client:
        return [kv.key for kv in client.range(Range(Span.prefix(f"{prefix}/".encode()), keys_only=True))]
