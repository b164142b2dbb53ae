"""A one-line mistake in the package, and a copy of the package that has it."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = "ft_wrapper"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A one-line mistake.

    Args:
        name: what it is called, in the table and for ``--only``.
        file: the file that it is in, relative to the package.
        old: what the file says; it must occur exactly once.
        new: what the mistake makes of it.
        finder: who has to find it: ``job``, ``rendezvous`` or ``live``, see ``FINDERS``.
        why: what the line is there for.
        seldom: a search of 12 seconds did not find it.
    """

    name: str
    file: str
    old: str
    new: str
    finder: str
    why: str
    seldom: bool = False

    def mutated(self) -> str:
        """The file's text with the mistake in it.

        Raises:
            ValueError: the file does not say ``old`` exactly once.
        """
        text = (ROOT / PACKAGE / self.file).read_text()
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"mutant {self.name}: {self.file} says {self.old!r} {count} times, not once")
        return text.replace(self.old, self.new)


def copy_to(folder: Path, mutant: Mutant | None) -> None:
    """Makes a copy of package and tests, with a mistake in it.

    Args:
        folder: where to; an empty folder.
        mutant: the mistake; None for none.
    """
    shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests").symlink_to(ROOT / "tests")
    if mutant is not None:
        (folder / PACKAGE / mutant.file).write_text(mutant.mutated())
