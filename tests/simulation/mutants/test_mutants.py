"""The list of mistakes does not rot: each still fits the code. Two that are found at once are looked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from . import every_mutant
from .__main__ import FINDERS, SELDOM, search
from .mutant import Mutant

SECONDS = 60.0
FOUND_AT_ONCE = ("told-of-the-iteration-before", "last-watches-nobody")


@pytest.mark.parametrize("mutant", every_mutant(), ids=lambda mutant: mutant.name)
def test_mistake_fits_the_code(mutant: Mutant) -> None:
    assert mutant.finder in FINDERS and mutant.why
    ast.parse(mutant.mutated())


def test_none_has_a_name_that_is_not_there(tmp_path: Path) -> None:
    """A NameError tells of such a one, whatever the mistake is."""
    for mutant in every_mutant():
        (tmp_path / f"{mutant.name}.py").write_text(mutant.mutated())
    look = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821", tmp_path]
    said = subprocess.run(look, capture_output=True, text=True, timeout=SECONDS)
    assert said.returncode == 0, said.stdout


def test_names_are_told_apart() -> None:
    mutants = every_mutant()
    names = {mutant.name for mutant in mutants}
    assert len(names) == len(mutants)
    assert names > SELDOM
    assert len(names - SELDOM) >= 40
    assert not any(" " in name for name in names)


@pytest.mark.parametrize("name", FOUND_AT_ONCE)
def test_mistake_is_found(name: str) -> None:
    mutant = next(mutant for mutant in every_mutant() if mutant.name == name)
    result = search(mutant, mutant.finder, seed=1, processes=1, seconds=SECONDS)
    assert result.found, result.output


def test_a_finder_that_fails_itself_finds_nothing() -> None:
    broken = Mutant(
        "broken",
        "protocol/membership.py",
        "class Membership:",
        "class Membership: nothing",
        "job",
        "it is not Python any more",
    )
    result = search(broken, broken.finder, seed=1, processes=1, seconds=SECONDS)
    assert not result.found and "the finder failed" in result.by
