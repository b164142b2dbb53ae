"""What a restart leaves behind: what failed, where, who took over, how long it took; a line in the log."""

import dataclasses
import json
import time
from collections.abc import Iterable, Mapping, Sequence

from ..attribution import Interruption, by_blame
from ..protocol import Agreement, keys
from ..protocol.operations import Operations, read
from ..protocol.records import Decision, Fault, Member, View
from ..state import State
from .failed_step import FailedStep, counted_on, in_which
from .missing import who_is_missing

_SHOWN = 4  # faults and promotions named in a line; the others are counted


@dataclasses.dataclass(frozen=True)
class TookOver:
    """A spare that became active.

    Args:
        initial_rank: its rank at the job's start, its slot.
        active_rank: the rank that it has now.
    """

    initial_rank: int
    active_rank: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartReport:
    """What is known of a restart once all active ranks are back; ``str`` of it is the line in the log.

    Apart from ``phases`` and ``step`` it is the same on all ranks. Initial ranks, those of the job's start,
    are what the log calls slots.

    Args:
        iteration: number of the iteration that begins.
        cause: what ended the one before, in words: ``rank 2 (slot 2 on node7 pid 4711) died``.
        interruption: what kind of fault that was; None if nothing failed, and a process joined.
        lost: the initial ranks whose processes are gone.
        joined: the initial ranks whose processes are new.
        took_over: the spares that became active.
        recompiling: the active ranks that will compile again.
        active_world_size: number of ranks that call the function.
        world_size: number of all ranks, spares included.
        seconds: from the end of the iteration before until the last active rank was back.
        phases: this rank's own seconds, by the names in ``ftrun report``: ``abort``, ``leave``, ``arrive``,
            ``decide``, ``enter``. A process that joined knows only the last one.
        excluded: the slot or host that is excluded after too many faults, or that should be but stays, in
            words; empty if there is none.
        failed_step: the step in which the function raised, if that ended the iteration before and the
            function had reported it; with the earlier iterations that failed in the same step.
        step: the last step that this rank had reported (``call_wrapper.step``) when the iteration before
            ended; None if it had reported none, as on a spare and in a process that joined.
    """

    iteration: int
    cause: str
    interruption: Interruption | None = None
    lost: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    took_over: tuple[TookOver, ...] = ()
    recompiling: tuple[int, ...] = ()
    active_world_size: int
    world_size: int
    seconds: float
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict)
    failed_step: FailedStep | None = None
    step: int | None = None
    excluded: str = ""

    @property
    def kind(self) -> str:
        """What to count it by.

        The interruption's name in lower case; ``join`` if nothing failed and a process joined, ``unknown`` if
        no fault was published.
        """
        if self.interruption is not None:
            return self.interruption.name.lower()
        return "join" if self.joined else "unknown"

    def __str__(self) -> str:
        """The line in the log."""
        parts = [self.cause]
        if self.failed_step is not None and self.failed_step.times > 1:
            parts.append(f"{self.failed_step}: a bad batch?")
        if self.joined and self.interruption is not None:
            parts.append(_joiners(self.joined))
        if self.excluded:
            parts.append(self.excluded)
        parts.append(_promotions(self.took_over))
        if self.recompiling:
            names = _joined(map(str, self.recompiling), len(self.recompiling))
            parts.append(f"{plural(len(self.recompiling), 'rank')} {names} will compile again")
        spares = self.world_size - self.active_world_size
        size = f"{self.active_world_size} active + {spares} spare {plural(spares, 'rank')}"
        parts.append(f"{size}, back in {duration(self.seconds)}")
        return f"restart {self.iteration}: {'; '.join(parts)}"

    def to_json(self) -> str:
        """All of it as one JSON object, in one line."""
        return json.dumps(dataclasses.asdict(self), default=lambda kind: kind.name)

    @classmethod
    def from_json(cls, text: str) -> "RestartReport":
        """Reads `to_json`.

        Raises:
            ValueError: it is no JSON.
            KeyError: a field is missing.
            TypeError: there are other fields than this version has.
        """
        fields = json.loads(text)
        kind = fields["interruption"]
        fields["interruption"] = None if kind is None else Interruption[kind]
        fields["took_over"] = tuple(TookOver(**one) for one in fields["took_over"])
        if (failed := fields["failed_step"]) is not None:
            fields["failed_step"] = FailedStep(failed["step"], failed["times"], tuple(failed["ranks"]))
        for name in ("lost", "joined", "recompiling"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


def make_report(
    store: Operations, view: View, decision: Decision, state: State, faults: Sequence[Fault], seconds: float
) -> RestartReport:
    """Makes the report of a restart, from what the store has of it.

    Args:
        store: what the ranks that entered have noted there.
        view: the iteration that begins.
        decision: what led to it.
        state: of a rank that has entered it.
        faults: what was published in the one before, in that order.
        seconds: from its end until the last active rank was back.
    """
    entered = Agreement(store).entering.entered_in(view.n).values()
    active = sorted((one.active_rank, one) for one in entered if one.active_rank is not None)
    faults = [*faults, *evictions(store, decision.removed, faults)]
    joined = tuple(sorted(member.slot for member in decision.joined))
    is_fault = bool(faults) or not joined
    return RestartReport(
        iteration=state.iteration,
        cause=in_words(faults) if is_fault else _joiners(joined),
        interruption=by_blame(fault.record for fault in faults)[0].interruption if faults else None,
        lost=tuple(sorted(member.slot for member in decision.removed)),
        joined=joined,
        took_over=tuple(TookOver(one.member.slot, rank) for rank, one in active if one.promoted),
        recompiling=tuple(rank for rank, one in active if one.recompiles),
        active_world_size=state.active_world_size or 0,
        world_size=state.world_size,
        seconds=seconds,
        excluded=decision.excluded,
        failed_step=_failed_step(store, view.n, faults),
    )


def _failed_step(store: Operations, n: int, faults: Sequence[Fault]) -> FailedStep | None:
    now = in_which(faults)
    if now is None:
        return None
    key = keys.failed_step(n - 1)
    text = read(store, key)
    return counted_on(None if text is None else FailedStep.from_json(text, key), now)


def began_before(faults: Sequence[Fault], came_at: float) -> float:
    """How many seconds ago the last iteration ended, for a process that was not in it.

    Args:
        faults: that ended it.
        came_at: when this process came, in monotonic seconds.
    """
    # What it has come in place of may have run on another host.
    began = min((fault.at for fault in faults if fault.at), default=None)
    return time.monotonic() - came_at if began is None else max(0.0, time.time() - began)


def evictions(store: Operations, removed: Iterable[Member], faults: Sequence[Fault]) -> list[Fault]:
    """Makes faults of members that are out though no fault of theirs was published: their hosts were lost.

    What fails in the wake of such a loss is published at once. The loss itself shows only later, while the
    others wait for these members; the iteration has ended by then.

    Args:
        store: knows on which hosts they ran.
        removed: the members that are out.
        faults: what was published.
    """
    message = "stopped answering: evicted"
    found: list[Fault] = []
    for member in sorted(set(removed) - {fault.member for fault in faults}):
        host, pid = host_and_pid(store, member) if len(found) < _SHOWN else ("", 0)
        found.append(Fault(member, None, Interruption.UNRESPONSIVE, message, host, pid))
    return found


def waiting_line(store: Operations, missing: Sequence[Member], hang: float, silence: float) -> str:
    """Says which members a restart waits for, and for how long.

    Args:
        store: knows on which hosts they run.
        missing: the members that have not left the function.
        hang: seconds until they are killed if they hang.
        silence: seconds without a heartbeat until they are evicted.
    """
    places = (_place(member.slot, None, *host_and_pid(store, member)) for member in missing[:_SHOWN])
    names = _joined(places, len(missing))
    is_, hangs, host = ("it is", "it hangs", "its host is")
    if len(missing) > 1:
        is_, hangs, host = ("they are", "they hang", "their hosts are")
    return (
        f"the restart waits for {names} to leave the function: {is_} ended within {duration(hang)} if "
        f"{hangs}, or evicted within {duration(silence)} if {host} lost"
    )


def duration(seconds: float) -> str:
    """Says how long something took, in the unit that a person would choose.

    Args:
        seconds: how long.
    """
    if seconds < 0.9995:
        return f"{1e3 * seconds:.1f} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def in_words(faults: Sequence[Fault]) -> str:
    """Says what ended an iteration: the likeliest cause, and how many faults came in its wake.

    Args:
        faults: what was published, in that order.
    """
    if not faults:
        return "no fault was published"
    worst = by_blame(fault.record for fault in faults)[0].interruption
    culprits = [fault for fault in faults if fault.interruption == worst]
    if worst == Interruption.EXCEPTION:
        culprits = culprits[:1]  # the others' collectives fail in its wake
    missing = who_is_missing(culprits)
    said: dict[str, list[Fault]] = {}
    for member in dict.fromkeys(fault.member for fault in culprits):
        of_member = [fault for fault in culprits if fault.member == member]
        message = " and ".join(sorted(fault.message for fault in of_member))
        if member in missing:
            message = f"{missing[member]}, {message}"
        said.setdefault(message, []).append(of_member[0])
    # Missing ranks first; if none is known, the odd one out: it is the likely cause.
    groups = sorted(said.items(), key=lambda group: (group[1][0].member not in missing, len(group[1])))
    parts = [f"{_places(group)} {message}" for message, group in groups[:_SHOWN]]
    rest = sum(len(group) for _, group in groups[_SHOWN:])
    text = "; ".join([*parts, f"{rest} more elsewhere"] if rest else parts)
    others = len({fault.member for fault in faults} - {fault.member for fault in culprits})
    return text + (f" (and {others} {plural(others, 'fault')} in its wake)" if others else "")


def host_and_pid(store: Operations, member: Member) -> tuple[str, int]:
    """Where a member runs that has not published its fault itself; empty and 0 if that is not known."""
    record = Agreement(store).joining.record_of(member)
    return record.host, record.pid or 0


def _places(faults: Sequence[Fault]) -> str:
    return _joined((_place(one.member.slot, one.rank, one.host, one.pid) for one in faults), len(faults))


def _place(slot: int, rank: int | None, host: str, pid: int) -> str:
    where = f" on {host} pid {pid}" if pid else ""
    if rank is not None:
        return f"rank {rank} (slot {slot}{where})"
    return f"slot {slot} ({where.strip()})" if where else f"slot {slot}"


def _promotions(promoted: Sequence[TookOver]) -> str:
    if not promoted:
        return "no spare stepped in"
    said = (f"spare slot {one.initial_rank} took over as rank {one.active_rank}" for one in promoted)
    return _joined(said, len(promoted))


def _joiners(joined: Sequence[int]) -> str:
    names = _joined(map(str, joined), len(joined))
    return f"{plural(len(joined), 'slot')} {names} joined"


def _joined(parts: Iterable[str], count: int) -> str:
    shown = [part for part, _ in zip(parts, range(_SHOWN), strict=False)]
    if count > _SHOWN:
        shown.append(f"and {count - _SHOWN} more")
    return ", ".join(shown)


def plural(count: int, noun: str) -> str:
    """A noun, in the plural unless there is one."""
    return noun if count == 1 else noun + "s"
