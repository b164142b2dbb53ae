"""How far a reader walks through one restart of one rank: from file to file, from package to package."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_house import Budget

ROOT = Path(__file__).parents[2]

WALK = {
    "moves": Budget(80),
    "moves between packages": Budget(55),
    "files": Budget(30),
    "calls": Budget(150),
}


@pytest.fixture(scope="module")
def walk() -> Iterator[dict[str, int]]:
    """The figures of a walk, in a process of its own."""
    command = [sys.executable, str(ROOT / "tests/product/walk.py")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    yield json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("figure", WALK)
def test_a_restart_is_read_in_an_hour(walk: dict[str, int], figure: str) -> None:
    WALK[figure].check(walk[figure])
