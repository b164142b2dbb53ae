"""`benchmarks/flat.py` with few restarts: it runs to its end and prints a table of each kind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "flat.py"


@pytest.mark.nightly("what it measures is tested in tests/test_torch_state.py")
def test_it_prints_both_tables(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--ddp", "11", "--fsdp2", "11"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    logs = "".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    assert done.returncode == 0, done.stderr + logs
    for kind in ("ddp", "fsdp2"):
        assert f"\n{kind}: 11 restarts of two ranks" in done.stdout
    (*_, ddp, fsdp2) = (line.split() for line in done.stdout.splitlines() if line.startswith("models"))
    assert float(ddp[2]) <= 1 and float(fsdp2[2]) <= 1, "old models, the median of early restarts"
