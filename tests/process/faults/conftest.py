from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from job_stores import job_on
from rank_harness import Job, Template

STORES = {"test_the_survivors_of_sigkill_finish": ["etcd"]}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    stores = STORES.get(metafunc.function.__name__, ["tcp"])
    metafunc.parametrize("job", stores, indirect=True)


@pytest.fixture(scope="package")
def template(warm_process: None) -> Iterator[Template]:
    """One process has imported torch, and forks all ranks; it finds the bodies of this folder."""
    template = Template(str(Path(__file__).parent))
    yield template
    template.close()


@pytest.fixture
def job(
    request: pytest.FixtureRequest, template: Template, tmp_path: Path, etcd_if_any: object
) -> Iterator[Job]:
    """A job of rank processes, on a TCPStore or on etcd."""
    with job_on(request, template, tmp_path) as job:
        yield job
