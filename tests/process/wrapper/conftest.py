from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from job_stores import job_on, run_on_stores
from rank_harness import Job, Template
from rejoin_job import Training, training

# What a store promises is tested on every kind of store in tests/process/store. Of the jobs those run on etcd
# too that ask most of the store, with deaths and joins above all; and at night some more.
ON_ETCD = {
    "test_all_processes_die_and_come_back",
    "test_nothing_is_kept_after_a_call",
    "test_ranks_go_on_from_the_newest_sealed_one",
    "test_the_proposer_is_killed_while_it_advances_and_comes_back",
    "test_the_status_of_a_job_from_its_begin_to_its_end",
}
AT_NIGHT = {
    "test_a_plain_init_process_group_works_in_every_iteration",
    "test_a_spare_takes_the_place_of_rank_0_and_another_one_that_of_the_next",
    "test_calls_follow_each_other_without_the_lost_ranks",
    "test_the_order_and_the_states",
    "test_the_others_go_on_without_a_rank_that_is_lost_in_a_rank_assignment",
    "test_the_others_go_on_without_those_that_are_gone_between_two_calls",
    "test_too_few_files_and_ranks_that_never_come_are_named",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    run_on_stores(metafunc, ON_ETCD, AT_NIGHT)


@pytest.fixture(scope="package")
def template(warm_process: None) -> Iterator[Template]:
    """One process has imported torch, and all ranks are forked from it."""
    template = Template()
    yield template
    template.close()


@pytest.fixture
def job(
    request: pytest.FixtureRequest, template: Template, tmp_path: Path, etcd_if_any: object
) -> Iterator[Job]:
    """A job of rank processes, on a TCPStore or on etcd."""
    with job_on(request, template, tmp_path) as job:
        yield job


@pytest.fixture
def run(job: Job, tmp_path: Path) -> Iterator[Training]:
    """A training that nothing has been started of."""
    with training(job, tmp_path) as run:
        yield run
