from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_harness import Job, Template, running


@pytest.fixture(scope="package")
def template() -> Iterator[Template]:
    """One process imports torch, and all ranks are forked from it."""
    template = Template()
    yield template
    template.close()


@pytest.fixture
def job(template: Template, tmp_path: Path) -> Iterator[Job]:
    """A job of rank processes."""
    with running(template, tmp_path) as job:
        yield job
