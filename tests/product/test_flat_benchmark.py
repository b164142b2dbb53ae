"""`benchmarks/flat.py` with few restarts: it runs to its end and prints a table of each kind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "flat.py"
sys.path.insert(0, str(SCRIPT.parent))

from flat import wrong  # noqa: E402


def looks(**last: Any) -> list[Any]:
    """Thirty restarts; the last ten have something extra."""
    same = {"models": 0, "groups": 0, "descriptors": 9, "threads": 4, "resident": 100.0}
    return [dict(same) for _ in range(20)] + [{**same, **last} for _ in range(10)]


@pytest.mark.parametrize(
    ("last", "says"),
    [
        ({"resident": 102.9}, []),
        ({"resident": 103.1}, ["rank 1: resident grew from 100.0 to 103.1"]),
        ({"descriptors": 10}, ["rank 1: descriptors grew from 9.0 to 10.0"]),
        ({"threads": 5}, ["rank 1: threads grew from 4.0 to 5.0"]),
        (
            {"models": 2, "held": ["a DDP of iteration 3 is held by x.y"]},
            [
                "rank 1: 2 models of earlier iterations were alive: a DDP of iteration 3 is held by x.y",
            ],
        ),
        ({"groups": 1}, ["rank 1: 1 groups of earlier iterations were alive: "]),
    ],
)
def test_it_says_what_stays(last: Any, says: list[str]) -> None:
    assert wrong([looks(), looks(**last)]) == says


@pytest.mark.nightly("what it measures is tested in tests/process/torch_state/test_torch_state.py")
def test_it_prints_both_tables(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--ddp", "11", "--fsdp2", "11"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    logs = "".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    assert done.returncode == 0, done.stderr + logs
    for kind in ("ddp", "fsdp2"):
        assert f"\n{kind}: 11 restarts of two ranks" in done.stdout
    (*_, ddp, fsdp2) = (line.split() for line in done.stdout.splitlines() if line.startswith("models"))
    assert float(ddp[2]) <= 1 and float(fsdp2[2]) <= 1, "old models, the median of early restarts"
