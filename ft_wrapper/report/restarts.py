"""What ended the iterations of a job, with the phases of the restart that followed."""

import dataclasses
from collections.abc import Iterator, Sequence

from .._text import place, plural
from ..attribution import Interruption, InterruptionRecord, by_blame
from ..events import Record
from .timeline import Iteration, Seat, Timeline

#: The phases of a restart, from the first fault on, in order.
PHASES = {
    "notify": "until all ranks of the host know that the iteration has ended",
    "abort": "until their process groups are aborted",
    "leave": "until they are out of the function",
    "arrive": "until they have said so, clean and healthy",
    "decide": "until they know who goes on, and as which rank",
    "enter": "until they are in the function again; processes that join are not counted",
}

# The event that ends each phase; the last two belong to the next iteration.
_ENDED_BY = ("end", "abort", "left", "arrive", "decided", "enter")
_OF_THE_NEXT = ("decided", "enter")
_NAMED = 4  # ranks in a line; the others are counted
_MARKED = 8  # ranks with a mark of their own: if more of them failed in the same way, it was none of them


@dataclasses.dataclass(frozen=True)
class Restart:
    """One restart, by the host that took longest.

    Args:
        iteration: the iteration that failed.
        next_iteration: the one in which all ranks were in the function again.
        phases: seconds by name, see `PHASES`.
        seconds: their sum: from the first fault until the last rank was back.
        kind: of the likeliest cause, see `Incident`.
        causes: the same in words: ``rank 1 (slot 1 on node7 pid 4711) died``.
        culprits: slots of the likeliest cause; empty if no rank is to blame, or if that is not known.
    """

    iteration: int
    next_iteration: int
    phases: dict[str, float]
    seconds: float
    kind: str = "unknown"
    causes: tuple[str, ...] = ()
    culprits: tuple[int, ...] = ()

    @property
    def cause(self) -> str:
        """The cause in words."""
        return ", ".join(self.causes) or "unknown"


@dataclasses.dataclass(frozen=True)
class Incident:
    """The end of an iteration, or the death of a spare, which ends none.

    Args:
        at: seconds since the beginning of the job.
        kind: of the likeliest cause: an `Interruption` in lower case; ``join`` if nothing failed and a
            process joined; ``unknown``.
        cause: the same in words.
        line: the log's line about the restart; what is known, if there is none.
        seats: where the likeliest cause is; empty if it is everywhere, or if that is not known.
        restart: what followed; None if nothing did.
        number: from 1 on, in the order of time.
    """

    at: float
    kind: str
    cause: str
    line: str
    seats: tuple[Seat, ...] = ()
    restart: Restart | None = None
    number: int = 0


def find_incidents(timeline: Timeline) -> tuple[Incident, ...]:
    """Finds what ended the iterations of a job.

    Args:
        timeline: of the job.
    """
    following = {one.after: one for one in timeline.iterations.values()}
    restarts = _restarts(timeline)
    found = []
    for name, failed in timeline.iterations.items():
        faults = sorted(failed.ending(), key=timeline.at)
        for fault in (one for one in failed.of("fault") if not one.get("ends", True)):
            kind, words, seats = _blamed([fault])
            found.append(Incident(timeline.at(fault), kind, words, f"spare {words}", seats))
        has_restarted = name in following or name in restarts
        ended = faults or (failed.of("end") if has_restarted else [])
        if ended:
            one = _incident(min(map(timeline.at, ended)), failed, following.get(name), faults)
            if (restart := restarts.get(name)) is not None:
                slots = tuple(sorted({slot for _, slot in one.seats}))
                restart = dataclasses.replace(restart, kind=one.kind, causes=(one.cause,), culprits=slots)
            found.append(dataclasses.replace(one, restart=restart))
    found.sort(key=lambda one: one.at)
    return tuple(dataclasses.replace(one, number=number) for number, one in enumerate(found, start=1))


def _incident(at: float, failed: Iteration, back: Iteration | None, faults: Sequence[Record]) -> Incident:
    """What ended an iteration, from the last returning rank's report; else from the faults alone."""
    said: Record = next(iter(back.of("restarted")), {}) if back is not None else {}
    if said:
        there = {(one["host"], one.get("slot", -1)) for one in failed.of("decided", "enter", "spare")}
        blamed = tuple(sorted(seat for seat in there if seat[1] in said["culprits"]))
        return Incident(at, said["kind"], said["cause"], said["line"], _marked(blamed))
    kind, words, seats = _blamed(faults)
    return Incident(at, kind, words, words, seats)


def _blamed(faults: Sequence[Record]) -> tuple[str, str, tuple[Seat, ...]]:
    """The likeliest cause among some faults: its kind, in words, and where it is."""
    known = [str(fault["kind"]) for fault in faults if fault.get("kind") in Interruption.__members__]
    if not known:
        return "unknown", "no known fault", ()
    worst = by_blame(InterruptionRecord(0, Interruption[kind]) for kind in known)[0].interruption.name
    culprits = [fault for fault in faults if fault.get("kind") == worst]
    if worst == Interruption.EXCEPTION.name:
        culprits = culprits[:1]  # the others' collectives fail in its wake
    kind = worst.lower()
    said = [
        f"{place(one['slot'], one.get('rank'), one['host'])} {one.get('message', kind.replace('_', ' '))}"
        for one in culprits[:_NAMED]
    ]
    rest, others = len(culprits) - len(said), len(faults) - len(culprits)
    words = "; ".join([*said, f"{rest} more elsewhere"] if rest else said)
    wake = f" (and {others} {plural(others, 'fault')} in its wake)" if others else ""
    seats = tuple(dict.fromkeys((one["host"], one["slot"]) for one in culprits))
    return kind, words + wake, _marked(seats)


def _marked(seats: tuple[Seat, ...]) -> tuple[Seat, ...]:
    return seats if len(seats) <= _MARKED else ()


def _restarts(timeline: Timeline) -> dict[str, Restart]:
    """The restarts, by the name of the iteration that failed; each by the host that took longest."""
    found: dict[str, Restart] = {}
    for host in timeline.hosts:
        for name, restart in _restarts_on(host, timeline):
            if name not in found or found[name].seconds < restart.seconds:
                found[name] = restart
    return found


def _restarts_on(host: str, timeline: Timeline) -> Iterator[tuple[str, Restart]]:
    """The restarts that one host saw to their end."""
    seen = [one for one in timeline.iterations.values() if host in one.events]
    seen.sort(key=lambda one: one.first[host])
    entered = [bool(one.on(host, "enter")) for one in seen]
    for number, failed in enumerate(seen):
        faults = [one for one in failed.on(host, "fault", "end") if one.get("ends", True)]
        back = next((later for later in range(number + 1, len(seen)) if entered[later]), None)
        if not faults or not entered[number] or back is None:
            continue  # nothing failed, or it is part of the restart before
        came = {record["pid"] for record in seen[back].on(host, *_OF_THE_NEXT)}
        # A joining process is not back, but new: it may still import while other ranks are in the function.
        ranks = came.intersection(record["pid"] for record in failed.on(host, "enter", "spare")) or came
        begin = moment = min(record["monotonic"] for record in faults)
        phases = {}
        for phase, event in zip(PHASES, _ENDED_BY, strict=True):
            ends = seen[back if event in _OF_THE_NEXT else number].on(host, event)
            last = max((one["monotonic"] for one in ends if one["pid"] in ranks), default=moment)
            phases[phase], moment = max(0.0, last - moment), max(moment, last)
        yield failed.name, Restart(failed.number, seen[back].number, phases, moment - begin)
