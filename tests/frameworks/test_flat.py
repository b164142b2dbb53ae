"""Memory, descriptors, threads and old models over many restarts: torch's own, and each framework."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning")  # make test has less time than make test-frameworks

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "flat.py"
RESTARTS = {
    "compiled": 100,
    "fsdp2": 100,
    "hsdp": 100,
    "tp": 100,
    "lightning": 100,
    "lightning-fabric": 100,
    "transformers": 100,
    "accelerate": 100,
}

pytestmark = [pytest.mark.frameworks("lightning, transformers, accelerate"), pytest.mark.timeout(600)]


def flat(folder: Path, kind: str, restarts: int, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the benchmark."""
    command = [sys.executable, str(SCRIPT), f"--{kind}", str(restarts), *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=550, check=False)


@pytest.mark.parametrize(("kind", "restarts"), RESTARTS.items())
def test_nothing_grows(tmp_path: Path, kind: str, restarts: int) -> None:
    done = flat(tmp_path, kind, restarts)
    if "is not installed" in done.stdout:
        pytest.skip(done.stdout.strip())
    logs = "".join(path.read_text()[-2000:] for path in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert f"\n{kind}: {restarts} restarts of two ranks" in done.stdout


def test_without_the_collection_old_models_stay_and_their_holder_is_named(tmp_path: Path) -> None:
    done = flat(tmp_path, "fsdp2", 20, "--no-collect-garbage")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "models of earlier iterations were alive: " in done.stdout
    assert "an FSDPSequential of iteration 0 is held by itself" in done.stdout
