from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from abort_ranks import RunRanks
from rank_harness import Template, running


@pytest.fixture(scope="package")
def template(warm_process: None) -> Iterator[Template]:
    """One process has imported torch, and forks all ranks; it finds the bodies of this folder."""
    template = Template(str(Path(__file__).parent))
    yield template
    template.close()


@pytest.fixture
def run_ranks(template: Template, tmp_path: Path) -> Iterator[RunRanks]:
    """Runs a function in rank processes, which end with the test."""
    with contextlib.ExitStack() as owned, running(template, tmp_path) as job:
        yield RunRanks(job, owned)
