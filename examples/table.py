"""Tables for people."""

from __future__ import annotations

from collections.abc import Sequence


def duration(seconds: float) -> str:
    """Returns a duration as people write it."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table, with rich if it is there."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        for row in (header, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
