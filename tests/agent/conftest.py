"""One process imports torch for the ftruns of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from agent_job import FtRun
from support.warm_ftrun import WarmProcess


@pytest.fixture(scope="session")
def warm_process() -> Iterator[None]:
    """Has ftruns forked from a process that has imported torch."""
    FtRun.warm_process = WarmProcess()
    yield
    FtRun.warm_process.close()
    FtRun.warm_process = None


@pytest.fixture(scope="module", autouse=True)
def forked_ftruns(request: pytest.FixtureRequest) -> None:
    """Starts that process before the first test of a module with ftruns: none is blamed for it."""
    if any(hasattr(request.module, name) for name in ("FtRun", "Cluster", "Training")):
        request.getfixturevalue("warm_process")
