"""Recurring faults: when one ends the job, or excludes its slot or host. Pure.

Each decision counts the faults of the last iterations, and lists the members that caused the recent restarts.
The proposer of a decision judges, and all other ranks read its judgement, so all agree.
"""

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ..attribution import Interruption, by_blame
from .records import FOR_GOOD, LEFT_BY, ArrivalEntry, Blamed, Decision, Fault, Member, SameFault, View

_SAME_FAULTS = 4  # faults that a decision counts; of ranks that fail together, each may fail differently


def count_same_faults(
    before: Iterable[SameFault],
    arrived: Mapping[Member, ArrivalEntry],
    dead: Mapping[Member, Collection[str]],
    lost: bool,
) -> tuple[SameFault, ...]:
    """Counts the faults of an iteration; faults that did not recur are forgotten.

    Args:
        before: the counts of the previous iteration.
        arrived: the members that have arrived, in order of arrival.
        dead: the dead members with their marks: `LEFT_BY` has the fault by which a member left the job.
        lost: whether a rank was lost, which may be why others failed. Then only those faults count that end
            the job, or by which a rank left.
    """
    faults: dict[str, Member] = {}
    for member, arrival in arrived.items():
        if arrival.fault:
            faults.setdefault(arrival.fault, member)
    left_by = {
        mark.removeprefix(LEFT_BY): member
        for member, marks in dead.items()
        for mark in marks
        if mark.startswith(LEFT_BY)
    }
    counts = {fault.what: fault.count for fault in before}
    same = [SameFault(what, counts.get(what, 0) + 1, who) for what, who in {**faults, **left_by}.items()]
    kept = [fault for fault in same if fault.is_for_good or fault.what in left_by or not lost]
    return tuple(sorted(kept, key=lambda fault: (not fault.is_for_good, -fault.count))[:_SAME_FAULTS])


def fault_that_ends_job(decision: Decision, limit: int | None) -> SameFault | None:
    """The fault before a decision's iteration that ends the job; None if there is none.

    Args:
        decision: of the iteration.
        limit: the argument ``max_same_faults``.
    """
    for fault in decision.same_faults:
        if fault.what.startswith(FOR_GOOD) or (limit is not None and fault.count >= limit):
            return fault
    return None


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What follows from the faults of an iteration.

    Args:
        blamed: the recent restarts and the members that caused them.
        out: the members that are excluded for that.
        slot: the slot whose replacement is not awaited; None if there is none.
        words: describes what is excluded, or stays though it should not, and why; empty if nothing is.
    """

    blamed: tuple[Blamed, ...]
    out: frozenset[Member] = frozenset()
    slot: int | None = None
    words: str = ""


def culprit_of(faults: Sequence[Fault]) -> Fault | None:
    """The fault that ended an iteration; None if no slot or host is to blame.

    Args:
        faults: the published faults, in order.
    """
    if not faults:
        return None
    worst = by_blame(fault.record for fault in faults)[0].interruption
    if worst in (Interruption.BASE_EXCEPTION, Interruption.DRAINED, Interruption.REQUESTED):
        return None
    return next(fault for fault in faults if fault.interruption is worst)


def judge(
    view: View,
    faults: Sequence[Fault],
    kept: Sequence[Member],
    newcomers: Sequence[Member],
    host_of: Callable[[Member], str],
    now: float,
) -> Judgement:
    """Which slot caused the end of an iteration, and whether that excludes it or its host.

    Args:
        view: the iteration.
        faults: its published faults, in order.
        kept: the members that could go on.
        newcomers: the members that join.
        host_of: returns a member's host; empty if unknown.
        now: seconds since the epoch, for a fault without a time.
    """
    culprit = culprit_of(faults)
    before = view.decision
    if culprit is None:
        return Judgement(before.blamed)
    host, at = culprit.host or host_of(culprit.member), culprit.at or now
    since, slot = at - before.fault_window, culprit.member.slot
    recent = [one for one in before.blamed if one.at >= since]
    blamed = _newest([*recent, Blamed(slot, host, at)], before.max_faults)
    if not (what := _excluded(before.max_faults, blamed, slot, host)):
        return Judgement(blamed)
    is_host = what == f"host {host}"
    out = {one for one in (*kept, *newcomers) if (host_of(one) == host if is_host else one.slot == slot)}
    left, least = len(kept) + len(newcomers) - len(out), max(1, before.min_world_size)
    if left < least:
        why = f"{left} of min_world_size={least} ranks would be left"
        return Judgement(blamed, words=f"{_describe(before, what, 'stays')}; without it {why}")
    return Judgement(blamed, frozenset(out.intersection(kept)), slot, _describe(before, what, "is excluded"))


def why_out(decision: Decision, slot: int, host: str, now: float = 0.0) -> str:
    """Describes why a member is excluded; empty if it is not.

    Args:
        decision: the newest decision.
        slot: the member's slot.
        host: the member's host.
        now: seconds since the epoch; 0 if the decision has just been made. Decisions drop old restarts only
            at a fault, and the last fault may have been long ago.
    """
    blamed = [one for one in decision.blamed if one.at >= now - decision.fault_window]
    what = _excluded(decision.max_faults, blamed, slot, host)
    return what and _describe(decision, what, "is excluded")


def _newest(blamed: Sequence[Blamed], most: int) -> tuple[Blamed, ...]:
    """The last restarts by each slot on each host: as many of each as exclude it."""
    counts: collections.Counter[tuple[int, str]] = collections.Counter()
    newest = []
    for one in reversed(blamed):
        counts[one.slot, one.host] += 1
        if counts[one.slot, one.host] <= most:
            newest.append(one)
    return tuple(reversed(newest))


def _excluded(most: int, blamed: Sequence[Blamed], slot: int, host: str) -> str:
    """Names what has caused too many faults: a host through several slots, or one slot on it; or neither."""
    slots = [one.slot for one in blamed if one.host == host]
    if host and 0 < most <= len(slots) and len(set(slots)) > 1:
        return f"host {host}"
    # The slot may go on with another host.
    return f"slot {slot} on {host}" if 0 < most <= slots.count(slot) else ""


def _describe(settings: Decision, what: str, does: str) -> str:
    most, window = settings.max_faults, settings.fault_window
    return f"{what} {does}, after {most} faults within {window:g} s (max_faults={most})"
