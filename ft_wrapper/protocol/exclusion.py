"""Excludes a slot or a host that causes fault after fault, so that a bad node gets no second seat. Pure.

Each decision carries who caused the recent restarts. The proposer of a decision judges, and all other ranks
read the verdict, so all agree on who is excluded.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence

from ..attribution import Interruption, by_blame
from .records import Blamed, Decision, Fault, Member, View


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What follows from the faults of an iteration.

    Args:
        blamed: who caused the restarts of the last while.
        out: the members that are left out for that.
        slot: the slot whose replacement is not waited for; None if there is none.
        words: who is out, or stays though it should not, and why; empty if there is no such one.
    """

    blamed: tuple[Blamed, ...]
    out: frozenset[Member] = frozenset()
    slot: int | None = None
    words: str = ""


def culprit_of(faults: Sequence[Fault]) -> Fault | None:
    """Whose fault ended an iteration; None if it was none of a slot or host.

    Args:
        faults: what was published, in that order.
    """
    if not faults:
        return None
    worst = by_blame(fault.record for fault in faults)[0].interruption
    if worst is Interruption.BASE_EXCEPTION:  # it has left in order
        return None
    return next(fault for fault in faults if fault.interruption is worst)


def judge(
    view: View,
    faults: Sequence[Fault],
    kept: Sequence[Member],
    newcomers: Sequence[Member],
    host_of: Callable[[Member], str],
) -> Verdict:
    """Who caused the end of an iteration, and whether that was once too often.

    Args:
        view: the iteration.
        faults: what was published in it, in that order.
        kept: the members that could go on.
        newcomers: those that join.
        host_of: where a member runs; empty if that is not known.
    """
    culprit = culprit_of(faults)
    before = view.decision
    if culprit is None:
        return Verdict(before.blamed)
    host, at = culprit.host or host_of(culprit.member), culprit.at or time.time()
    since, slot = at - before.fault_window, culprit.member.slot
    recent = [one for one in before.blamed if one.at >= since]
    blamed = _newest([*recent, Blamed(slot, host, at)], before.max_faults)
    if _is_host_bad(before.max_faults, blamed, host):
        out = frozenset(one for one in kept if host_of(one) == host)
        what, new = f"host {host}", [one for one in newcomers if host_of(one) == host]
    elif _is_slot_bad(before.max_faults, blamed, slot, host):
        out = frozenset(one for one in kept if one.slot == slot)
        what, new = f"slot {slot} on {host}", [one for one in newcomers if one.slot == slot]
    else:
        return Verdict(blamed)
    left, least = len(kept) - len(out) + len(newcomers) - len(new), max(1, before.min_world_size)
    if left < least:
        why = f"{left} of min_world_size={least} ranks would be left"
        return Verdict(blamed, words=f"{_in_words(before, what, 'stays')}; without it {why}")
    return Verdict(blamed, out, slot, _in_words(before, what, "is excluded"))


def why_out(decision: Decision, slot: int, host: str, now: float = 0.0) -> str:
    """Why a member is to be out, in words; empty if there is no reason.

    Args:
        decision: the newest.
        slot: the member's.
        host: where it runs.
        now: the time of day. Only a fault makes decisions forget older ones, and the last one may have been
            long ago; 0 if the decision has just been made.
    """
    blamed = [one for one in decision.blamed if one.at >= now - decision.fault_window]
    if _is_host_bad(decision.max_faults, blamed, host):
        return _in_words(decision, f"host {host}", "is excluded")
    if _is_slot_bad(decision.max_faults, blamed, slot, host):
        return _in_words(decision, f"slot {slot} on {host}", "is excluded")
    return ""


def _newest(blamed: Sequence[Blamed], most: int) -> tuple[Blamed, ...]:
    """The last faults of each slot on each host: as many as exclude it, however many others there are."""
    counts: collections.Counter[tuple[int, str]] = collections.Counter()
    newest = []
    for one in reversed(blamed):
        counts[one.slot, one.host] += 1
        if counts[one.slot, one.host] <= most:
            newest.append(one)
    return tuple(reversed(newest))


def _is_host_bad(most: int, blamed: Sequence[Blamed], host: str) -> bool:
    """Whether a host has caused too many faults, and not by one slot alone."""
    slots = [one.slot for one in blamed if host and one.host == host]
    return 0 < most <= len(slots) and len(set(slots)) > 1


def _is_slot_bad(most: int, blamed: Sequence[Blamed], slot: int, host: str) -> bool:
    """Whether a slot has caused too many faults on its host; on another one it may well go on."""
    return 0 < most <= sum((one.slot, one.host) == (slot, host) for one in blamed)


def _in_words(settings: Decision, what: str, does: str) -> str:
    most, window = settings.max_faults, settings.fault_window
    return f"{what} {does}, after {most} faults within {window:g} s (max_faults={most})"
