from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# The rank processes' harness is that of the wrapper's other tests.
sys.path.insert(0, str(HERE.parent / "wrapper"))

from rank_harness import Job, Template, running  # noqa: E402


@pytest.fixture(scope="package")
def template(warm_process: None) -> Iterator[Template]:
    """One process has imported torch, and forks all ranks; it finds the bodies of this folder."""
    template = Template(str(HERE))
    yield template
    template.close()


@pytest.fixture
def job(template: Template, tmp_path: Path) -> Iterator[Job]:
    """A job of rank processes, on a TCPStore: state goes on in the same way with another store."""
    with running(template, tmp_path) as job:
        yield job
