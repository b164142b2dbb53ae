from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options are not set by variables, and no cluster manager has numbered this node."""
    for name in list(os.environ):
        if name.startswith("PET_") or name in ("SLURM_STEP_ID", "JOB_COMPLETION_INDEX"):
            monkeypatch.delenv(name)
