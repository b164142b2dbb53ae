"""Draws the figures of the pages, as SVG in the page: ```{drawing} processes```.

Colours are the theme's, so they can be read in the light and in the dark one. What is in each figure is data,
at the end of this file; all lengths are in pixels.
"""

from __future__ import annotations

import dataclasses
import html
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

LINE = 16  # height of a line of text


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangle with a title and lines of text.

    Args:
        left: of its upper left corner.
        top: of the same.
        width: of the box.
        height: of the box.
        title: in bold type.
        lines: below it.
        dashed: whether it is drawn with a dashed line: a machine rather than a process.
    """

    left: int
    top: int
    width: int
    height: int
    title: str = ""
    lines: tuple[str, ...] = ()
    dashed: bool = False


@dataclasses.dataclass(frozen=True)
class Arrow:
    """A line with a head, and text at its middle.

    Args:
        start: where it begins: x and y.
        end: where its head is: x and y.
        text: what it means.
        beside: how far the text is from the middle: x and y.
    """

    start: tuple[int, int]
    end: tuple[int, int]
    text: str = ""
    beside: tuple[int, int] = (6, 4)


@dataclasses.dataclass(frozen=True)
class Span:
    """A piece of a time line.

    Args:
        start: x of its begin.
        end: x of its end.
        top: y of the line.
        text: above it.
        bold: whether the line is thick.
    """

    start: int
    end: int
    top: int
    text: str
    bold: bool = False


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure: its title, for those who cannot see it, its size, and what is in it."""

    title: str
    width: int
    height: int
    parts: tuple[Box | Arrow | Span, ...]


def draw(drawing: Drawing) -> str:
    """The figure as an SVG element."""
    return (
        f'<svg class="drawing" role="img" viewBox="0 0 {drawing.width} {drawing.height}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{html.escape(drawing.title)}</title>{_STYLE}'
        + "".join(map(_part, drawing.parts))
        + "</svg>"
    )


def _part(part: Box | Arrow | Span) -> str:
    if isinstance(part, Box):
        return _box(part)
    if isinstance(part, Arrow):
        return _arrow(part)
    weight = "thick" if part.bold else "thin"
    ends = "".join(f'<path class="thin" d="M{x} {part.top - 5}v10"/>' for x in (part.start, part.end))
    line = f'<path class="{weight}" d="M{part.start} {part.top}H{part.end}"/>'
    middle = (part.start + part.end) // 2
    return f'{line}{ends}<text class="middle" x="{middle}" y="{part.top - 9}">{html.escape(part.text)}</text>'


def _box(box: Box) -> str:
    kind = "machine" if box.dashed else "process"
    drawn = [
        f'<rect class="{kind}" x="{box.left}" y="{box.top}" width="{box.width}" height="{box.height}" '
        'rx="6"/>'
    ]
    y = box.top + 20
    if box.title:
        drawn.append(f'<text class="title" x="{box.left + 10}" y="{y}">{html.escape(box.title)}</text>')
        y += LINE + 2
    for line in box.lines:
        drawn.append(f'<text x="{box.left + 10}" y="{y}">{html.escape(line)}</text>')
        y += LINE
    return "".join(drawn)


def _arrow(arrow: Arrow) -> str:
    (x, y), (to_x, to_y) = arrow.start, arrow.end
    length = max(1.0, ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5)
    along_x, along_y = (to_x - x) / length, (to_y - y) / length
    base_x, base_y = to_x - 8 * along_x, to_y - 8 * along_y
    head = (
        f"M{to_x} {to_y}L{base_x - 4 * along_y:.1f} {base_y + 4 * along_x:.1f}"
        f"L{base_x + 4 * along_y:.1f} {base_y - 4 * along_x:.1f}z"
    )
    text_x, text_y = (x + to_x) // 2 + arrow.beside[0], (y + to_y) // 2 + arrow.beside[1]
    return (
        f'<path class="thin" d="M{x} {y}L{base_x:.1f} {base_y:.1f}"/><path class="head" d="{head}"/>'
        f'<text class="note" x="{text_x}" y="{text_y}">{html.escape(arrow.text)}</text>'
    )


_STYLE = """<style>
svg.drawing { display: block; width: 100%; max-width: 860px; margin: 1em 0; font: 13px system-ui, sans-serif;
  color: var(--color-foreground-primary, #444) }
svg.drawing text { fill: currentColor }
svg.drawing .title { font-weight: 600 }
svg.drawing .note { font-size: 12px; font-style: italic }
svg.drawing .middle { text-anchor: middle }
svg.drawing .head { fill: currentColor }
svg.drawing rect { fill: none; stroke: currentColor; stroke-width: 1.3 }
svg.drawing rect.process { fill: var(--color-background-secondary, #f7f7f7) }
svg.drawing rect.machine { stroke-dasharray: 5 4; stroke: var(--color-foreground-border, #888) }
svg.drawing path.thin { stroke: currentColor; stroke-width: 1.3; fill: none }
svg.drawing path.thick { stroke: currentColor; stroke-width: 4; fill: none }
</style>"""


PROCESSES = Drawing(
    "The processes of a job on two nodes, and what they say to each other",
    860,
    470,
    (
        Box(10, 10, 600, 330, "node 0", dashed=True),
        Box(
            30,
            45,
            260,
            150,
            "ftrun: the agent",
            (
                "rendezvous: which nodes take part",
                "ranks: start, replace, end",
                "monitors: one for each rank:",
                "  death, hang, heartbeat",
                "logs, signals, health, metrics",
            ),
        ),
        Box(30, 255, 260, 70, "template", ("one thread, torch imported,", "no user code, no GPU")),
        Box(
            350,
            45,
            240,
            170,
            "rank process",
            (
                "main thread: restart loop,",
                "  then your function",
                "monitor thread: hears the end,",
                "  aborts groups, interrupts",
                "watchdog: stamps of progress",
                "shared memory: stamps, mutex",
            ),
        ),
        Box(350, 255, 240, 70, "rank process", ("a hot spare: joined, warmed up,", "waits in the call")),
        Box(660, 10, 190, 330, "node 1", dashed=True),
        Box(675, 45, 160, 90, "ftrun: the agent", ("the same",)),
        Box(675, 150, 160, 65, "rank process"),
        Box(675, 255, 160, 70, "rank process"),
        Box(
            150,
            395,
            560,
            60,
            "store: a TCPStore in the agent of node 0, or etcd",
            ("what ranks and nodes agree on; no rank hosts it, so any rank may die",),
        ),
        Arrow((290, 100), (350, 100), "line", (-12, -6)),
        Arrow((160, 255), (160, 195), "standby", (8, 4)),
        Arrow((290, 290), (350, 290), "fork", (-14, -6)),
        Arrow((470, 325), (470, 395), "agreement", (8, 12)),
        Arrow((310, 340), (310, 395), "rendezvous, heartbeats", (-150, 4)),
        Arrow((720, 340), (660, 395), "", (0, 0)),
    ),
)

HANG = Drawing(
    "A rank that hangs: soft_timeout, hard_timeout, termination_grace_time",
    860,
    240,
    (
        Span(20, 160, 50, "steps", bold=True),
        Span(160, 420, 50, "soft_timeout: no progress"),
        Span(160, 640, 100, "hard_timeout"),
        Span(640, 800, 150, "termination_grace_time"),
        Span(420, 850, 200, "barrier_timeout: how long the others wait"),
        Arrow((420, 25), (420, 50), "all ranks are interrupted", (8, -2)),
        Arrow((640, 75), (640, 100), "SIGTERM", (8, 0)),
        Arrow((800, 125), (800, 150), "SIGKILL", (6, -10)),
    ),
)

DRAWINGS = {"processes": PROCESSES, "hang": HANG}


class _Figure(Directive):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return [nodes.raw("", draw(DRAWINGS[self.arguments[0]]), format="html")]


def setup(app: Any) -> dict[str, bool]:
    """Tells Sphinx of the directive."""
    app.add_directive("drawing", _Figure)
    return {"parallel_read_safe": True}
