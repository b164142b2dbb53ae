"""The line that a restart leaves in the log: what failed, where, who took over, how long it took."""

import time
from collections.abc import Iterable, Sequence

from ..attribution import Interruption, by_blame
from ..protocol import Agreement
from ..protocol.operations import Operations
from ..protocol.records import Decision, Fault, Member, View
from ..state import State
from .missing import who_is_missing

_SHOWN = 4  # faults and promotions named in a line; the others are counted


def restart_line(
    store: Operations, view: View, decision: Decision, state: State, faults: Sequence[Fault], seconds: float
) -> str:
    """Puts a restart into words, from what the store has of it.

    Args:
        store: what the ranks that entered have noted there.
        view: the iteration that begins.
        decision: what led to it.
        state: of a rank that has entered it.
        faults: what was published in the one before, in that order.
        seconds: from its end until the last active rank was back.
    """
    entered = Agreement(store).entering.entered_in(view.n).values()
    active = [(one, one.active_rank) for one in entered if one.active_rank is not None]
    faults = [*faults, *evictions(store, decision.removed, faults)]
    parts = [in_words(faults)] if faults or not decision.joined else []
    if decision.joined:
        parts.append(_joiners(decision.joined))
    parts.append(_promotions([(one.member.slot, rank) for one, rank in active if one.promoted]))
    recompiling = sorted(rank for one, rank in active if one.recompiles)
    if recompiling:
        names = _joined(map(str, recompiling), len(recompiling))
        parts.append(f"{plural(len(recompiling), 'rank')} {names} will compile again")
    active_size = state.active_world_size or 0
    spares = state.world_size - active_size
    size = f"{active_size} active + {spares} spare {plural(spares, 'rank')}"
    parts.append(f"{size}, back in {duration(seconds)}")
    return f"restart {state.iteration}: {'; '.join(parts)}"


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
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


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


def _promotions(promoted: Sequence[tuple[int, int]]) -> str:
    if not promoted:
        return "no spare stepped in"
    return _joined((f"spare slot {slot} took over as rank {rank}" for slot, rank in promoted), len(promoted))


def _joiners(joined: Sequence[Member]) -> str:
    names = _joined((str(member.slot) for member in joined), len(joined))
    return f"{plural(len(joined), 'slot')} {names} joined"


def _joined(parts: Iterable[str], count: int) -> str:
    shown = [part for part, _ in zip(parts, range(_SHOWN), strict=False)]
    if count > _SHOWN:
        shown.append(f"and {count - _SHOWN} more")
    return ", ".join(shown)


def plural(count: int, noun: str) -> str:
    """A noun, in the plural unless there is one."""
    return noun if count == 1 else noun + "s"
