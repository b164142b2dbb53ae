"""One-line mistakes that the explorers have to find, and what puts them in."""

from __future__ import annotations

import importlib
from pathlib import Path

from .mutant import Mutant

_OTHERS = ("__init__", "__main__", "mutant")


def every_mutant() -> list[Mutant]:
    """All mistakes: each module of this package lists some as ``MUTANTS``."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    parts = [name for name in names if name not in _OTHERS and not name.startswith("test_")]
    mutants: list[Mutant] = []
    for part in parts:
        mutants += importlib.import_module(f"{__name__}.{part}").MUTANTS
    return mutants
