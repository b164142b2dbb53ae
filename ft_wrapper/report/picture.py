"""The picture of ``ftrun report --png`` and ``--svg``: for a chat or a wiki. matplotlib draws it."""

import importlib.util
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from . import Report
from .look import LOOKS, SHAPES, clean, moment, per_cent, shape_of, shortened, summary, ticks
from .timeline import STATES, Timeline, shares_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NEEDS = "needs matplotlib: pip install 'ft-wrapper[plot]'"

_WIDTH = 12.8  # of the picture; all in inches
_SIDE, _CHARACTER = 0.35, 0.072
_HEAD, _BAR, _LEGEND, _AXIS, _GAP = 1.0, 0.34, 0.22, 0.75, 0.35
_LINE = 0.19  # of text
_A_LINE = 180  # characters
_LISTED = 20  # of what happened; the rest is counted
_IN_A_ROW = 4  # of the legend
_MARK, _INK, _SOFT, _STRIPE = "#b00020", "#1b1f24", "#59636e", ("#f2f4f7", "#e6eaef")


def check(who: str) -> None:
    """Checks that there is what draws.

    Args:
        who: wants it.

    Raises:
        ImportError: there is none.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(f"{who} {NEEDS}")


def draw(jobs: Sequence[tuple[Report, Timeline]], file: BinaryIO, kind: str) -> None:
    """Draws jobs, one below the other.

    Args:
        jobs: what is drawn.
        file: where to.
        kind: ``png`` or ``svg``.

    Raises:
        ImportError: matplotlib is not there.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [_height(report, timeline) for report, timeline in jobs]
    # The same picture is the same file.
    style: dict[str, Any] = {"svg.hashsalt": "ft_wrapper", "font.size": 9, "hatch.linewidth": 0.5}
    with matplotlib.rc_context({**style, "text.color": _INK, "text.parse_math": False}):
        figure = Figure(figsize=(_WIDTH, sum(heights)), facecolor="white")
        FigureCanvasAgg(figure)
        top = sum(heights)
        for (report, timeline), height in zip(jobs, heights, strict=True):
            _Job(figure, report, timeline, top).draw()
            top -= height
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(file, format=kind, dpi=100, metadata=metadata)


def _rows(timeline: Timeline) -> float:
    count = max(len(timeline.lines), 1)
    return count * (0.26 if count <= 24 else 0.15)


def _legend(report: Report) -> float:
    return _LEGEND * -(-len(shares_of(report.time)) // _IN_A_ROW) + _GAP


def _height(report: Report, timeline: Timeline) -> float:
    listed = sum(map(len, _listed(timeline))) * _LINE
    return _HEAD + _BAR + _legend(report) + _rows(timeline) + _AXIS + listed + _GAP


def _listed(timeline: Timeline) -> list[list[str]]:
    """What happened, in lines."""
    found = []
    for incident in timeline.incidents[:_LISTED]:
        said = clean(f"{incident.number}.  {moment(incident.at, timeline.seconds)}: {incident.line}")
        found.append(textwrap.wrap(" ".join(said.split()), _A_LINE, subsequent_indent="    ", max_lines=3))
    rest = len(timeline.incidents) - len(found)
    return [*found, [f"and {rest} more"]] if rest > 0 else found


class _Job:
    """Draws one job.

    Args:
        figure: where.
        report: of it.
        timeline: of it.
        top: where its part begins, in inches from the bottom.
    """

    def __init__(self, figure: "Figure", report: Report, timeline: Timeline, top: float) -> None:
        self._figure, self._report, self._timeline = figure, report, timeline
        self._top = top
        self._height = float(figure.get_size_inches()[1])

    def draw(self) -> None:
        """Draws all of it, from above to below."""
        timeline = self._timeline
        self._head()
        at = self._top - _HEAD - _BAR
        self._bar(self._axes(at, _BAR, _SIDE))
        at -= _legend(self._report) + _rows(timeline)
        longest = max(map(len, self._names()), default=0)
        axes = self._axes(at, _rows(timeline), _SIDE + 0.15 + max(longest, 9) * _CHARACTER)
        self._bands(axes)
        self._lines(axes)
        self._incidents(axes)
        at -= _AXIS
        for lines in _listed(timeline):
            for line in lines:
                self._text(_SIDE, at, line)
                at -= _LINE

    def _axes(self, bottom: float, height: float, left: float) -> "Axes":
        width = (_WIDTH - left - _SIDE) / _WIDTH
        axes = self._figure.add_axes((left / _WIDTH, bottom / self._height, width, height / self._height))
        axes.spines[:].set_visible(False)
        return axes

    def _text(self, x: float, y: float, text: str, **style: Any) -> None:
        self._figure.text(x / _WIDTH, y / self._height, clean(text), **style)

    def _head(self) -> None:
        report, top = self._report, self._top
        goodput = "unknown" if report.goodput is None else per_cent(report.goodput)
        job = f"job {report.job}" if report.job else "job without a name"
        self._text(_SIDE, top - 0.4, shortened(job, 60), fontsize=13, fontweight="bold")
        facts = [f"{name} {value}" for name, value in summary(self._timeline, report.hosts)]
        time = report.time
        if report.goodput is not None:
            facts.append(f"steps: {time.steps:,} done, {time.steps_again:,} done again")
        facts.append(f"restarts: {len(report.restarts)}")
        self._text(_SIDE, top - 0.68, "   ·   ".join(facts), color=_SOFT)
        right = _WIDTH - _SIDE
        self._text(right, top - 0.52, goodput, fontsize=30, fontweight="bold", ha="right")
        self._text(right, top - 0.74, "goodput", color=_SOFT, ha="right")

    def _bar(self, axes: "Axes") -> None:
        from matplotlib.patches import Patch

        axes.set(xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[])
        at, patches = 0.0, []
        for state, share in shares_of(self._report.time):
            style = _style(state.name)
            axes.broken_barh([(at, share)], (0, 1), **style)
            patches.append(Patch(label=f"{per_cent(share)} {state.title}", **style))
            at += share
        if patches:
            axes.legend(
                handles=patches,
                loc="upper left",
                bbox_to_anchor=(0, -0.1),
                ncols=_IN_A_ROW,
                frameon=False,
                borderaxespad=0,
                handlelength=1.4,
            )

    def _names(self) -> list[str]:
        return [shortened(clean(line.name), 30) for line in self._timeline.lines]

    def _bands(self, axes: "Axes") -> None:
        timeline = self._timeline
        count = max(len(timeline.lines), 1)
        axes.set(xlim=(0, timeline.seconds or 1), ylim=(count, 0))
        names = self._names()
        axes.set_yticks(
            [place + 0.5 for place in range(len(names))], names, fontsize=8 if count <= 24 else 6.5
        )
        marks = ticks(timeline.seconds)
        axes.set_xticks([at for at, _ in marks], [text for _, text in marks])
        axes.tick_params(length=0, colors=_SOFT)
        free_from = 0.0
        axes.text(0, count, "iteration ", fontsize=7, color=_SOFT, va="top", ha="right")
        for place, band in enumerate(timeline.bands):
            axes.axvspan(band.begin, band.end, color=_STRIPE[place % 2], linewidth=0, zorder=0)
            if band.begin >= free_from:
                axes.text(band.begin, count, f" {band.number}", fontsize=7, color=_SOFT, va="top")
                free_from = band.begin + timeline.seconds / 50
        axes.xaxis.set_tick_params(pad=12)

    def _lines(self, axes: "Axes") -> None:
        from matplotlib.collections import PolyCollection

        for place, line in enumerate(self._timeline.lines):
            bottoms = [0.0] * len(line.segments)
            for state in STATES:
                boxes = []
                for number, segment in enumerate(line.segments):
                    share = segment.shares.get(state.name, 0.0)
                    if share:
                        low, high = (
                            place + 0.92 - 0.84 * min(at, 1.0)
                            for at in (bottoms[number], bottoms[number] + share)
                        )
                        x = (segment.begin, segment.end)
                        boxes.append([(x[0], low), (x[0], high), (x[1], high), (x[1], low)])
                        bottoms[number] += share
                if boxes:
                    axes.add_collection(PolyCollection(boxes, **_style(state.name)))

    def _incidents(self, axes: "Axes") -> None:
        timeline = self._timeline
        free_from = 0.0
        for incident in timeline.incidents:
            axes.axvline(incident.at, color=_MARK, linewidth=0.7, linestyle=(0, (3, 3)))
            if incident.at >= free_from:
                style = {"boxstyle": "round,pad=0.25", "facecolor": _MARK, "edgecolor": "none"}
                axes.text(
                    incident.at,
                    -0.12,
                    str(incident.number),
                    color="white",
                    fontsize=7,
                    ha="center",
                    bbox=style,
                )
                free_from = incident.at + timeline.seconds / 60
        for mark in timeline.marks:
            shape = SHAPES[shape_of(mark.incident.kind)][1]
            axes.plot(
                mark.incident.at,
                mark.line + 0.5,
                shape,
                color=_MARK,
                markersize=7,
                markeredgecolor="white",
                markeredgewidth=0.8,
            )


def _style(state: str) -> dict[str, Any]:
    look = LOOKS[state]
    return {
        "facecolor": look.light,
        "hatch": look.hatch or None,
        "edgecolor": look.ink or "none",
        "linewidth": 0,
    }
