"""What the time of a job went to: from its events to buckets that add up.

Every seat (a slot on a host) is in one bucket at any moment, from the first event of its host to the last
one, so the buckets add up to the time of all seats. Names are those of Google's ``ml-goodput-measurement``
where it has one. Clocks of different hosts are not compared.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence

from .steps import Part, Steps, Told, read_steps
from .timeline import Row, Span, Timeline

#: What time goes to, and what counts for it.
BUCKETS = {
    "useful_steps": "steps not done before",
    "steps_unknown": "training; the function told no steps",
    "wasted_progress": "steps done again, or cut short by a fault",
    "initialization": "start of processes, and imports",
    "training_prep": "from the function's start to its first step",
    "detection": "from the last progress until a hang is noticed",
    "recovery_notify": "from the fault until this rank knows of it",
    "recovery_abort": "until its process groups are aborted",
    "recovery_leave": "until it is out of the function",
    "recovery_arrive": "until it has passed its checks",
    "recovery_decide": "until all are back and have their ranks",
    "recovery_enter": "until it is in the function again",
    "waiting": "for ranks or nodes that come or return",
    "idle_spare": "a spare that has nothing to do",
    "gone": "no process, or none yet for a dead one",
    "after_end": "after the last wrapped call",
    "other": "between two wrapped calls",
}


@dataclasses.dataclass(frozen=True)
class Goodput:
    """What the time of a job went to.

    Args:
        seconds: how long the job took, by the host that saw most of it.
        seat_seconds: of all seats together: what the buckets add up to.
        buckets: seat-seconds by name, see `BUCKETS`; those that are empty are not there.
        rows: each seat with its spans, one after the other.
        steps: how many steps were done; each counts once.
        steps_again: how many were done again, each time they were.
    """

    seconds: float
    seat_seconds: float
    buckets: dict[str, float]
    rows: tuple[Row, ...]
    steps: int
    steps_again: int

    @property
    def goodput(self) -> float | None:
        """The share of useful steps, from 0 to 1; None if the function told no steps."""
        is_unknown = not self.steps and ("steps_unknown" in self.buckets or not self.rows)
        return None if is_unknown else self.share("useful_steps")

    @property
    def without_spares(self) -> float:
        """The share of useful steps in the time of those that were no idle spares, from 0 to 1."""
        in_use = self.seat_seconds - self.buckets.get("idle_spare", 0.0)
        return self.buckets.get("useful_steps", 0.0) / in_use if in_use else 0.0

    def share(self, bucket: str) -> float:
        """The share of a bucket, from 0 to 1."""
        return self.buckets.get(bucket, 0.0) / self.seat_seconds if self.seat_seconds else 0.0


def make_goodput(timeline: Timeline) -> Goodput:
    """Works out what the time of a job went to.

    Args:
        timeline: of the job.
    """
    steps, faults = read_steps(timeline), _Faults(timeline)
    buckets: dict[str, float] = collections.defaultdict(float)
    rows = []
    for row in timeline.rows:
        parts = [part for span in row.spans for part in _taken_apart(row, span, steps, faults)]
        rows.append(dataclasses.replace(row, spans=parts))
        for span in rows[-1].spans:
            buckets[span.kind] += span.end - span.begin
    return Goodput(
        seconds=max((row.end - row.begin for row in rows), default=0.0),
        seat_seconds=sum(row.end - row.begin for row in rows),
        buckets={name: buckets[name] for name in BUCKETS if name in buckets},
        rows=tuple(rows),
        steps=sum(part.new for part in steps.parts.values()),
        steps_again=sum(part.again for part in steps.parts.values()),
    )


class _Faults:
    """When each iteration's fault was noticed, and since when it had made no progress."""

    def __init__(self, timeline: Timeline) -> None:
        # Of each host and iteration, and of all hosts: how long that took to be noticed.
        self._noticed: dict[tuple[str, str], float] = {}
        self._still: dict[tuple[str, str], float] = {}
        self._longest: dict[str, float] = collections.defaultdict(float)
        for n, iteration in timeline.iterations.items():
            for record in iteration.ending():
                key, moment = (record["host"], n), float(record["monotonic"])
                since = min(float(record.get("since", moment)), moment)
                self._noticed[key] = min(moment, self._noticed.get(key, moment))
                self._longest[n] = max(moment - since, self._longest[n])
                if since < moment:
                    self._still[key] = min(since, self._still.get(key, since))

    def of(self, host: str, span: Span) -> tuple[float, float]:
        """Until when a function ran, and until when it made progress, as far as is known on its host."""
        key = host, span.iteration
        noticed = min(max(self._noticed.get(key, span.end), span.begin), span.end)
        # Its host may not have had the fault itself; how long that took to be noticed goes for all hosts.
        still = self._still.get(key, noticed - self._longest[span.iteration])
        return noticed, min(max(still, span.begin), noticed)


def _taken_apart(row: Row, span: Span, steps: Steps, faults: _Faults) -> Iterator[Span]:
    """A span of the function as what it was in truth; any other one as it is."""
    if span.kind != "function":
        yield span
        return
    noticed, still = faults.of(row.host, span)
    life = next(life for life in reversed(row.lives) if life.born <= span.begin)
    told = steps.told.get((row.host, row.slot, life.incarnation), {}).get(span.iteration, [])
    at = span.begin
    for kind, end in (
        *_parts(row, span, told, steps, still),
        ("detection", noticed),
        ("recovery_notify", span.end),
    ):
        end = min(max(end, at), span.end)
        if end > at:
            yield Span(at, end, kind, span.iteration)
        at = end


def _parts(
    row: Row, span: Span, told: Sequence[Told], steps: Steps, end: float
) -> Iterator[tuple[str, float]]:
    """What the function did, and until when it did that; up to where it made progress last."""
    if not told:
        had_none_yet = steps.had_none_yet(row.host, row.slot, span.iteration)
        yield ("training_prep" if had_none_yet else "steps_unknown"), end
        return
    yield "training_prep", min(told[0].points[0][0], end)
    for place, here in enumerate(told):
        until = told[place + 1].points[0][0] if place + 1 < len(told) else end
        yield from _of_steps(here, steps.parts[span.iteration, place], min(until, end))


def _of_steps(here: Told, part: Part, end: float) -> Iterator[tuple[str, float]]:
    """Steps done again, new ones, and the one that was cut short."""
    is_whole = here.last < part.done
    cut = end if is_whole else here.points[-1][0]
    new = here.first if part.begun is None else max(part.begun, here.first)
    yield "wasted_progress", min(here.began(new) if new <= here.last else end, end)
    yield "useful_steps", min(cut, end)
    yield "wasted_progress", end
