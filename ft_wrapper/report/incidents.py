"""What ended the iterations of a job, from its events: numbered, with the place and a line of words."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from .._text import plural
from ..attribution import Interruption, InterruptionRecord, by_blame
from .rows import Record, Row, iteration_name

#: What happened to a rank, by the kind of its fault; `JOINED` if nothing failed and a process came.
WORDS = {
    "EXCEPTION": "raised",
    "OUT_OF_MEMORY": "ran out of memory",
    "BASE_EXCEPTION": "left",
    "SOFT_TIMEOUT": "hung",
    "HARD_TIMEOUT": "hung, and was killed",
    "TERMINATED": "died",
    "UNRESPONSIVE": "was lost with its host",
    "MONITOR_PROCESS_EXCEPTION": "lost its monitor",
    "DRAINED": "was drained",
    "REQUESTED": "was asked to restart",
}
JOINED = "JOINED"
_NAMED = 4  # ranks in a line; the others are counted
_MARKED = 8  # ranks with a mark of their own: if more of them failed in the same way, it was none of them

# The log's line begins with the ranks that it names: "restart 3: rank 0 (slot 4 on node7 pid 9), slot 5 …".
_HEAD = re.compile(r"restart \d+: ")
_PLACE = re.compile(r"(?:rank \d+ \(slot (\d+)(?: on [^)]*)?\)|slot (\d+)(?: \([^)]*\))?)(, )?")

Seat = tuple[str, int]  # a host, and a slot on it


@dataclasses.dataclass(frozen=True)
class Incident:
    """The end of an iteration, or the death of a spare, by which none ends.

    Args:
        number: from 1 on, in the order of time.
        at: seconds since the begin of the job.
        kind: of the likeliest cause, see `WORDS`.
        line: the line that the log has of the restart; what is known, if that was not reached.
        seats: where the likeliest cause is; empty if it is everywhere.
    """

    number: int
    at: float
    kind: str
    line: str
    seats: tuple[Seat, ...]


@dataclasses.dataclass(frozen=True)
class _Fault:
    at: float
    kind: str
    seat: Seat
    message: str = ""


def find_incidents(
    records: Iterable[Record], rows: Iterable[Row], clocks: Mapping[str, float]
) -> tuple[Incident, ...]:
    """Finds what ended the iterations.

    Args:
        records: the events of one job, in any order.
        rows: of it, with the spans of `goodput`.
        clocks: what each host's clock showed when the job began.
    """
    ended: dict[str, list[_Fault]] = {}
    spares: list[_Fault] = []
    members: dict[str, set[Seat]] = collections.defaultdict(set)
    next_of: dict[str, str] = {}
    lines: dict[str, str] = {}
    for record in records:
        host, n, event = str(record["host"]), iteration_name(record), record["event"]
        if event == "decided":
            members[n].add((host, int(record.get("slot", -1))))
            if "after" in record:
                next_of[str(record["after"])] = n
        elif event == "restarted":
            lines[n] = str(record["line"])
        elif event == "fault":
            at = float(record["monotonic"]) - clocks[host]
            seat = host, int(record.get("slot", -1))
            found = _Fault(at, str(record.get("kind")), seat, str(record.get("message", "")))
            (ended.setdefault(n, []) if record.get("ends", True) else spares).append(found)
    left = _left(rows, clocks)
    incidents = []
    for n in ended.keys() | (next_of.keys() & left.keys()):
        faults = sorted(ended.get(n, ()), key=lambda fault: fault.at)
        at = faults[0].at if faults else left[n]
        following = next_of.get(n, "")
        faults += _lost(at, members[n], members.get(following, set()), faults)
        incident = _incident(at, faults, lines.get(following, ""))
        named = slots_in(incident.line) if faults else ()
        there = tuple(sorted(seat for seat in members[n] if seat[1] in named))
        # The line knows more than the events: which rank the others have waited for.
        incidents.append(dataclasses.replace(incident, seats=there) if there else incident)
    incidents += [_incident(fault.at, [fault], f"spare {_in_words([fault])}") for fault in spares]
    incidents.sort(key=lambda incident: incident.at)
    return tuple(
        dataclasses.replace(incident, number=number) for number, incident in enumerate(incidents, start=1)
    )


def slots_in(line: str) -> tuple[int, ...]:
    """The slots that the log's line of a restart names as the likeliest cause; none if it only names some.

    Args:
        line: see `restart.RestartReport`.
    """
    head = _HEAD.match(line)
    at, slots = head.end() if head else len(line), []
    while (place := _PLACE.match(line, at)) is not None:
        slots.append(int(place[1] or place[2]))
        if place[3] is None:
            return tuple(slots)
        at = place.end()
    return ()


def _left(rows: Iterable[Row], clocks: Mapping[str, float]) -> dict[str, float]:
    """When the ranks began to leave each iteration that others followed."""
    found: dict[str, float] = {}
    for row in rows:
        for span in row.spans:
            if span.kind == "recovery_abort":
                at = span.begin - clocks[row.host]
                found[span.iteration] = min(at, found.get(span.iteration, at))
    return found


def _lost(at: float, before: set[Seat], after: set[Seat], faults: Sequence[_Fault]) -> list[_Fault]:
    """Members that are out though no fault of theirs is known: their hosts were lost."""
    if not after:
        return []
    slots = {slot for _, slot in after} | {fault.seat[1] for fault in faults}
    return [_Fault(at, "UNRESPONSIVE", seat) for seat in sorted(before) if seat[1] not in slots]


def _incident(at: float, faults: Sequence[_Fault], line: str) -> Incident:
    if not faults:
        return Incident(0, at, JOINED, line or "a process joined", ())
    known = [fault for fault in faults if fault.kind in WORDS]
    records = (InterruptionRecord(fault.seat[1], Interruption[fault.kind]) for fault in known)
    worst = by_blame(records)[0].interruption.name if known else faults[0].kind
    culprits = [fault for fault in faults if fault.kind == worst]
    if worst == Interruption.EXCEPTION.name:
        culprits = culprits[:1]  # the others' collectives fail in its wake
    seats = tuple(dict.fromkeys(fault.seat for fault in culprits))
    return Incident(
        0,
        at,
        worst,
        line or _in_words(culprits, len(faults) - len(culprits)),
        seats if len(seats) <= _MARKED else (),
    )


def _in_words(culprits: Sequence[_Fault], others: int = 0) -> str:
    """What the events say, where the log's line is not among them."""
    said = [
        f"slot {fault.seat[1]} on {fault.seat[0]} {fault.message or WORDS.get(fault.kind, fault.kind)}"
        for fault in culprits[:_NAMED]
    ]
    rest = len(culprits) - len(said)
    text = "; ".join([*said, f"{rest} more elsewhere"] if rest else said)
    return text + (f" (and {others} {plural(others, 'fault')} in its wake)" if others else "")


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts names as people do: ``node9`` before ``node10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
