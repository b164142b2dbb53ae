"""Draws the sequence diagrams of the page "How ranks agree", as SVG in the page: ```{sequence} crash```.

What happens in each is data, in `sequences.py`. Names in backticks are set as code. Colours are the theme's,
so the diagrams can be read in the light and in the dark one.
"""

from __future__ import annotations

import dataclasses
import html
import re
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

LANE = 64  # pixels between two lifelines
LINE = 17  # height of a line of text
GAP = 9  # between two rows
TEXT = 490  # width of the words beside the lifelines
_WORDS = 70  # characters in a line of them


@dataclasses.dataclass(frozen=True)
class Row:
    """What happens at one moment.

    Args:
        who: the participant that does it; several, if all of them do.
        text: what.
        towards: participants that an arrow leads to; none: a dot on the lifeline.
        ends: whether the participant is lost.
    """

    who: str | tuple[str, ...]
    text: str
    towards: tuple[str, ...] = ("store",)
    ends: bool = False


@dataclasses.dataclass(frozen=True)
class Pause:
    """Time passes."""

    text: str


@dataclasses.dataclass(frozen=True)
class Sequence:
    """A diagram: its title, the participants from left to right, and what happens.

    Those in ``late`` begin with the first thing that they do.
    """

    title: str
    participants: tuple[str, ...]
    rows: tuple[Row | Pause, ...]
    late: tuple[str, ...] = ()


def draw(sequence: Sequence) -> str:
    """The diagram as an SVG element."""
    place = {name: LANE // 2 + LANE * number for number, name in enumerate(sequence.participants)}
    words_at = LANE * len(place) + 8
    marks: list[str] = []
    began = {name: 34 for name in place if name not in sequence.late}
    ended: dict[str, int] = {}
    top = 44
    for row in sequence.rows:
        lines = _wrap(row.text)
        height = LINE * len(lines) + GAP
        middle = top + LINE // 2 - 2
        if isinstance(row, Pause):
            marks.append(
                f'<line class="pause" x1="0" x2="{words_at + TEXT}" y1="{middle}" y2="{middle}"/>'
                f'<text class="pause" x="{words_at}" y="{middle + 4}">{_marked(row.text)}</text>'
            )
        else:
            for who in (row.who,) if isinstance(row.who, str) else row.who:
                began.setdefault(who, middle)
                marks += _actions(place, who, row, middle)
                if row.ends:
                    ended[who] = middle
            marks += [
                f'<text x="{words_at}" y="{middle + 4 + LINE * number}">{_marked(line)}</text>'
                for number, line in enumerate(lines)
            ]
        top += height
    lines_of_life = [
        f'<line class="life" x1="{x}" x2="{x}" y1="{began[name]}" y2="{ended.get(name, top)}"/>'
        for name, x in place.items()
    ]
    heads = [
        f'<text class="head" x="{x}" y="{began[name] - 10}">{html.escape(name)}</text>'
        for name, x in place.items()
    ]
    return (
        f'<svg class="sequence" role="img" viewBox="0 0 {words_at + TEXT} {top + 4}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{html.escape(sequence.title)}</title>{_STYLE}'
        + "".join(lines_of_life + heads + marks)
        + "</svg>"
    )


def _actions(place: dict[str, int], who: str, row: Row, y: int) -> list[str]:
    start = place[who]
    if row.ends:
        return [f'<path class="lost" d="M{start - 6} {y - 6}l12 12m0 -12l-12 12"/>']
    marks = [f'<circle cx="{start}" cy="{y}" r="3"/>']
    for other in row.towards:
        end, back = place[other], 6 if place[other] > start else -6
        if other == who:
            continue
        kind = "wake" if who == "store" else "say"
        marks.append(
            f'<line class="{kind}" x1="{start}" x2="{end - back}" y1="{y}" y2="{y}"/>'
            f'<path d="M{end} {y}l{-1.4 * back:g} -4v8z"/>'
        )
    return marks


def _wrap(text: str) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(f"{lines[-1]} {word}".replace("`", "")) > _WORDS:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _marked(text: str) -> str:
    return re.sub(r"`([^`]+)`", r'<tspan class="code">\1</tspan>', html.escape(text))


_STYLE = """<style>
svg.sequence { display: block; width: 100%; max-width: 860px; font: 13px system-ui, sans-serif;
  color: var(--color-foreground-primary, #444) }
svg.sequence text, svg.sequence circle, svg.sequence path { fill: currentColor }
svg.sequence .head { font-weight: 600; text-anchor: middle }
svg.sequence .code { font: 12px ui-monospace, monospace; fill: var(--color-brand-content, #47d) }
svg.sequence line { stroke: currentColor; stroke-width: 1.3 }
svg.sequence .life { stroke: var(--color-foreground-border, #888); stroke-width: 1 }
svg.sequence line.wake, svg.sequence line.pause { stroke-dasharray: 4 4 }
svg.sequence line.pause { stroke: var(--color-foreground-border, #888); stroke-width: 1 }
svg.sequence text.pause { font-style: italic; paint-order: stroke; stroke-width: 10px;
  stroke: var(--color-background-primary, #fff) }
svg.sequence .lost { stroke: #d9534f; stroke-width: 2.5; fill: none }
</style>"""


class _Diagram(Directive):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        from sequences import SEQUENCES

        return [nodes.raw("", draw(SEQUENCES[self.arguments[0]]), format="html")]


def setup(app: Any) -> dict[str, bool]:
    """Tells Sphinx of the directive."""
    app.add_directive("sequence", _Diagram)
    return {"parallel_read_safe": True}
