"""What each seat of a job did when, from the events of its processes: one row of spans for each.

A row is on one host, and all of its times are by that host's clock.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

Record = dict[str, Any]

#: What a process does from an event on, until the next one; see `goodput.BUCKETS`.
_FROM = {
    "register": "waiting",
    "enter": "function",
    "spare": "idle_spare",
    "end": "recovery_abort",
    "abort": "recovery_leave",
    "left": "recovery_arrive",
    "arrive": "recovery_decide",
    "decided": "recovery_enter",
    "returned": "waiting",
    "done": "after_end",
}
_DEADLY = ("TERMINATED", "HARD_TIMEOUT")
_SAME_START = 1.0  # seconds by which two readings of when a process began may differ


@dataclasses.dataclass(frozen=True)
class Span:
    """What a seat did for a while.

    Args:
        begin: in seconds of the host's monotonic clock.
        end: likewise.
        kind: see `goodput.BUCKETS`; ``function`` as long as it is not taken apart.
        iteration: whose it is, by nonce; empty if it is no one's.
    """

    begin: float
    end: float
    kind: str
    iteration: str = ""


@dataclasses.dataclass
class Life:
    """One process in a seat.

    Args:
        pid: which one.
        slot: the seat.
        incarnation: which process in a row.
        born: when it was started.
        died: when it ended; None if that is not known.
        events: its own, in order.
    """

    pid: int
    slot: int
    incarnation: int
    born: float
    died: float | None = None
    events: list[Record] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Row:
    """A seat on a host.

    Args:
        host: where.
        slot: the seat.
        begin: from when on,
        end: until when it counts.
        spans: one after the other, without gaps.
        lives: its processes.
    """

    host: str
    slot: int
    begin: float
    end: float
    spans: list[Span] = dataclasses.field(default_factory=list)
    lives: list[Life] = dataclasses.field(default_factory=list)


def iteration_name(record: Record) -> str:
    """What names the iteration of an event: its nonce; its number, in files of older versions."""
    return str(record.get("nonce", record.get("iteration", "")))


def by_host(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The events of each host, in their order."""
    found: dict[str, list[Record]] = collections.defaultdict(list)
    for record in records:
        found[str(record["host"])].append(record)
    return {host: sorted(found[host], key=_at) for host in sorted(found)}


def make_rows(records: Iterable[Record]) -> list[Row]:
    """Makes the rows of one job.

    Args:
        records: its events, in any order.
    """
    hosts = by_host(records)
    # Where each seat is at last. By the time of day: incarnations begin again if all is started again.
    newest: dict[int, tuple[float, str]] = {}
    for record in (each for found in hosts.values() for each in found if each["event"] == "register"):
        came = float(record["time"] if "time" in record else record["monotonic"])
        slot, where = int(record["slot"]), (came, str(record["host"]))
        newest[slot] = max(where, newest.get(slot, where))
    return [row for host, found in hosts.items() for row in _rows_of(host, found, newest)]


def _rows_of(host: str, records: Sequence[Record], newest: dict[int, tuple[float, str]]) -> Iterator[Row]:
    begin = min(min(_at(each), float(each.get("started", _at(each)))) for each in records)
    end = _at(records[-1])
    lives = _lives(records)
    first_entry = min((_at(each) for each in records if each["event"] == "enter"), default=end)
    for slot in sorted({life.slot for life in lives}):
        own = [life for life in lives if life.slot == slot]
        formed = own[0].born <= first_entry  # else the job has grown by this seat
        row = Row(host, slot, begin if formed else own[0].born, end, lives=own)
        last = own[-1]
        if last.died is not None and newest.get(slot, (0.0, host))[1] != host:
            row.end = max(last.died, row.begin)  # the seat is on another host from here on
        row.spans = list(_spans(row, records))
        yield row


def _lives(records: Sequence[Record]) -> list[Life]:
    """The processes of one host, by seat and in their order."""
    lives: dict[int, Life] = {}  # by process id
    older: list[Life] = []
    began: dict[int, float] = {}
    children: dict[int, float] = {}
    for record in records:
        pid, event, moment = int(record["pid"]), record["event"], _at(record)
        if event == "rank_started":
            children[int(record["child"])] = moment
        elif event == "register":
            started = float(record.get("started", moment))
            if pid in lives and abs(started - began.get(pid, started)) > _SAME_START:
                older.append(lives.pop(pid))  # another process has its number now
            if pid not in lives:
                began[pid] = started
                born = children.get(pid, started)
                lives[pid] = Life(pid, int(record["slot"]), int(record["incarnation"]), min(born, moment))
            lives[pid].incarnation = int(record["incarnation"])
        elif pid not in lives and event in ("decided", "enter") and "slot" in record:  # of an older version
            lives[pid] = Life(pid, int(record["slot"]), int(record.get("incarnation", 0)), moment)
        if pid in lives and event in _FROM:
            lives[pid].events.append(record)
        if event == "rank_ended" and int(record["child"]) in lives:
            life = lives[int(record["child"])]
            life.died = moment if life.died is None else min(life.died, moment)
        if event == "fault" and record.get("kind") in _DEADLY:
            for life in lives.values():
                if (life.slot, life.incarnation) == (record["slot"], record.get("incarnation", 0)):
                    life.died = moment
    return sorted([*older, *lives.values()], key=lambda life: (life.slot, life.born))


def _spans(row: Row, records: Sequence[Record]) -> Iterator[Span]:
    """The row without gaps, from its begin to its end."""
    at, before = row.begin, ""
    for life in row.lives:
        born = min(max(at, life.born), row.end)
        yield from _before(at, born, records) if not before else _span(at, born, "gone")
        following = [other.born for other in row.lives if other.born > life.born]
        end = min([row.end, *following, *([] if life.died is None else [life.died])])
        at, before = born, "initialization"
        for kind, moment, iteration in _states(life):
            moment = min(max(at, moment), end)
            yield from _span(at, moment, before, iteration)
            at, before = moment, kind
        last = life.events[-1] if life.events else None
        yield from _span(at, max(at, end), before, iteration_name(last) if last else "")
        at = max(at, end)
    # A process that has ended in order leaves no seat behind.
    yield from _span(at, row.end, "after_end" if before == "after_end" else "gone")


def _before(begin: float, end: float, records: Sequence[Record]) -> Iterator[Span]:
    """What comes before a seat's first process: the agent starts, and waits for other nodes."""
    ready = next((_at(each) for each in records if each["event"] == "agent_started"), None)
    met = next((_at(each) for each in records if each["event"] == "round_started"), None)
    if ready is None or met is None:
        yield from _span(begin, end, "initialization")
        return
    ready, met = min(max(ready, begin), end), min(max(met, begin), end)
    yield from _span(begin, ready, "initialization")
    yield from _span(ready, met, "waiting")
    yield from _span(met, end, "initialization")


def _states(life: Life) -> Iterator[tuple[str, float, str]]:
    """What a process does from each of its events on; and the iteration of what it did until then."""
    state, iteration, has_run = "initialization", "", False
    for record in life.events:
        event = record["event"]
        kind = _FROM[event]
        if event == "register" and life.incarnation and not has_run:
            kind = "idle_spare"  # the job is on: it waits to be let in
        elif event == "register" and state == "after_end":
            # What it has done since the last call was none of ours.
            yield "other", _last_done(life, record), iteration
        elif event == "arrive" and state == "waiting":
            continue  # it waits for the members of a call that is about to begin
        elif event == "decided" and state == "waiting" and (has_run or not int(record["iteration"])):
            kind = "initialization"  # the call begins: it is no restart
        yield kind, _at(record), iteration
        state = kind
        if event in ("enter", "spare", "decided"):
            iteration, has_run = iteration_name(record), has_run or event != "decided"


def _last_done(life: Life, before: Record) -> float:
    return max(_at(each) for each in life.events if each["event"] == "done" and _at(each) <= _at(before))


def _span(begin: float, end: float, kind: str, iteration: str = "") -> Iterator[Span]:
    if end > begin:
        yield Span(begin, end, kind, iteration)


def _at(record: Record) -> float:
    return float(record["monotonic"])
