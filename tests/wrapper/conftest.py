from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from job_stores import job_on, leave_out, parametrize
from rank_harness import Job, Template

HERE = Path(__file__).parent

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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out(config, items, HERE, LEFT_OUT_ON_ETCD)


@pytest.fixture(scope="package")
def template() -> Iterator[Template]:
    """One process imports torch, and all ranks are forked from it."""
    template = Template()
    yield template
    template.close()


@pytest.fixture
def job(
    request: pytest.FixtureRequest, template: Template, tmp_path: Path, etcd_if_any: object
) -> Iterator[Job]:
    """A job of rank processes, on a store of each kind."""
    with job_on(request, template, tmp_path) as job:
        yield job
