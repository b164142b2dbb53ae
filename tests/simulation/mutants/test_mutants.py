"""The list of mistakes does not rot: each still fits the code. Two that are found at once are looked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from . import every_mutant
from .__main__ import FINDERS, search

SECONDS = 60.0
FOUND_AT_ONCE = ("told-of-the-iteration-before", "last-watches-nobody")


def test_mistakes_fit_the_code(tmp_path: Path) -> None:
    mutants = every_mutant()
    for mutant in mutants:
        assert mutant.finder in FINDERS and mutant.why and " " not in mutant.name
        (tmp_path / f"{mutant.name}.py").write_text(mutant.mutated())
    assert len(list(tmp_path.iterdir())) == len(mutants), "two have one name"
    # A NameError tells of a mistake, whatever it is; so does a syntax error.
    look = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821", tmp_path]
    said = subprocess.run(look, capture_output=True, text=True, timeout=SECONDS)
    assert said.returncode == 0, said.stdout


@pytest.mark.nightly("that all fit the code is looked at always")
@pytest.mark.parametrize("name", FOUND_AT_ONCE)
def test_mistake_is_found(name: str) -> None:
    mutant = next(mutant for mutant in every_mutant() if mutant.name == name)
    result = search(mutant, mutant.finder, seed=1, processes=1, seconds=SECONDS)
    assert result.found, result.output
