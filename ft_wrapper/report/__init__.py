"""``ftrun report``: what a job's time went to, restart by restart, from events files.

``FT_WRAPPER_EVENTS`` names the files. Clocks of different hosts are not compared: each host's times are by
its own clock, and the slowest host's are shown.
"""

import dataclasses
import json
import textwrap
from collections.abc import Iterable
from itertools import chain

from .._text import cut, duration, plural
from .._text import table as table
from ..events import Record
from .goodput import BUCKETS, Goodput, make_goodput
from .reading import NOTES, by_job
from .restarts import PHASES as PHASES
from .restarts import Incident, find_incidents
from .restarts import Restart as Restart
from .timeline import Timeline

NO_EVENTS = "there are no events: was the job started with --events DIR, or FT_WRAPPER_EVENTS set?"
NO_STEPS = "the function reported no steps, see call_wrapper.ping(step)"
_NAMED = 4  # hosts in a line; more of them are counted
_NOTED = 20  # notes of agents; more of them are counted
_LONGEST = 240  # bytes of a cause below its restart, or of a note
_COLUMNS = 80  # of a terminal


@dataclasses.dataclass(frozen=True)
class Report:
    """A job.

    Args:
        job: its ``--rdzv-id``, or a name that it was given.
        timeline: what each seat did when.
        time: what its time went to.
        incidents: what ended its iterations.
    """

    job: str
    timeline: Timeline
    time: Goodput
    incidents: tuple[Incident, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """Where its events were written."""
        return tuple(self.timeline.hosts)

    @property
    def restarts(self) -> tuple[Restart, ...]:
        """All restarts, in order."""
        return tuple(one.restart for one in self.incidents if one.restart is not None)

    @property
    def notes(self) -> list[str]:
        """What agents have noted, in order: notices, nodes kept out, how the job has ended."""
        records = sorted(chain.from_iterable(self.timeline.hosts.values()), key=self.timeline.at)
        lines = dict.fromkeys(one["line"] for one in records if one["event"] in NOTES)
        return [*lines][:_NOTED] + [f"{len(lines) - _NOTED} more"] * (len(lines) > _NOTED)

    @property
    def started_again(self) -> int:
        """How many processes an agent started in place of others."""
        started = (one for records in self.timeline.hosts.values() for one in records)
        return sum(one["event"] == "rank_started" and one.get("incarnation", 0) > 0 for one in started)

    def describe_started_again(self) -> str:
        """`started_again` in words."""
        return f"{self.started_again} {'process' if self.started_again == 1 else 'processes'} started again"

    @property
    def seconds(self) -> float:
        """How long it took, by the host that saw most of it."""
        return self.time.seconds

    @property
    def goodput(self) -> float | None:
        """The share of useful steps, from 0 to 1; None if the function reported no steps."""
        return self.time.goodput

    def to_json(self) -> str:
        """All of it except what each rank did, as one JSON object."""
        time = self.time
        fields = {
            "job": self.job,
            "hosts": self.hosts,
            "time": dict(sorted(time.buckets.items(), key=lambda bucket: -bucket[1])),
            "started_again": self.started_again,
            "notes": self.notes,
            "restarts": [dataclasses.asdict(restart) for restart in self.restarts],
            **{name: getattr(time, name) for name in ("seconds", "seat_seconds", "steps", "steps_again")},
            "goodput": time.goodput,
        }
        return json.dumps(fields)

    def to_text(self) -> str:
        """Tables of the restarts and of the time, and a line below each; phases of restarts in ms."""
        rows = [("iteration", *PHASES, "in all")] if self.restarts else []
        for one in self.restarts:
            times = [f"{1e3 * one.phases[phase]:.1f}" for phase in PHASES]
            rows.append((f"{one.iteration} -> {one.next_iteration}", *times, duration(one.seconds)))
        lines = table(rows)
        for number, one in reversed([*enumerate(self.restarts, start=1)]):
            lines.insert(number + 1, _in_lines(one.cause, "  "))
        again = f", {self.describe_started_again()}" if self.started_again else ""
        count = len(self.restarts)
        hosts = ", ".join(self.hosts) if len(self.hosts) <= _NAMED else f"{len(self.hosts)} hosts"
        summary = f"{count} {plural(count, 'restart')}{again} in {duration(self.seconds)} on {hosts}"
        return "\n".join([*lines, summary, *map(_in_lines, self.notes), *self._time_table()])

    def _time_table(self) -> list[str]:
        time, seats = self.time, len(self.time.rows)
        if not seats:
            return []
        rows = [("time", "share", "went to", "what that is")]
        for name, seconds in time.buckets.items():
            rows.append((duration(seconds), f"{100 * time.share(name):.1f} %", name, BUCKETS[name]))
        line = f"{duration(time.seat_seconds)} of {seats} {plural(seats, 'rank')}"
        if time.goodput is None:
            return [*table(rows), f"{line}; its goodput is not known:", NO_STEPS]
        has_spares = "idle_spare" in time.buckets
        spares = f" ({100 * time.without_spares:.1f} % without spares)" if has_spares else ""
        steps = f"{time.steps} {plural(time.steps, 'step')} done, {time.steps_again} done again"
        return [*table(rows), f"{line}: {steps}", f"goodput {100 * time.goodput:.1f} %{spares}"]


def _in_lines(text: str, indent: str = "") -> str:
    return textwrap.fill(cut(text, _LONGEST), _COLUMNS, initial_indent=indent, subsequent_indent="  ")


def make_reports(records: Iterable[Record]) -> list[Report]:
    """Makes a report of each job that has events, in the order of their first events.

    Args:
        records: of all hosts, in any order.

    Raises:
        ValueError: there are none.
    """
    reports = []
    for job, own in by_job(records):
        timeline = Timeline.read(own)
        reports.append(Report(job, timeline, make_goodput(timeline), find_incidents(timeline)))
    if not reports:
        raise ValueError(NO_EVENTS)
    return reports
