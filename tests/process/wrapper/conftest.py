from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from job_stores import job_on, nightly_on_etcd, parametrize
from rank_harness import Job, Template

HERE = Path(__file__).parent

# What a store promises is tested on every kind of store in tests/process/store. Of the jobs one of each
# file runs on etcd always: the one that asks most of the store, with deaths and joins above all.
ALWAYS_ON_ETCD = (
    "test_ranks_that_never_come_are_named[[]etcd]",
    "test_the_others_go_on_without_one_that_is_gone_between_two_calls[[]etcd-kill]",
    "test_calls_follow_each_other_without_the_lost_ranks[[]etcd-True]",
    "test_the_others_go_on_without_a_rank_that_dies_in_a_rank_assignment[[]etcd-0-own]",
    "test_a_dead_process_is_gone_on_without[[]etcd-sigkill-0]",
    "test_a_spare_takes_the_place_of_rank_0_and_another_one_that_of_the_next[[]etcd]",
    "test_the_order_and_the_states[[]etcd]",
    "test_a_plain_init_process_group_works_in_every_iteration[[]etcd]",
    "test_the_proposer_is_killed_while_it_advances_and_comes_back[[]etcd-True]",
    "test_all_processes_die_and_come_back[[]etcd-True]",
    "test_each_time_another_rank_fails[[]etcd]",
    "test_the_status_of_a_job_from_its_begin_to_its_end[[]etcd]",
    "test_nothing_is_kept_after_a_call[[]etcd-raises]",
    "test_it_never_leaves_the_call[[]etcd]",
    "test_a_spare_that_is_needed_leaves_its_warm_up[[]etcd-waits once]",
    "test_ranks_go_on_from_the_newest_sealed_one[[]etcd-0]",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    nightly_on_etcd(items, HERE, ALWAYS_ON_ETCD)


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
