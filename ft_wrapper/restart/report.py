"""The report of a restart: what failed and where, which ranks took over, how long it took; one log line."""

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from .._text import IN_LINE, cut, duration, place, plural
from ..attribution import Interruption, by_blame
from ..protocol.entering import Entered
from ..protocol.operations import Operations
from ..protocol.records import Decision, Fault, GroupSequence, Member, record_of
from ..state import State

_SHOWN = 4  # faults and promotions named in a line; the others are counted


@dataclasses.dataclass(frozen=True)
class Promotion:
    """A spare that became active.

    Args:
        slot: its rank at the job's start.
        rank: its new rank.
    """

    slot: int
    rank: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartReport:
    """What is known of a restart once all active ranks are back; its ``str`` is the line in the log.

    Apart from ``phases`` and ``step`` it is the same on all ranks. The log calls initial ranks (those at the
    job's start) slots.

    Args:
        iteration: number of the iteration that begins.
        cause: describes what ended the previous one: ``rank 2 (slot 2 on node7 pid 4711) died``.
        interruption: the kind of fault; None if nothing failed and a process joined.
        lost_slots: the initial ranks whose processes are lost.
        joined_slots: the initial ranks whose processes are new.
        promoted: the spares that became active.
        recompiled_ranks: the active ranks that will recompile.
        active_world_size: number of ranks that call the function.
        world_size: number of all ranks, spares included.
        seconds: from the end of the previous iteration until the last active rank was back.
        phases: this rank's own seconds, by the names in ``ftrun report``: ``abort``, ``leave``, ``arrive``,
            ``decide``, ``enter``. A process that joined knows only the last one.
        culprit_slots: the initial ranks of the likeliest cause; empty if no rank is to blame.
        replacements: the new processes that took the rank of a lost one.
        excluded: describes the slot or host that is excluded after too many faults, or that should be but
            stays; empty if none.
        step: the last step that this rank had reported (``call_wrapper.step``) when the previous iteration
            ended; None if it had reported none, as on a spare and in a process that joined.
    """

    iteration: int
    cause: str
    interruption: Interruption | None = None
    lost_slots: tuple[int, ...] = ()
    joined_slots: tuple[int, ...] = ()
    promoted: tuple[Promotion, ...] = ()
    recompiled_ranks: tuple[int, ...] = ()
    active_world_size: int
    world_size: int
    seconds: float
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict)
    step: int | None = None
    excluded: str = ""
    culprit_slots: tuple[int, ...] = ()
    replacements: tuple[Promotion, ...] = ()

    @property
    def kind(self) -> str:
        """The kind of restart, for counting.

        The interruption's name in lower case; ``join`` if nothing failed and a process joined, ``unknown`` if
        no fault was published.
        """
        if self.interruption is not None:
            return self.interruption.name.lower()
        return "join" if self.joined_slots else "unknown"

    def __str__(self) -> str:
        """The line in the log."""
        others = set(self.joined_slots).difference(one.slot for one in self.replacements)
        is_fault, ranks = self.interruption is not None, self.recompiled_ranks
        joined = f"{_numbers('slot', sorted(others))} joined" if others and is_fault else ""
        compiled = f"{_numbers('rank', ranks)} will compile again" if ranks else ""
        spares = self.world_size - self.active_world_size
        size = f"{self.active_world_size} active + {spares} spare {plural(spares, 'rank')}"
        end = f"{size}, back in {duration(self.seconds)}"
        parts = filter(None, [self.cause, joined, self.excluded, self._takeovers(), compiled, end])
        return f"restart {self.iteration}: {'; '.join(parts)}"

    def _takeovers(self) -> str:
        said = [f"spare slot {one.slot} took over as rank {one.rank}" for one in self.promoted]
        for one in self.replacements:
            said.append(f"the replacement in slot {one.slot} took over as rank {one.rank}")
        are_joined_active = bool(self.joined_slots) and self.world_size == self.active_world_size
        return _joined(said, len(said)) or ("" if are_joined_active else "no spare stepped in")

    def to_json(self) -> str:
        """The report as one JSON object, on one line."""
        return json.dumps(dataclasses.asdict(self), default=lambda kind: kind.name)

    @classmethod
    def from_json(cls, text: str) -> "RestartReport":
        """Reads `to_json`.

        Raises:
            ValueError: it is not JSON.
            KeyError: a field is missing.
            TypeError: it has fields that this version does not know.
        """
        fields = json.loads(text)
        kind = fields["interruption"]
        fields["interruption"] = None if kind is None else Interruption[kind]
        for name, value in fields.items():
            if isinstance(value, list):
                fields[name] = tuple(Promotion(**one) if isinstance(one, dict) else one for one in value)
        return cls(**fields)


def make_report(
    decision: Decision, state: State, entered: Iterable[Entered], faults: Sequence[Fault], seconds: float
) -> RestartReport:
    """Makes the report of a restart.

    Args:
        decision: the decision for the iteration that begins.
        state: of a rank that has entered it.
        entered: the ranks that have entered it.
        faults: of the previous iteration, `evictions` last.
        seconds: from its end until the last active rank was back.
    """
    active = sorted((one.active_rank, one) for one in entered if one.active_rank is not None)
    lost = tuple(sorted(member.slot for member in set(decision.removed).difference(decision.joined)))
    new = set(decision.joined).difference(decision.removed)
    joined = tuple(sorted(member.slot for member in new))
    ranks = zip(decision.joined, decision.joined_ranks, strict=True)
    heirs = new.intersection(member for member, rank in ranks if rank not in decision.inserted)
    is_fault = bool(faults) or not joined
    return RestartReport(
        iteration=state.iteration,
        cause=describe_faults(faults) if is_fault else f"{_numbers('slot', joined)} joined",
        interruption=by_blame(fault.record for fault in faults)[0].interruption if faults else None,
        lost_slots=lost,
        joined_slots=joined,
        promoted=tuple(Promotion(one.member.slot, rank) for rank, one in active if one.promoted),
        recompiled_ranks=tuple(rank for rank, one in active if one.recompiles),
        active_world_size=state.active_world_size or 0,
        world_size=state.world_size,
        seconds=seconds,
        excluded=decision.excluded,
        culprit_slots=culprit_slots(faults),
        replacements=tuple(Promotion(one.member.slot, rank) for rank, one in active if one.member in heirs),
    )


def evictions(store: Operations, decision: Decision, faults: Sequence[Fault]) -> list[Fault]:
    """Makes faults for members that were removed without publishing one: their hosts were lost.

    Faults in the wake of such a loss are published at once. The loss itself shows only later, while the other
    members wait for these; the iteration has ended by then.

    Args:
        store: knows on which hosts they ran.
        decision: lists the removed members.
        faults: the published faults.
    """
    message = "stopped answering: evicted"
    silent = set(decision.removed).difference(decision.joined, (fault.member for fault in faults))
    found: list[Fault] = []
    for member in sorted(silent):
        host, pid = host_and_pid(store, member) if len(found) < _SHOWN else ("", 0)
        found.append(Fault(member, None, Interruption.UNRESPONSIVE, message, host, pid))
    return found


def waiting_line(store: Operations, missing: Sequence[Member], hang: float, silence: float) -> str:
    """Describes which members a restart waits for, and for how long.

    Args:
        store: knows on which hosts they run.
        missing: the members that have not left the function.
        hang: seconds until they are killed if they hang.
        silence: seconds without a heartbeat until they are evicted.
    """
    places = (place(member.slot, None, *host_and_pid(store, member)) for member in missing[:_SHOWN])
    names = _joined(places, len(missing))
    ends = f"ended within {duration(hang)} if hung, evicted within {duration(silence)} if the host is lost"
    return f"the restart waits for {names} to leave the function: {ends}"


def describe_faults(faults: Sequence[Fault]) -> str:
    """Describes what ended an iteration: the likeliest cause, and the number of faults in its wake.

    Args:
        faults: the published faults, in order.
    """
    if not faults:
        return "no fault was published"
    groups = _culprits(faults)
    parts = [f"{_places(group)} {message}".strip() for message, group in groups[:_SHOWN]]
    rest = sum(len(group) for _, group in groups[_SHOWN:])
    text = "; ".join([*parts, f"{rest} more elsewhere"] if rest else parts)
    others = len({fault.member for fault in faults}) - sum(len(group) for _, group in groups)
    return cut(text, IN_LINE) + (f" (and {others} {plural(others, 'fault')} in its wake)" if others else "")


def culprit_slots(faults: Sequence[Fault]) -> tuple[int, ...]:
    """The slots that `describe_faults` names first: the likeliest cause; empty if no rank is to blame.

    Args:
        faults: the published faults, in order.
    """
    _, first = _culprits(faults)[0] if faults else ("", [])
    return tuple(sorted(one.member.slot for one in _to_blame(first)))


def _culprits(faults: Sequence[Fault]) -> list[tuple[str, list[Fault]]]:
    """What happened, each with its members; only the likeliest causes, the likeliest first."""
    worst = by_blame(fault.record for fault in faults)[0].interruption
    culprits = [fault for fault in faults if fault.interruption == worst]
    if worst == Interruption.EXCEPTION:
        culprits = culprits[:1]  # collectives of other ranks fail in its wake
    missing = who_is_missing(culprits)
    said: dict[str, list[Fault]] = {}
    for member in dict.fromkeys(fault.member for fault in culprits):
        of_member = [fault for fault in culprits if fault.member == member]
        message = " and ".join(sorted(fault.message for fault in of_member))
        if member in missing:
            message = f"{missing[member]}, {message}"
        said.setdefault(message, []).append(of_member[0])
    # Missing ranks first; if none is known, the odd one out: it is the likely cause.
    return sorted(said.items(), key=lambda group: (group[1][0].member not in missing, len(group[1])))


def host_and_pid(store: Operations, member: Member) -> tuple[str, int]:
    """Host and pid of a member that has not published its fault itself; empty and 0 if unknown."""
    record = record_of(store, member)
    return record.host, record.pid or 0


def _places(faults: Sequence[Fault]) -> str:
    where = [place(one.member.slot, one.rank, one.host, one.pid) for one in _to_blame(faults)]
    return _joined(where, len(where))


def _to_blame(faults: Sequence[Fault]) -> list[Fault]:
    return [one for one in faults if one.blames and one.interruption is not Interruption.REQUESTED]


def _numbers(noun: str, numbers: Sequence[int]) -> str:
    return f"{plural(len(numbers), noun)} {_joined(map(str, numbers), len(numbers))}"


def _joined(parts: Iterable[str], count: int) -> str:
    shown = [part for part, _ in zip(parts, range(_SHOWN), strict=False)]
    if count > _SHOWN:
        shown.append(f"and {count - _SHOWN} more")
    return ", ".join(shown)


# Which rank did not come ------------------------------------------------------------------------------------
# Deduced from where the ranks of a process group were when they hung. Nothing is concluded unless all ranks
# of the group have reported where they were, and more than half were in the same operation. A rank that
# was elsewhere is named only if it has not begun that operation, or has begun a later one, and only if it was
# not itself waiting for yet another rank there.

_Counts = Mapping[Member, GroupSequence]
_Whole = Mapping[str, _Counts]
_Said = Mapping[Member, Fault]
_At = tuple[int, str]  # an operation's number and name; or a place in a library, which may also be one


def who_is_missing(faults: Iterable[Fault]) -> dict[Member, str]:
    """Names the ranks that kept the other ranks waiting.

    Args:
        faults: of ranks that hung, each with its position.

    Returns:
        By member, a description of what it did, to follow its name; empty if that is unclear.
    """
    said = {fault.member: fault for fault in faults if fault.position.counts}
    groups: dict[str, dict[Member, GroupSequence]] = defaultdict(dict)
    for member, fault in said.items():
        for count in fault.position.counts:
            groups[count.group][member] = count
    # A silent rank may be the missing one.
    whole = {name: counts for name, counts in groups.items() if _is_whole(counts)}
    found: dict[Member, str] = {}
    settled: set[Member] = set()
    for group, counts in whole.items():
        odd, together = _odd_ones(group, counts, said)
        settled |= together
        found = odd | found
    named = {member: why for member, why in found.items() if member not in settled}
    named = {one: why for one, why in named.items() if not _waits(one, whole, said, settled, len(named) > 1)}
    return named or ({} if settled else _waited_for(whole, said))


def _is_whole(counts: _Counts) -> bool:
    return len(counts) > 1 and all(count.size == len(counts) for count in counts.values())


def _odd_ones(group: str, counts: _Counts, said: _Said) -> tuple[dict[Member, str], set[Member]]:
    """The ranks of a group that are not where most are; and those that are, if any rank is elsewhere."""
    at = {member: _at(group, counts[member].number, said[member]) for member in counts}
    (most, times), *_ = Counter(at.values()).most_common(1)
    if most is None or 2 * times <= len(counts):
        return {}, set()
    others = [member for member in counts if at[member] != most]
    whys = {one: _why(group, counts[one], at[one], most, said[one]) for one in others}
    odd = {member: why for member, why in whys.items() if why is not None}
    return odd, {member for member in counts if at[member] == most} if odd else set()


def _at(group: str, number: int, fault: Fault) -> _At | None:
    """Where a rank is, if it waits for other ranks there."""
    position = fault.position
    if position.in_collective and position.group == group:
        return number, position.operation
    # In a backward pass, or waiting for an operation that it has begun: which one is not known.
    is_in_library = not position.operation and fault.message.startswith("stood in ")
    return (number, fault.message) if is_in_library else None


def _why(group: str, count: GroupSequence, at: _At | None, most: _At, fault: Fault) -> str | None:
    """Why a rank is odd that is not where most are; None if it may in fact be where they are."""
    number, operation = most
    is_known = not operation.startswith("stood in ")
    what = f"{operation if is_known else 'collective'} #{number} of group {group}"
    position = fault.position
    is_there = position.in_collective and position.group == group
    if is_there and position.operation == operation and not count.is_exact:
        return None  # it may only have sent and received more, or less
    if count.number < number:
        return f"did not reach {what}"
    if count.number > number:
        further = count.number - number
        is_sure = is_known and (is_there or count.is_exact)
        return f"was {further} ahead of the other ranks, which were in {what}" if is_sure else None
    if is_there and is_known and at is not None:
        return f"was in {at[1]} instead of {what}"
    return None  # it has begun it, and may wait for its end


def _waits(one: Member, whole: _Whole, said: _Said, settled: set[Member], are_others: bool) -> bool:
    """Whether an odd rank may itself wait for a rank that is not where most are."""
    position = said[one].position
    if not position.operation:
        return False
    if not position.in_collective:
        return are_others or position.group not in whole
    counts = whole.get(position.group)
    if counts is None:
        return True  # for a rank that has reported nothing
    return any(count.number < counts[one].number for member, count in counts.items() if member not in settled)


def _waited_for(whole: _Whole, said: _Said) -> dict[Member, str]:
    """The ranks that are in user code while another has begun a collective; this needs no majority."""
    named: dict[Member, str] = {}
    for fault in said.values():
        counts = whole.get(fault.position.group, {}) if fault.position.in_collective else {}
        for member, count in counts.items():
            other = said[member]
            is_busy = other.message.startswith("stood at ") and not other.position.operation
            if is_busy and count.is_exact and count.number < counts[fault.member].number:
                named.setdefault(member, f"did not reach {fault.position}")
    return named
