"""How figures are put together and printed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def median(values: Sequence[float]) -> float | None:
    """Returns the median; None for no values."""
    return statistics.median(values) if values else None


def duration(seconds: float | None) -> str:
    """Returns a duration for people."""
    if seconds is None:
        return "-"
    if abs(seconds) < 1e-5:
        return f"{seconds * 1e9:.0f} ns"
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"


def spread(values: Sequence[float]) -> str:
    """Returns least, median and greatest of some durations, and how many there are."""
    if not values:
        return "-"
    least, middle, most = (duration(v) for v in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({least} .. {most}, n={len(values)})"


def ratio(peer: float | None, ours: float | None) -> str:
    """Returns how many times more the peer takes."""
    if peer is None or ours is None or ours <= 0:
        return "-"
    times = peer / ours
    return f"{times:.0f} x" if times >= 10 else f"{times:.2f} x"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a plain table: the first column to the left, all others to the right."""
    widths = [max(len(row[i]) for row in (headers, *rows)) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join(padded).rstrip()

    return "\n".join([line(headers), "  ".join("-" * width for width in widths), *map(line, rows)])
