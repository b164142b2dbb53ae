"""A job as people look at it: what each rank did when, on one clock. Rows, bands and marks; no drawing.

The spans are those that `goodput` has. Beyond `MOST_ROWS` ranks a row is a node, or several, and has the
share of its ranks in each state. Nodes in which something happened keep a row of their own.
"""

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .._text import plural
from .goodput import Goodput
from .incidents import Incident, Seat, find_incidents, natural
from .rows import Record, Row, iteration_name

MOST_ROWS = 64
"""So many rows can be looked at."""

_COLUMNS = 500  # into which the time of a folded row is cut
_MOST_SPANS = 400  # of one rank that are shown as they are
_LEAST = 1 / 256  # a smaller share is not seen


@dataclasses.dataclass(frozen=True)
class Activity:
    """What a rank does, as the pictures tell it: some buckets of `goodput` that belong together.

    Args:
        name: a word for programs.
        title: what it is called.
        buckets: see `goodput.BUCKETS`.
    """

    name: str
    title: str
    buckets: tuple[str, ...]


_RESTART = ("told", "abort", "leave", "arrive", "decide", "enter")
STATES = (
    Activity("new", "new steps", ("useful_steps",)),
    Activity("untold", "training, steps unknown", ("steps_unknown",)),
    Activity("again", "steps done again, or cut short", ("wasted_progress",)),
    Activity("start", "starting and loading", ("initialization", "training_prep")),
    Activity("hang", "hanging, not noticed yet", ("detection",)),
    Activity("restart", "restarting", tuple(f"recovery_{phase}" for phase in _RESTART)),
    Activity("waiting", "waiting for ranks or nodes", ("waiting",)),
    Activity("spare", "idle spare", ("idle_spare",)),
    Activity("gone", "gone", ("gone",)),
    Activity("over", "after the call, or between two", ("after_end", "other")),
)
STATE_OF = {bucket: state for state in STATES for bucket in state.buckets}
_IN_FUNCTION = ("useful_steps", "steps_unknown", "wasted_progress", "training_prep", "detection")


@dataclasses.dataclass(frozen=True)
class Segment:
    """What a row did for a while.

    Args:
        begin: seconds since the begin of the job.
        end: likewise.
        shares: of the row's ranks, by the name of the state; those that are missing had no seat then.
    """

    begin: float
    end: float
    shares: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Line:
    """A row of the picture.

    Args:
        name: the rank, the node, or the first and the last one of several.
        seats: who is in it: host and slot of each.
        hosts: how many nodes that are.
        segments: one after the other.
    """

    name: str
    seats: frozenset[Seat]
    hosts: int
    segments: tuple[Segment, ...]

    @property
    def size(self) -> str:
        """How many ranks it has, and of how many nodes, in words; empty if it is one rank."""
        ranks = f"{len(self.seats)} {plural(len(self.seats), 'rank')}"
        return "" if len(self.seats) == 1 else ranks if self.hosts == 1 else f"{self.hosts} nodes, {ranks}"


@dataclasses.dataclass(frozen=True)
class Band:
    """An iteration, while any rank was in the function.

    Args:
        number: its number.
        begin: seconds since the begin of the job.
        end: likewise.
    """

    number: int
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Mark:
    """An incident in a row.

    Args:
        incident: which one.
        line: the row, by its place.
        seats: the ranks of that row that caused it.
    """

    incident: Incident
    line: int
    seats: tuple[Seat, ...]


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A job as a picture shows it.

    Args:
        began: when it began, in seconds since the epoch; None if the events do not say so.
        seconds: how long it took.
        ranks: how many seats there were.
        lines: its rows.
        bands: its iterations.
        incidents: what ended them.
        marks: where.
    """

    began: float | None
    seconds: float
    ranks: int
    lines: tuple[Line, ...]
    bands: tuple[Band, ...]
    incidents: tuple[Incident, ...]
    marks: tuple[Mark, ...]

    @property
    def is_folded(self) -> bool:
        """Whether a row is more than one rank."""
        return len(self.lines) < self.ranks


def shares_of(time: Goodput) -> list[tuple[Activity, float]]:
    """The states that there were, and their shares of the time, from 0 to 1."""
    shares = [(state, sum(map(time.share, state.buckets))) for state in STATES]
    return [(state, share) for state, share in shares if share > 0]


def make_timeline(records: Iterable[Record], time: Goodput) -> Timeline:
    """Makes the timeline of one job.

    Args:
        records: its events, of all hosts, in any order.
        time: what `goodput.make_goodput` has made of them.
    """
    records = list(records)
    clocks = _clocks(records, time.rows)
    incidents = find_incidents(records, time.rows, clocks)
    seconds = max((row.end - clocks[row.host] for row in time.rows), default=0.0)
    eventful = collections.Counter(seat for incident in incidents for seat in incident.seats)
    folded = _folded(sorted(time.rows, key=_place), eventful)
    lines = tuple(_line(rows, clocks, seconds) for rows in folded)
    at = {seat: number for number, line in enumerate(lines) for seat in line.seats}
    marks = []
    for incident in incidents:
        there = collections.defaultdict(list)
        for seat in incident.seats:
            if seat in at:
                there[at[seat]].append(seat)
        marks += [Mark(incident, line, tuple(seats)) for line, seats in there.items()]
    return Timeline(
        began=_began(records, clocks),
        seconds=seconds,
        ranks=len(time.rows),
        lines=lines,
        bands=_bands(records, time.rows, clocks),
        incidents=incidents,
        marks=tuple(marks),
    )


# One clock -----------------------------------------------------------------------------------------------


def _clocks(records: Sequence[Record], rows: Sequence[Row]) -> dict[str, float]:
    """What each host's clock showed when the job began.

    All hosts hear of a decision within milliseconds, which the time of day does not say so well. It is used
    for a host that shares no iteration with the others.
    """
    heard: dict[str, dict[str, float]] = {}
    ahead: dict[str, float] = {}  # of the time of day
    for record in records:
        host, at = str(record["host"]), float(record["monotonic"])
        seen = heard.setdefault(host, {})
        if "time" in record and host not in ahead:
            ahead[host] = at - float(record["time"])
        if record["event"] in ("decided", "enter"):
            n = iteration_name(record)
            seen[n] = min(at, seen.get(n, at))
    if not heard:
        return {}
    first = max(heard, key=lambda host: len(heard[host]))
    begins: dict[str, float] = {}
    for row in rows:
        begins[row.host] = min(row.begin, begins.get(row.host, row.begin))
    offsets: dict[str, float] = {}
    for host, seen in heard.items():
        apart = [at - heard[first][n] for n, at in seen.items() if n in heard[first]]
        if apart:
            offsets[host] = statistics.median(apart)
        elif host in ahead and first in ahead:
            offsets[host] = ahead[host] - ahead[first]
        else:
            offsets[host] = begins.get(host, 0.0) - begins.get(first, 0.0)
    begin = min((at - offsets[host] for host, at in begins.items()), default=0.0)
    return {host: begin + offset for host, offset in offsets.items()}


def _began(records: Iterable[Record], clocks: Mapping[str, float]) -> float | None:
    said = (
        float(record["time"]) - float(record["monotonic"]) + clocks[str(record["host"])]
        for record in records
        if "time" in record
    )
    return next(said, None)


# Rows ----------------------------------------------------------------------------------------------------


def _place(row: Row) -> tuple[list[tuple[int, str]], int]:
    return natural(row.host), row.slot


def _folded(rows: Sequence[Row], eventful: Mapping[Seat, int]) -> Iterator[Sequence[Row]]:
    """Which seats go into one row: as few as the number of rows allows."""
    if len(rows) <= MOST_ROWS:
        yield from ([row] for row in sorted(rows, key=lambda row: row.slot))
        return
    hosts = [list(found) for _, found in itertools.groupby(rows, key=lambda row: row.host)]
    units = hosts if len(hosts) > 1 else [[row] for row in rows]
    if len(units) <= MOST_ROWS:
        yield from units
        return
    happened = [sum(eventful.get((row.host, row.slot), 0) for row in unit) for unit in units]
    most = sorted(
        (place for place, count in enumerate(happened) if count), key=lambda place: -happened[place]
    )
    own = sorted(most[: 3 * MOST_ROWS // 4])
    yield from (units[place] for place in own)
    quiet = [unit for place, unit in enumerate(units) if place not in set(own)]
    size = math.ceil(len(quiet) / (MOST_ROWS - len(own)))
    for place in range(0, len(quiet), size):
        yield [row for unit in quiet[place : place + size] for row in unit]


def _line(rows: Sequence[Row], clocks: Mapping[str, float], seconds: float) -> Line:
    hosts = list(dict.fromkeys(row.host for row in rows))
    first, last = rows[0], rows[-1]
    if len(rows) == 1:
        name = f"slot {first.slot} on {first.host}" if len(clocks) > 1 else f"slot {first.slot}"
    elif len(clocks) == 1:
        name = f"slots {first.slot} to {last.slot}"
    else:
        name = hosts[0] if len(hosts) == 1 else f"{hosts[0]} … {hosts[-1]}"
    is_exact = len(rows) == 1 and len(first.spans) <= _MOST_SPANS
    segments = _exact(first, clocks[first.host]) if is_exact else _mixed(rows, clocks, seconds)
    return Line(name, frozenset((row.host, row.slot) for row in rows), len(hosts), tuple(segments))


def _exact(row: Row, began: float) -> Iterator[Segment]:
    for state, found in itertools.groupby(row.spans, key=lambda span: STATE_OF[span.kind]):
        spans = list(found)
        yield Segment(spans[0].begin - began, spans[-1].end - began, {state.name: 1.0})


def _mixed(rows: Sequence[Row], clocks: Mapping[str, float], seconds: float) -> Iterator[Segment]:
    """The share of each state, column by column; columns that look the same are one."""
    width = seconds / _COLUMNS
    if width <= 0:
        return
    times = {state.name: _Columns(width) for state in STATES}
    for row in rows:
        began = clocks[row.host]
        for span in row.spans:
            times[STATE_OF[span.kind].name].add(span.begin - began, span.end - began)
    sums = {name: columns.sums() for name, columns in times.items() if columns.is_used}
    whole = width * len(rows)
    before: dict[str, float] = {}
    begin = 0
    for column in range(_COLUMNS + 1):
        shares = {
            name: round(own[column] / whole, 3)
            for name, own in sums.items()
            if column < _COLUMNS and own[column] >= _LEAST * whole
        }
        if shares != before:
            if before:
                yield Segment(begin * width, column * width, before)
            begin, before = column, shares


class _Columns:
    """Adds up in each column of time for how long something was so; each span takes the same few steps."""

    def __init__(self, width: float) -> None:
        self.is_used = False
        self._width = width
        self._part = [0.0] * (_COLUMNS + 2)  # of one column
        self._from = [0] * (_COLUMNS + 2)  # in how many more spans than before a whole column is

    def add(self, begin: float, end: float) -> None:
        """It was so from begin to end."""
        self.is_used = True
        width = self._width
        first, last = (min(max(int(at / width), 0), _COLUMNS) for at in (begin, end))
        if first == last:
            self._part[first] += end - begin
            return
        self._part[first] += (first + 1) * width - begin
        self._part[last] += end - last * width
        self._from[first + 1] += 1
        self._from[last] -= 1

    def sums(self) -> list[float]:
        """Seconds in each column."""
        whole = itertools.accumulate(self._from)
        return [part + spans * self._width for part, spans in zip(self._part, whole, strict=True)]


# Iterations ----------------------------------------------------------------------------------------------


def _bands(records: Iterable[Record], rows: Iterable[Row], clocks: Mapping[str, float]) -> tuple[Band, ...]:
    numbers = {
        iteration_name(record): record["iteration"]
        for record in records
        if isinstance(record.get("iteration"), int) and record["iteration"] >= 0
    }
    found: dict[str, tuple[float, float]] = {}
    for row in rows:
        began = clocks[row.host]
        for span in (span for span in row.spans if span.kind in _IN_FUNCTION):
            begin, end = span.begin - began, span.end - began
            first, last = found.get(span.iteration, (begin, end))
            found[span.iteration] = min(begin, first), max(end, last)
    bands = (Band(numbers[n], *times) for n, times in found.items() if n in numbers)
    return tuple(sorted(bands, key=lambda band: band.begin))
