"""The page of ``ftrun report --html``: one file without scripts, which needs no network."""

import collections
import dataclasses
import datetime
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .._text import duration, plural
from . import NO_STEPS, Report
from .goodput import BUCKETS
from .restarts import PHASES, Incident
from .timeline import Row, Seat, Span, Timeline

#: More rows than this cannot be read.
MOST_ROWS = 64

_WIDTH, _BEFORE, _BEHIND = 1224, 8, 26  # pixels: of a timeline with its names, and beside it
_CHARACTER, _MOST_CHARACTERS = 6.7, 26  # of a name
# What no XML may have, and what no file can: a message may have been cut in the middle of a character.
_UNFIT = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_TICKS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


@dataclasses.dataclass(frozen=True)
class Activity:
    """What a rank does, as the page shows it: some related buckets of `goodput`.

    Args:
        name: of its colour and pattern in the page's style sheet.
        title: what it is called.
        buckets: see `goodput.BUCKETS`.
    """

    name: str
    title: str
    buckets: tuple[str, ...]


STATES = (
    Activity("new", "new steps", ("useful_steps",)),
    Activity("untold", "training, steps unknown", ("steps_unknown",)),
    Activity("slow", "slowed by a rank", ("slow",)),
    Activity("again", "steps done again, or cut short", ("wasted_progress",)),
    Activity("start", "starting and loading", ("initialization", "training_prep")),
    Activity("hang", "hanging, not noticed yet", ("detection",)),
    Activity("restart", "restarting", tuple(f"recovery_{phase}" for phase in PHASES)),
    Activity("waiting", "waiting for ranks or nodes", ("waiting",)),
    Activity("spare", "idle spare", ("idle_spare",)),
    Activity("gone", "gone", ("gone",)),
    Activity("over", "after the call, or between two", ("after_end", "other")),
)
STATE_OF = {bucket: state for state in STATES for bucket in state.buckets}
_IN_FUNCTION = ("useful_steps", "slow", "steps_unknown", "wasted_progress", "training_prep", "detection")

_SHAPES = {
    "raised": ("exception", "out_of_memory", "base_exception"),
    "hung": ("soft_timeout", "hard_timeout"),
    "died": ("terminated", "unresponsive", "monitor_process_exception", "unknown"),
    "asked": ("drained", "requested"),
    "joined": ("join",),
}
#: The mark of an incident: which shape, by the kind of its likeliest cause.
SHAPE_OF = {kind: shape for shape, kinds in _SHAPES.items() for kind in kinds}


@dataclasses.dataclass(frozen=True)
class Line:
    """A row of the picture: a rank.

    Args:
        name: its name.
        seat: its host and slot.
        spans: what it did, by the clock of the job; each as the first bucket of its state.
    """

    name: str
    seat: Seat
    spans: Sequence[Span]


class Picture:
    """A job as the page shows it.

    Args:
        report: of the job.

    Attributes:
        lines: its rows; of more than `MOST_ROWS` ranks those in which something happened come first.
        bands: the iterations: number, begin and end of each.
        shares: the states that occurred, and their shares of the time, from 0 to 1.
        left: pixels of the names of the rows.
    """

    def __init__(self, report: Report) -> None:
        self.report, self.seconds = report, report.timeline.seconds
        self.lines = list(_lines(report))
        self.bands = _bands(report.time.rows, report.timeline)
        time = report.time
        shares = [(state, sum(map(time.share, state.buckets))) for state in STATES]
        self.shares = [(state, share) for state, share in shares if share > 0]
        self.left = 10 + round(
            _CHARACTER * max((len(shortened(line.name)) for line in self.lines), default=0)
        )

    @property
    def began(self) -> str:
        """When the job began, for people; empty if that is not known."""
        began = self.report.timeline.began
        utc = None if began is None else datetime.datetime.fromtimestamp(began, datetime.UTC)
        return f"{utc:%Y-%m-%d %H:%M:%S} UTC" if utc else ""

    def x(self, at: float) -> float:
        """Where a moment is, in pixels."""
        width = _WIDTH - self.left - _BEFORE - _BEHIND
        return round(_BEFORE + width * (min(max(at / self.seconds, 0.0), 1.0) if self.seconds else 0.0), 1)

    def marks(self) -> Iterator[tuple[Incident, int]]:
        """Which incident is marked in which row."""
        for incident in self.report.incidents:
            for number, line in enumerate(self.lines):
                if line.seat in incident.seats:
                    yield incident, number

    def badges(self) -> list[tuple[float, float, str, Sequence[Incident]]]:
        """Where the numbers are: middle, width, text, and which incidents. No two overlap."""
        found: list[tuple[float, float, str, Sequence[Incident]]] = []
        for incident in self.report.incidents:
            together: list[Incident] = [incident]
            while True:
                x = (self.x(together[0].at) + self.x(incident.at)) / 2
                text = "-".join(dict.fromkeys(str(one.number) for one in (together[0], incident)))
                width = max(19.0, 10 + 7.2 * len(text))
                if not found or found[-1][0] + found[-1][1] / 2 + 1 <= x - width / 2:
                    break
                together = [*found.pop()[3], *together]
            found.append((x, width, text, together))
        return found


def make_page(reports: Sequence[Report]) -> str:
    """Makes the page.

    Args:
        reports: a section for each.

    Raises:
        ImportError: Jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ImportError("--html needs Jinja2: pip install jinja2") from error
    loader = jinja2.PackageLoader(__package__ or "", "")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    words = (duration, moment, per_cent, plural, shortened)
    environment.filters.update({function.__name__: function for function in words})
    environment.globals.update(BUCKETS=BUCKETS, PHASES=PHASES, STATES=STATES, NO_STEPS=NO_STEPS)
    environment.globals.update(STATE_OF=STATE_OF, SHAPE_OF=SHAPE_OF, ticks=ticks)
    pictures = [Picture(report) for report in reports]
    return clean(environment.get_template("page.html.j2").render(jobs=pictures))


# Rows ------------------------------------------------------------------------------------------------------


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts names as people do: ``node9`` before ``node10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _lines(report: Report) -> Iterator[Line]:
    timeline, rows = report.timeline, report.time.rows
    is_one_host = len({row.host for row in rows}) == 1
    marked = {seat for incident in report.incidents for seat in incident.seats}

    def order(row: Row) -> tuple[bool, int, list[tuple[int, str]]]:
        is_quiet = len(rows) > MOST_ROWS and (row.host, row.slot) not in marked
        return is_quiet, row.slot, natural(row.host)

    for row in sorted(rows, key=order)[:MOST_ROWS]:
        name = f"slot {row.slot}" + ("" if is_one_host else f" on {row.host}")
        yield Line(name, (row.host, row.slot), list(_spans_of(row, timeline.clocks[row.host])))


def _spans_of(row: Row, began: float) -> Iterator[Span]:
    for _, found in itertools.groupby(row.spans, key=lambda span: STATE_OF[span.kind]):
        spans = list(found)
        yield Span(spans[0].begin - began, spans[-1].end - began, spans[0].kind)


def _bands(rows: Iterable[Row], timeline: Timeline) -> list[tuple[int, float, float]]:
    found: Mapping[str, list[float]] = collections.defaultdict(list)
    for row in rows:
        for span in row.spans:
            if span.kind in _IN_FUNCTION and span.iteration in timeline.iterations:
                found[span.iteration] += [at - timeline.clocks[row.host] for at in (span.begin, span.end)]
    bands = [(timeline.iterations[n].number, min(times), max(times)) for n, times in found.items()]
    return sorted(bands, key=lambda band: band[1])


# Words -----------------------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """A text without what a file may not contain."""
    return _UNFIT.sub("\ufffd", text)


def shortened(text: str, most: int = _MOST_CHARACTERS) -> str:
    """A text of at most ``most`` characters: the excess is left out in the middle."""
    left = (most - 1) // 2
    return text if len(text) <= most else f"{text[:left]}…{text[len(text) - (most - 1 - left) :]}"


def per_cent(share: float) -> str:
    """A share in words, with as many digits as are meaningful."""
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def ticks(seconds: float, most: int = 11) -> list[tuple[float, str]]:
    """Moments to be named on the axis of time.

    Args:
        seconds: how long it is.
        most: the most of them.
    """
    least = seconds / (most - 1)
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    short = [power * factor for factor in (1, 2, 5, 10)] if least < 1 else []
    steps = [*short, *_TICKS, math.ceil(least / _DAY) * _DAY]
    step = next(step for step in steps if step >= least)
    found = (min(number * step, seconds) for number in range(math.floor(seconds / step + 1e-9) + 1))
    return [(at, f"{at:.3g} s" if seconds <= 2 * _MINUTE else moment(at, seconds)) for at in found]


def moment(at: float, seconds: float) -> str:
    """A moment, in the form that fits a job of this length.

    Args:
        at: seconds since the beginning.
        seconds: how long the job took.
    """
    whole = round(at)
    if seconds <= 2 * _MINUTE:
        return f"{at:.1f} s" if seconds > 5 else f"{at:.3f} s"
    if seconds <= 2 * _HOUR:
        return f"{whole // _MINUTE}:{whole % _MINUTE:02} min"
    if seconds <= 2 * _DAY:
        return f"{whole // _HOUR}:{whole % _HOUR // _MINUTE:02} h"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"
