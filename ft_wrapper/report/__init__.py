"""``ftrun report``: what a job's time went to, and what each restart's, by events files.

``FT_WRAPPER_EVENTS`` names the files. Clocks of different hosts are not compared: each host's times are by
its own clock, and those of the slowest host are shown.
"""

import collections
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence

from .._text import duration, plural
from .goodput import BUCKETS, Goodput, make_goodput
from .jobs import Record, by_job
from .rows import by_host

#: The phases of a restart, from the first fault on, one after the other.
PHASES = {
    "told": "until all ranks of the host know that the iteration has ended",
    "abort": "until their process groups are aborted",
    "leave": "until they are out of the function",
    "arrive": "until they have said so, clean and healthy",
    "decide": "until they know who goes on, and as which rank",
    "enter": "until they are in the function again, and those that join are too",
}

# The event that ends each phase; the last two belong to the next iteration.
_ENDED_BY = ("end", "abort", "left", "arrive", "decided", "enter")
_OF_THE_NEXT = ("decided", "enter")
# What happens to the first process that enters an iteration.
_BEGINS = ("decide", "decided", "enter")
_NAMED = 4  # causes or hosts in a line; more of them are counted


@dataclasses.dataclass(frozen=True)
class Restart:
    """One restart.

    Args:
        iteration: the iteration that failed.
        next_iteration: the one in which all ranks were in the function again.
        causes: what was published, in the order of each host's clock: ``slot 1: EXCEPTION``.
        phases: seconds by name, see `PHASES`; of the host that took longest.
        seconds: their sum: from the first fault until the last rank was back.
    """

    iteration: int
    next_iteration: int
    causes: tuple[str, ...]
    phases: dict[str, float]
    seconds: float

    @property
    def cause(self) -> str:
        """The causes in words; of many, the first ones and how many there are."""
        rest = len(self.causes) - _NAMED
        named = self.causes[:_NAMED]
        return ", ".join([*named, f"and {rest} more"] if rest > 0 else named) or "unknown"


@dataclasses.dataclass(frozen=True)
class Report:
    """A job.

    Args:
        job: its ``--rdzv-id``, or a name that it was given.
        hosts: where its events were written.
        time: what its time went to.
        started_again: how many processes an agent started in place of others.
        restarts: one after the other.
    """

    job: str
    hosts: tuple[str, ...]
    time: Goodput
    started_again: int
    restarts: tuple[Restart, ...]

    @property
    def seconds(self) -> float:
        """How long it took, by the host that saw most of it."""
        return self.time.seconds

    @property
    def goodput(self) -> float | None:
        """The share of useful steps, from 0 to 1; None if the function told no steps."""
        return self.time.goodput

    def to_json(self) -> str:
        """All of it but the rows, as one JSON object."""
        time = self.time
        fields = {
            **vars(self),
            "restarts": [dataclasses.asdict(restart) for restart in self.restarts],
            "time": dict(sorted(time.buckets.items(), key=lambda bucket: -bucket[1])),
            "seconds": time.seconds,
            "seat_seconds": time.seat_seconds,
            "steps": time.steps,
            "steps_again": time.steps_again,
            "goodput": time.goodput,
        }
        return json.dumps(fields)

    def to_text(self) -> str:
        """Tables of the restarts and of the time, and a line below each; phases of restarts in ms."""
        rows = [("iteration", "cause", *PHASES, "in all")] if self.restarts else []
        for restart in self.restarts:
            times = [f"{1e3 * restart.phases[phase]:.1f}" for phase in PHASES]
            which = f"{restart.iteration} -> {restart.next_iteration}"
            rows.append((which, restart.cause, *times, duration(restart.seconds)))
        again = f", {self.started_again} processes started again" if self.started_again else ""
        count = len(self.restarts)
        hosts = ", ".join(self.hosts) if len(self.hosts) <= _NAMED else f"{len(self.hosts)} hosts"
        summary = f"{count} {plural(count, 'restart')}{again} in {duration(self.seconds)} on {hosts}"
        return "\n".join([*table(rows), summary, *self._time_table()])

    def _time_table(self) -> list[str]:
        time, seats = self.time, len(self.time.rows)
        if not seats:
            return []
        rows = [("time of all ranks", "share", "went to", "which is")]
        for name, seconds in time.buckets.items():
            rows.append((duration(seconds), f"{100 * time.share(name):.1f} %", name, BUCKETS[name]))
        in_all = f"{duration(time.seat_seconds)} of {seats} {plural(seats, 'rank')}"
        if time.goodput is None:
            line = (
                f"{in_all}; how much of it was useful is not known: the function told no steps, see "
                "call_wrapper.step(n)"
            )
        else:
            has_spares = "idle_spare" in time.buckets
            spares = f" ({100 * time.without_spares:.1f} % without spares)" if has_spares else ""
            line = (
                f"{in_all}; goodput {100 * time.goodput:.1f} %{spares}: {time.steps} "
                f"{plural(time.steps, 'step')} done, {time.steps_again} done again"
            )
        return [*table(rows), line]


def table(rows: Sequence[Sequence[object]], indent: str = "") -> list[str]:
    """Lines of a table whose columns stand below each other; the first row is its head. A dash is nothing."""
    texts = [["-" if cell in (None, "") else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in texts)
    return [f"{indent}{'  '.join(cells)}".rstrip() for cells in padded]


@dataclasses.dataclass
class _Iteration:
    """One iteration as one host saw it.

    Args:
        number: its number. Another call may have the same numbers.
        moments: for each event, when it happened and to which process.
        faults: what was published here.
        line: what the log says of the restart that led to it; empty if another host has that.
    """

    number: int
    moments: dict[str, list[tuple[float, int]]] = dataclasses.field(default_factory=dict)
    faults: list[str] = dataclasses.field(default_factory=list)
    line: str = ""

    def first(self, *kinds: str) -> float | None:
        """When the first of these events happened."""
        return min((moment for kind in kinds for moment, _ in self.moments.get(kind, ())), default=None)

    def last(self, kind: str, pids: set[int] | None = None) -> float | None:
        """When an event last happened, to any process or to these."""
        found = (moment for moment, pid in self.moments.get(kind, ()) if pids is None or pid in pids)
        return max(found, default=None)

    def pids(self, kind: str) -> set[int]:
        """The processes to which an event happened."""
        return {pid for _, pid in self.moments.get(kind, ())}


def make_reports(records: Iterable[Record]) -> list[Report]:
    """Makes a report of each job whose events are there, in the order of their first events.

    Args:
        records: of all hosts, in any order.

    Raises:
        ValueError: there are none.
    """
    jobs = by_job(records)
    if not jobs:
        raise ValueError("there are no events: was FT_WRAPPER_EVENTS set for all ranks?")
    return [make_report(job, found) for job, found in jobs]


def make_report(job: str, records: Sequence[Record]) -> Report:
    """Makes the report of one job.

    Args:
        job: its name.
        records: its events (see `jobs.by_job`), of all hosts, in any order.
    """
    hosts = by_host(records)
    restarts: dict[tuple[int, int], list[tuple[Restart, str]]] = {}
    for found in hosts.values():
        times: collections.Counter[int] = collections.Counter()
        for restart, line in _restarts(_iterations(found)):
            # Where each call has its own store, the next call has the same numbers.
            times[restart.iteration] += 1
            seen = restarts.setdefault((restart.iteration, times[restart.iteration]), [])
            seen.append((restart, line))
    started = (record for record in records if record["event"] == "rank_started")
    return Report(
        job,
        tuple(hosts),
        make_goodput(records),
        sum(record.get("incarnation", 0) > 0 for record in started),
        tuple(map(_slowest, restarts.values())),
    )


def _iterations(records: Sequence[Record]) -> list[_Iteration]:
    """Sorts one host's records into iterations, in the order of these."""
    found: list[_Iteration] = []
    of_call: dict[int, _Iteration] = {}
    for record in records:
        number = record.get("iteration")
        if not isinstance(number, int) or number < 0:
            continue
        kind = str(record["event"])
        was_done = bool(found) and "done" in found[-1].moments
        if was_done and (kind == "enter" or (kind in _BEGINS and number != found[-1].number)):
            of_call = {}  # of the next call, whose numbers may begin again
        iteration = of_call.get(number)
        if iteration is None:
            iteration = of_call[number] = _Iteration(number)
            found.append(iteration)
        iteration.moments.setdefault(kind, []).append((float(record["monotonic"]), int(record["pid"])))
        if kind == "fault":
            iteration.faults.append(f"slot {record.get('slot')}: {record.get('kind')}")
        elif kind == "restarted":
            iteration.line = str(record["line"])
    return found


def _restarts(iterations: Sequence[_Iteration]) -> Iterator[tuple[Restart, str]]:
    """The restarts that one host saw to their end, and what the log says of each."""
    for place, failed in enumerate(iterations):
        begin = failed.first("fault", "end")
        if begin is None or "enter" not in failed.moments:
            continue  # nothing failed, or it is part of the restart before
        back = next((later for later in iterations[place + 1 :] if "enter" in later.moments), None)
        if back is None:
            continue
        survivors = back.pids("decided")
        phases, moment = {}, begin
        for phase, event in zip(PHASES, _ENDED_BY, strict=True):
            where, who = (back, None) if event in _OF_THE_NEXT else (failed, survivors)
            end = max(moment, where.last(event, who) or moment)
            phases[phase], moment = end - moment, end
        restart = Restart(failed.number, back.number, tuple(failed.faults), phases, moment - begin)
        yield restart, back.line


def _slowest(seen: Sequence[tuple[Restart, str]]) -> Restart:
    """One restart, as several hosts have seen it."""
    slowest = max((restart for restart, _ in seen), key=lambda restart: restart.seconds)
    causes = dict.fromkeys(cause for restart, _ in seen for cause in restart.causes)
    if not causes:  # there is no fault in the events of a lost host, nor where a process has joined
        said = (line.partition(": ")[2].partition("; ")[0] for _, line in seen)
        causes = dict.fromkeys(filter(None, said))
    return dataclasses.replace(slowest, causes=tuple(causes))
