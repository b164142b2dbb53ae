"""The timeline of a job: what each seat did when, in which iteration; the model of all reports.

A seat is a slot on a host, and its times are by that host's clock: clocks of hosts are not compared.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..events import Record

Seat = tuple[str, int]  # a host, and a slot on it

#: What a process does from one event until the next; see `goodput.BUCKETS`.
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


@dataclasses.dataclass(frozen=True)
class Span:
    """What a seat did for a while.

    Args:
        begin: in seconds of the host's monotonic clock.
        end: likewise.
        kind: see `goodput.BUCKETS`; ``function`` until it is taken apart.
        iteration: its nonce; empty outside iterations.
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
        incarnation: which of the seat's processes, from 0.
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
    """A seat.

    Args:
        host: where.
        slot: which one there.
        begin: from when on,
        end: until when it counts.
        spans: in order, without gaps.
        lives: its processes.
    """

    host: str
    slot: int
    begin: float
    end: float
    spans: list[Span] = dataclasses.field(default_factory=list)
    lives: list[Life] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Iteration:
    """One iteration.

    Args:
        name: its nonce.
        number: its number. That of another call may be the same.
        events: what happened in it, by host and kind of event; in order.
        first: its first event, by host, on the host's clock.
        began: when the first rank entered, by the time of day; with its number. None if no rank did.
        call: number of its wrapped call.
        after: the name of the iteration before; empty for the first one of a call.
        committed: the steps below this one were committed in it.
    """

    name: str
    number: int
    events: dict[str, dict[str, list[Record]]] = dataclasses.field(default_factory=dict)
    first: dict[str, float] = dataclasses.field(default_factory=dict)
    began: tuple[float, int] | None = None
    call: int = 0
    after: str = ""
    committed: int = 0

    def add(self, host: str, record: Record) -> None:
        """Adds an event that happened in it."""
        self.first.setdefault(host, _at(record))
        self.events.setdefault(host, {}).setdefault(record["event"], []).append(record)
        self.committed = max(self.committed, record.get("committed", 0))
        if record["event"] in ("decided", "enter", "spare", "step"):
            moment = record.get("time") or record["monotonic"], self.number
            self.began = min(self.began or moment, moment)
            self.call = record.get("call", 0)
            self.after = record.get("after", self.after)

    def of(self, *events: str) -> list[Record]:
        """Its events of some kinds."""
        return [record for host in self.events for record in self.on(host, *events)]

    def on(self, host: str, *events: str) -> list[Record]:
        """Its events of some kinds on a host."""
        return [record for event in events for record in self.events.get(host, {}).get(event, ())]

    def ending(self) -> list[Record]:
        """The faults that ended it; not those of spares."""
        return [fault for fault in self.of("fault") if fault.get("ends", True)]


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What is known about a job.

    Args:
        hosts: the events of each host, in order.
        rows: what each seat did.
        iterations: by name, in their order.
        clocks: what each host's clock showed when the job began.
    """

    hosts: dict[str, list[Record]]
    rows: tuple[Row, ...]
    iterations: dict[str, Iteration]
    clocks: dict[str, float]

    @classmethod
    def read(cls, records: Iterable[Record]) -> "Timeline":
        """Reads the events of one job.

        Args:
            records: see `reading.by_job`; of all hosts, in any order.
        """
        hosts = _by_host(records)
        rows = tuple(_rows(hosts))
        iterations = _iterations(hosts)
        return cls(hosts, rows, iterations, _clocks(hosts, rows, iterations))

    @property
    def began(self) -> float | None:
        """When the job began, in seconds since the epoch; None if the events do not say so."""
        known = ((host, _ahead(records)) for host, records in self.hosts.items())
        return next((self.clocks[host] - ahead for host, ahead in known if ahead is not None), None)

    @property
    def seconds(self) -> float:
        """How long the job took, on one clock for all hosts."""
        return max((row.end - self.clocks[row.host] for row in self.rows), default=0.0)

    def at(self, record: Record) -> float:
        """When an event happened, in seconds since the beginning of the job."""
        return float(record["monotonic"] - self.clocks[record["host"]])


def nonce_of(record: Record) -> str:
    """What names the iteration of an event; empty outside iterations."""
    return str(record.get("nonce", record.get("iteration", "")))


def _by_host(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The events of each host, in their order; with the iteration's nonce in those that do not have it."""
    found: dict[str, list[Record]] = collections.defaultdict(list)
    present: dict[tuple[str, int], str] = {}
    for record in sorted(records, key=_at):
        process = record["host"], record["pid"]
        if "nonce" in record:
            present[process] = record["nonce"]
        elif record["event"] in ("end", "abort") and process in present:
            record = {**record, "nonce": present[process]}
        found[record["host"]].append(record)
    return {host: found[host] for host in sorted(found)}


def _iterations(hosts: Mapping[str, Sequence[Record]]) -> dict[str, Iteration]:
    found: dict[str, Iteration] = {}
    for host, records in hosts.items():
        for record in records:
            if record.get("iteration", -1) >= 0:
                name = nonce_of(record)
                found.setdefault(name, Iteration(name, record["iteration"])).add(host, record)
    order = sorted(found.values(), key=lambda one: one.began or (math.inf, one.number))
    return {one.name: one for one in order}


def _clocks(
    hosts: Mapping[str, Sequence[Record]], rows: Iterable[Row], iterations: Mapping[str, Iteration]
) -> dict[str, float]:
    """What each host's clock showed when the job began.

    All ranks learn of a decision within milliseconds: clocks are set by decisions, and by the time of day
    only for a host that shares no iteration with the other ranks.
    """
    heard: dict[str, dict[str, float]] = {host: {} for host in hosts}
    for one in iterations.values():
        for host in one.events:
            if decided := one.on(host, "decided", "enter"):
                heard[host][one.name] = min(map(_at, decided))
    begins: dict[str, float] = {}
    for row in rows:
        begins[row.host] = min(row.begin, begins.get(row.host, row.begin))
    first = max(heard, key=lambda host: len(heard[host]))
    offsets: dict[str, float] = {}
    for host, seen in heard.items():
        apart = [at - heard[first][n] for n, at in seen.items() if n in heard[first]]
        if apart:
            offsets[host] = statistics.median(apart)
        elif (own := _ahead(hosts[host])) is not None and (other := _ahead(hosts[first])) is not None:
            offsets[host] = own - other
        else:
            offsets[host] = begins.get(host, 0.0) - begins.get(first, 0.0)
    begin = min((at - offsets[host] for host, at in begins.items()), default=0.0)
    return {host: begin + offset for host, offset in offsets.items()}


def _ahead(records: Iterable[Record]) -> float | None:
    """By how much a host's clock is ahead of the time of day; None if its events do not say so."""
    return next((_at(one) - one["time"] for one in records if "time" in one), None)


# Rows ------------------------------------------------------------------------------------------------------


def _rows(hosts: Mapping[str, Sequence[Record]]) -> Iterator[Row]:
    # Each seat's last host. By the time of day: incarnations begin again if everything is started again.
    newest: dict[int, tuple[float, str]] = {}
    for host, records in hosts.items():
        for record in (each for each in records if each["event"] == "register"):
            came = record.get("time") or record["monotonic"], host
            newest[record["slot"]] = max(came, newest.get(record["slot"], came))
    for host, records in hosts.items():
        begin = min(min(_at(each), each.get("started", _at(each))) for each in records)
        end = _at(records[-1])
        first_entry = next((_at(each) for each in records if each["event"] == "enter"), end)
        lives = collections.defaultdict(list)
        for life in _lives(records):
            lives[life.slot].append(life)
        for slot, own in lives.items():
            formed = own[0].born <= first_entry  # else the job has grown by this seat
            row = Row(host, slot, begin if formed else own[0].born, end, lives=own)
            if (died := own[-1].died) is not None and newest.get(slot, (0.0, host))[1] != host:
                row.end = max(died, row.begin)  # the seat is on another host from here on
            row.spans = list(_spans(row, records))
            yield row


def _lives(records: Sequence[Record]) -> list[Life]:
    """The processes of one host, by seat and in their order."""
    lives: dict[int, Life] = {}  # by process id
    children: dict[int, float] = {}
    for record in records:
        pid, event, moment = record["pid"], record["event"], _at(record)
        if event == "rank_started":
            children[record["child"]] = moment
        elif event == "register":
            if pid not in lives:
                born = min(children.get(pid, float(record.get("started", moment))), moment)
                lives[pid] = Life(pid, record["slot"], record["incarnation"], born)
            lives[pid].incarnation = record["incarnation"]
        elif pid not in lives and event in ("decided", "enter") and "slot" in record:
            lives[pid] = Life(pid, record["slot"], record.get("incarnation", 0), moment)
        if pid in lives and event in _FROM:
            lives[pid].events.append(record)
        if event == "rank_ended" and (dead := lives.get(record["child"])) is not None:
            dead.died = moment if dead.died is None else min(dead.died, moment)
        if event == "fault" and record.get("kind") in _DEADLY:
            for life in lives.values():
                if (life.slot, life.incarnation) == (record["slot"], record.get("incarnation", 0)):
                    life.died = moment
    return sorted(lives.values(), key=lambda life: (life.slot, life.born))


def _spans(row: Row, records: Sequence[Record]) -> Iterator[Span]:
    """The row without gaps, from its beginning to its end."""
    at, before = row.begin, ""
    for place, life in enumerate(row.lives):
        born = min(max(at, life.born), row.end)
        yield from _before(at, born, records) if not before else _span(at, born, "gone")
        following = [other.born for other in row.lives[place + 1 :] if other.born > life.born]
        end = min([row.end, *following, *([] if life.died is None else [life.died])])
        at, before = born, "initialization"
        for kind, moment, of in _states(life):
            moment = min(max(at, moment), end)
            yield from _span(at, moment, before, of)
            at, before = moment, kind
        yield from _span(at, max(at, end), before, nonce_of(life.events[-1]) if life.events else "")
        at = max(at, end)
    # A process that has ended normally leaves no seat behind.
    yield from _span(at, row.end, "after_end" if before == "after_end" else "gone")


def _before(begin: float, end: float, records: Sequence[Record]) -> Iterator[Span]:
    """What comes before a seat's first process: the agent starts, and waits for other nodes."""
    ready = next((_at(each) for each in records if each["event"] == "agent_started"), end)
    met = next((_at(each) for each in records if each["event"] == "round_started"), ready)
    ready = min(max(ready, begin), end)
    met = min(max(met, ready), end)
    yield from _span(begin, ready, "initialization")
    yield from _span(ready, met, "waiting")
    yield from _span(met, end, "initialization")


def _states(life: Life) -> Iterator[tuple[str, float, str]]:
    """What a process does from each of its events on, and the iteration of what it did until then."""
    state, iteration, has_run = "initialization", "", False
    done = math.nan
    for record in life.events:
        event = record["event"]
        kind = _FROM[event]
        if event == "register" and life.incarnation and not has_run:
            kind = "idle_spare"  # the job is running: it waits to be let in
        elif event == "register" and state == "after_end":
            yield "other", done, iteration  # what it did since the last call was not ours
        elif event == "arrive" and state == "waiting":
            continue  # it waits for the members of a call that is about to begin
        elif event == "decided" and state == "waiting" and (has_run or not record["iteration"]):
            kind = "initialization"  # the call begins: it is no restart
        yield kind, _at(record), iteration
        state = kind
        if event == "done":
            done = _at(record)
        if event in ("enter", "spare", "decided"):
            iteration, has_run = nonce_of(record), has_run or event != "decided"


def _span(begin: float, end: float, kind: str, iteration: str = "") -> Iterator[Span]:
    if end > begin:
        yield Span(begin, end, kind, iteration)


def _at(record: Record) -> float:
    return float(record["monotonic"])
