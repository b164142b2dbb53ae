"""One-line mistakes that the explorers have to find, and what puts them in."""

from __future__ import annotations

import tomllib
from pathlib import Path

from .mutant import Mutant


def every_mutant() -> list[Mutant]:
    """All mistakes of ``mutants.toml``."""
    text = Path(__file__).with_name("mutants.toml").read_text()
    return [Mutant(**each) for each in tomllib.loads(text)["mutant"]]
