"""Memory, descriptors, threads and old models over a hundred restarts with each framework."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "flat.py"

pytestmark = pytest.mark.frameworks("lightning")


@pytest.mark.parametrize("kind", ["lightning", "lightning-fabric"])
@pytest.mark.timeout(600)
def test_nothing_grows_over_a_hundred_restarts(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, str(SCRIPT), f"--{kind}", "100"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=550, check=False)
    if "is not installed" in done.stdout:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"\n{kind}: 100 restarts of two ranks" in done.stdout
