from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# The rank processes' harness is that of the wrapper's other tests.
sys.path.insert(0, str(HERE.parent / "wrapper"))

from job_stores import job_on, run_on_stores  # noqa: E402
from rank_harness import Job, Template  # noqa: E402

ON_ETCD = {"test_the_survivors_finish", "test_a_waiting_spare_is_lost"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    run_on_stores(metafunc, ON_ETCD)


@pytest.fixture(scope="package")
def template(warm_process: None) -> Iterator[Template]:
    """One process has imported torch, and forks all ranks; it finds the bodies of this folder."""
    template = Template(str(HERE))
    yield template
    template.close()


@pytest.fixture
def job(
    request: pytest.FixtureRequest, template: Template, tmp_path: Path, etcd_if_any: object
) -> Iterator[Job]:
    """A job of rank processes, on a TCPStore or on etcd."""
    with job_on(request, template, tmp_path) as job:
        yield job
