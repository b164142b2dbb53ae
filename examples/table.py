"""Tables for people."""

from __future__ import annotations

from collections.abc import Sequence


def duration(seconds: float) -> str:
    """Returns a duration as people write it."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
