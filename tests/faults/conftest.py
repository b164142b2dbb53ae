from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# The rank processes' harness is that of the wrapper's other tests.
sys.path.insert(0, str(HERE.parent / "wrapper"))

from job_stores import job_on, leave_out, parametrize  # noqa: E402
from rank_harness import Job, Template  # noqa: E402

LEFT_OUT_ON_ETCD = (
    # They mostly wait for timeouts, of which the store has no part; one of each file runs.
    "test_the_survivors_finish[[]etcd-sleep-*",
    "test_the_survivors_finish[[]etcd-gil-*",
    "test_the_survivors_finish[[]etcd-collective-*",
    "test_the_survivors_finish[[]etcd-sigstop-two*",
    "test_a_rank_that_is_restarting[[]etcd-sigstop-a*",
    "test_a_rank_that_hangs_while_it_is_restarting[[]etcd-*",
    "test_a_rank_assignment_that_hangs[[]etcd-*",
    "test_a_waiting_spare_is_lost[[]etcd-*19]",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out(config, items, HERE, LEFT_OUT_ON_ETCD)


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
