"""What a job's time went to: from its events to buckets that add up.

Every seat (a slot on a host) is in one bucket at any moment, from the first event of its host to the last
one, so the buckets add up to the time of all seats. Names are those of Google's ``ml-goodput-measurement``
where it has one. Clocks of different hosts are not compared.
"""

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .timeline import Iteration, Row, Seat, Span, Timeline, nonce_of

#: What time goes to, and what counts for it.
BUCKETS = {
    "useful_steps": "steps not done before",
    "slow": "what new steps would not have taken without slow ranks",
    "steps_unknown": "training; the function reported no steps",
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


# Steps: which were done again, from what the ranks reported -------------------------------------------------

Key = tuple[str, int]  # an iteration; and how often its function had gone back
Process = tuple[str, int, int]  # a host, a slot, an incarnation


@dataclasses.dataclass
class Told:
    """The steps that one process reported in an iteration, until its function went back.

    Args:
        points: when a step began, and its number: the first one, the last one, and some between.
        has_returned: whether the function returned after the last one.
    """

    points: list[tuple[float, int]]
    has_returned: bool = False

    @property
    def first(self) -> int:
        """The first step."""
        return self.points[0][1]

    @property
    def last(self) -> int:
        """The last step that has begun."""
        return self.points[-1][1]

    def began(self, step: int) -> float:
        """When a step between the first and the last one began; between two points as if all took equally."""
        after = bisect.bisect_left(self.points, step, key=lambda point: point[1])
        at, number = self.points[after]
        if number == step:
            return at
        before, lower = self.points[after - 1]
        return before + (at - before) * (step - lower) / (number - lower)


@dataclasses.dataclass
class Part:
    """An iteration, or the part of it before or after its function went back.

    Args:
        begun: the steps below this one were done before, by earlier iterations; None if there was none.
        first: the first step.
        done: the steps from the first one to below this one were done here.
    """

    begun: int | None
    first: int
    done: int

    @property
    def again(self) -> int:
        """How many steps were done again."""
        return 0 if self.begun is None else max(0, min(self.done, self.begun) - self.first)

    @property
    def new(self) -> int:
        """How many steps were done for the first time."""
        return max(0, self.done - self.first - self.again)


@dataclasses.dataclass
class Steps:
    """The steps of a job.

    Args:
        told: by process (host, slot, incarnation) and iteration, in order.
        parts: what was new in it and what was not.
        calls: the wrapped call of each iteration.
        reporting: by call, the seats that reported steps in it.
    """

    told: dict[Process, dict[str, list[Told]]]
    parts: dict[Key, Part]
    calls: dict[str, str]
    reporting: dict[str, set[Seat]]

    def had_none_yet(self, host: str, slot: int, iteration: str) -> bool:
        """Whether a rank that reported no step in an iteration was not that far yet; else it reports none."""
        seats = self.reporting.get(self.calls.get(iteration, ""), set())
        return (host, slot) in seats if (iteration, 0) in self.parts else bool(seats)


def read_steps(timeline: Timeline) -> Steps:
    """Reads what the ranks have reported.

    Args:
        timeline: of a job.
    """
    rows = timeline.rows
    names = {
        (row.host, life.pid): (row.host, row.slot, life.incarnation) for row in rows for life in row.lives
    }
    points: dict[Process, dict[str, list[tuple[float, int]]]] = {}
    returned: set[tuple[Process, str]] = set()
    for host, records in timeline.hosts.items():
        for record in records:
            unknown = host, record.get("slot", -1), record.get("incarnation", 0)
            who, n = names.get((host, record["pid"]), unknown), nonce_of(record)
            if record["event"] in ("returned", "done"):
                returned.add((who, n))
            if "step" in record and "began" in record:
                points.setdefault(who, {}).setdefault(n, []).append((record["began"], record["step"]))
    told = {
        who: {n: _in_order(found, (who, n) in returned) for n, found in iterations.items()}
        for who, iterations in points.items()
    }
    calls = _calls(timeline.iterations)
    reporting: dict[str, set[Seat]] = {}
    for (host, slot, _), iterations in told.items():
        for n in iterations.keys() & calls.keys():
            reporting.setdefault(calls[n], set()).add((host, slot))
    return Steps(told, _parts_of(told, timeline.iterations, calls), calls, reporting)


def _in_order(points: Iterable[tuple[float, int]], has_returned: bool) -> list[Told]:
    found: list[Told] = []
    for point in sorted(set(points)):
        if not found or point[1] < found[-1].last:
            found.append(Told([point]))
        elif point[1] > found[-1].last:
            found[-1].points.append(point)
    found[-1].has_returned = has_returned
    return found


def _calls(iterations: Mapping[str, Iteration]) -> dict[str, str]:
    """The wrapped call of each iteration, with its first iteration: each call may have a store of its own."""
    calls = {}
    for name, one in iterations.items():
        root = one
        while root.after in iterations and iterations[root.after].began is not None:
            root = iterations[root.after]
        if one.began is not None:
            calls[name] = f"{root.name}/{one.call}"
    return calls


def _parts_of(
    told: Mapping[Process, Mapping[str, list[Told]]],
    iterations: Mapping[str, Iteration],
    calls: Mapping[str, str],
) -> dict[Key, Part]:
    complete = {calls.get(one.name, "") for one in iterations.values() if one.of("done")}
    parts: dict[Key, Part] = {}
    call, begun = "", None
    newest: tuple[Part, int] | None = None  # and the last step that has begun there
    for n in calls:
        if calls[n] != call:
            if call in complete:
                begun, newest = None, None  # else the job went on there with the unfinished step
            call = calls[n]
        ranks = [own[n] for own in told.values() if n in own]
        for place in range(max(map(len, ranks), default=0)):
            here = [rank[place] for rank in ranks if place < len(rank)]
            first, last = min(each.first for each in here), max(each.last for each in here)
            if newest is not None and first == newest[1] + 1 and newest[0].done < first:
                newest[0].done = first  # it was finished, though the next one had not begun
                begun = max(begun or 0, first)
            is_last = place == max(map(len, ranks)) - 1
            done = max(each.last + each.has_returned for each in here)
            parts[n, place] = part = Part(
                begun, first, max(done, iterations[n].committed if is_last else 0, first)
            )
            newest, begun = (part, last), max(begun or 0, part.done)
    return parts


# Buckets ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Goodput:
    """What the time of a job went to.

    Args:
        seconds: how long the job took, by the host that saw most of it.
        seat_seconds: of all seats together: what the buckets add up to.
        buckets: seat-seconds by name, see `BUCKETS`; without empty ones.
        rows: each seat with its spans, in order.
        steps: how many steps were done; each counts once.
        steps_again: how many were done again, counted each time.
    """

    seconds: float
    seat_seconds: float
    buckets: dict[str, float]
    rows: tuple[Row, ...]
    steps: int
    steps_again: int

    @property
    def goodput(self) -> float | None:
        """The share of useful steps, from 0 to 1; None if the function reported no steps."""
        is_unknown = not self.steps and ("steps_unknown" in self.buckets or not self.rows)
        return None if is_unknown else self.share("useful_steps")

    @property
    def without_spares(self) -> float:
        """The share of useful steps in the time without idle spares, from 0 to 1."""
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
    steps, faults, slow = read_steps(timeline), _Faults(timeline), _SlowTimes(timeline)
    buckets: dict[str, float] = collections.defaultdict(float)
    rows = []
    for row in timeline.rows:
        parts = (part for span in row.spans for part in _taken_apart(row, span, steps, faults))
        spans = [each for part in parts for each in slow.split(row.host, part)]
        rows.append(dataclasses.replace(row, spans=spans))
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
        # Its host may not have had the fault itself; how long that took to be noticed holds for all hosts.
        still = self._still.get(key, noticed - self._longest[span.iteration])
        return noticed, min(max(still, span.begin), noticed)


class _SlowTimes:
    """When some rank was slow, and what the slowest one cost each step."""

    def __init__(self, timeline: Timeline) -> None:
        self._clocks = timeline.clocks
        self._times: list[tuple[float, float, float]] = []  # on the clock of all hosts, and the share
        opened: dict[tuple[object, ...], tuple[float, float]] = {}
        records = (one for records in timeline.hosts.values() for one in records if one["event"] == "slow")
        for record in records:
            who, at = (record["host"], record.get("slot")), timeline.at(record)
            if "share" in record:
                opened[who] = at, min(1.0, record["share"])
            elif who in opened:
                began, _ = opened.pop(who)
                self._times.append((began, at, min(1.0, record["cost"] / max(at - began, 1e-9))))
        self._times += [(began, timeline.seconds, share) for began, share in opened.values()]

    def split(self, host: str, span: Span) -> Iterator[Span]:
        """A span of new steps, without what slow ranks have cost; any other one as it is."""
        clock = self._clocks[host]
        times = [(began + clock, ended + clock, share) for began, ended, share in self._times]
        inside = {at for one in times for at in one[:2] if span.begin < at < span.end}
        if span.kind != "useful_steps":
            inside = set()
        for begin, end in itertools.pairwise([span.begin, *sorted(inside), span.end]):
            shares = (share for began, ended, share in times if began <= begin and end <= ended)
            cut = end - max(shares, default=0.0) * (end - begin) if span.kind == "useful_steps" else end
            for at, until, kind in ((begin, cut, span.kind), (cut, end, "slow")):
                if until > at:
                    yield Span(at, until, kind, span.iteration)


def _taken_apart(row: Row, span: Span, steps: Steps, faults: _Faults) -> Iterator[Span]:
    """A span of the function, split into what it really was; any other one as it is."""
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
