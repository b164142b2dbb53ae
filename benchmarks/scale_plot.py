"""A picture of a few lines on two logarithmic axes, as SVG: small enough to do without a library."""

from __future__ import annotations

import dataclasses
import math
from html import escape

_WIDTH, _HEIGHT = 340, 250  # of a panel's axes
_LEFT, _TOP, _GAP, _BELOW = 70, 40, 90, 95
_COLORS = ("#2563a8", "#c2571a", "#3f7f4f")


@dataclasses.dataclass(frozen=True)
class Line:
    """Points to be joined.

    Args:
        name: for the legend.
        points: positive values.
    """

    name: str
    points: list[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Args:
        title: what is plotted.
        lines: all panels have the same ones.
    """

    title: str
    lines: list[Line]


def draw(panels: list[Panel], x_title: str) -> str:
    """Returns the picture: panels side by side, a legend below."""
    width = len(panels) * (_LEFT + _WIDTH) + (len(panels) - 1) * (_GAP - _LEFT) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_TOP + _HEIGHT + _BELOW}" '
        f'width="{width}" font-family="sans-serif" font-size="12" fill="#333">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for i, panel in enumerate(panels):
        parts += _panel(panel, x_title, _LEFT + i * (_WIDTH + _GAP))
    for i, line in enumerate(panels[0].lines):
        x, y = _LEFT + i * 220, _TOP + _HEIGHT + 75
        parts.append(f'<path d="M{x} {y}h24" stroke="{_COLORS[i]}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 30}" y="{y + 4}">{escape(line.name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, x_title: str, left: float) -> list[str]:
    xs = sorted({x for line in panel.lines for x, _ in line.points})
    ys = [y for line in panel.lines for _, y in line.points]
    low, high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
    high = max(high, low + 1)
    first, last = math.log2(xs[0]), max(math.log2(xs[-1]), math.log2(xs[0]) + 1)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - first) / (last - first)
        up = (math.log10(y) - low) / (high - low)
        return left + 15 + across * (_WIDTH - 30), _TOP + _HEIGHT * (1 - up)

    parts = [f'<text x="{left}" y="{_TOP - 15}" font-weight="bold">{escape(panel.title)}</text>']
    for power in range(low, high + 1):
        y = at(xs[0], 10.0**power)[1]
        parts.append(f'<path d="M{left} {y:.1f}h{_WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{_tick(power)}</text>')
    for x in xs:
        across = at(x, 10.0**low)[0]
        parts.append(f'<text x="{across:.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">{x:,.0f}</text>')
    middle = left + _WIDTH / 2
    parts.append(
        f'<text x="{middle}" y="{_TOP + _HEIGHT + 40}" text-anchor="middle">{escape(x_title)}</text>'
    )
    for color, line in zip(_COLORS, panel.lines, strict=False):
        points = [at(x, y) for x, y in line.points]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in points]
    return parts


def _tick(power: int) -> str:
    return f"{10**power:,}" if power >= 0 else f"{10.0**power:.{-power}f}"
