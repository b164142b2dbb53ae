from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# The rank processes' harness is that of the wrapper's other tests.
sys.path.insert(0, str(HERE.parent / "wrapper"))

from job_stores import job_on, nightly_on_etcd, parametrize  # noqa: E402
from rank_harness import Job, Template  # noqa: E402

ALWAYS_ON_ETCD = ()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "job" in metafunc.fixturenames:
        parametrize(metafunc)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    nightly_on_etcd(items, HERE, ALWAYS_ON_ETCD)


@pytest.fixture(scope="package")
def template() -> Iterator[Template]:
    """One process imports torch, and all ranks are forked from it; it finds the bodies of this folder."""
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
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
