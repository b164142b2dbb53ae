"""Which rank did not come: told from where all ranks of a process group stood when they hung.

Nothing is concluded unless all ranks of the group have said where they stood, and more than half of them
stood in the same operation. A rank that stands elsewhere is named only if it has not begun that operation,
or has begun a later one; and not if it waits for yet another rank there.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from ..protocol.records import Fault, Member
from ..protocol.standing import Counted

_Counts = Mapping[Member, Counted]
_At = tuple[int, str]  # an operation's number, and its name; or a place in a library, which may be one, too


def who_is_missing(faults: Iterable[Fault]) -> dict[Member, str]:
    """Names the ranks that kept the others waiting.

    Args:
        faults: of ranks that hung, with where each stood.

    Returns:
        By member what it did, to be put behind its name; empty if that cannot be told.
    """
    said = {fault.member: fault for fault in faults if fault.stood.counts}
    groups: dict[str, dict[Member, Counted]] = defaultdict(dict)
    for member, fault in said.items():
        for count in fault.stood.counts:
            groups[count.group][member] = count
    # A silent rank may be the missing one.
    whole = {name: counts for name, counts in groups.items() if _is_whole(counts)}
    found: dict[Member, str] = {}
    settled: set[Member] = set()
    for group, counts in whole.items():
        odd, together = _odd_ones(group, counts, said)
        settled |= together
        for member, why in odd.items():
            found.setdefault(member, why)
    named = {member: why for member, why in found.items() if member not in settled}
    named = {one: why for one, why in named.items() if not _waits(one, whole, said, settled, len(named) > 1)}
    return named or ({} if settled else _waited_for(whole, said))


def _is_whole(counts: _Counts) -> bool:
    return len(counts) > 1 and all(count.size == len(counts) for count in counts.values())


def _odd_ones(
    group: str, counts: _Counts, said: Mapping[Member, Fault]
) -> tuple[dict[Member, str], set[Member]]:
    """Those of a group that are not where most are; and those who are, if there are any of the others."""
    at = {member: _at(group, counts[member].number, said[member]) for member in counts}
    (most, times), *_ = Counter(at.values()).most_common(1)
    if most is None or 2 * times <= len(counts):
        return {}, set()
    odd = {}
    for member, count in counts.items():
        why = None if at[member] == most else _why(group, count, at[member], most, said[member])
        if why is not None:
            odd[member] = why
    return odd, {member for member in counts if at[member] == most} if odd else set()


def _at(group: str, number: int, fault: Fault) -> _At | None:
    """Where one stands, if it waits for others there."""
    stood = fault.stood
    if stood.in_collective and stood.group == group:
        return number, stood.operation
    # In a backward pass, or waiting for what it has begun: that is not said.
    is_in_library = not stood.operation and fault.message.startswith("stood in ")
    return (number, fault.message) if is_in_library else None


def _why(group: str, count: Counted, at: _At | None, most: _At, fault: Fault) -> str | None:
    """Why one is odd that is not where most are; None if it may be where they are in truth."""
    number, operation = most
    is_known = not operation.startswith("stood in ")
    what = f"{operation if is_known else 'collective'} #{number} of group {group}"
    stood = fault.stood
    is_there = stood.in_collective and stood.group == group
    if is_there and stood.operation == operation and not count.is_exact:
        return None  # it may only have sent and received more, or less
    if count.number < number:
        return f"did not come to {what}"
    if count.number > number:
        further = count.number - number
        is_sure = is_known and (is_there or count.is_exact)
        return f"was {further} further than the others, who were in {what}" if is_sure else None
    if is_there and is_known and at is not None:
        return f"was in {at[1]} instead of {what}"
    return None  # it has begun it, and may wait for its end


def _waits(
    one: Member,
    whole: Mapping[str, _Counts],
    said: Mapping[Member, Fault],
    settled: set[Member],
    are_others: bool,
) -> bool:
    """Whether one that is odd may itself wait for a rank that is not where most are."""
    stood = said[one].stood
    if not stood.operation:
        return False
    if not stood.in_collective:
        return are_others or stood.group not in whole
    counts = whole.get(stood.group)
    if counts is None:
        return True  # for one that has said nothing
    return any(count.number < counts[one].number for member, count in counts.items() if member not in settled)


def _waited_for(whole: Mapping[str, _Counts], said: Mapping[Member, Fault]) -> dict[Member, str]:
    """Those who stand in code of their own, where another has begun a collective: no majority is needed."""
    named: dict[Member, str] = {}
    for fault in said.values():
        counts = whole.get(fault.stood.group, {}) if fault.stood.in_collective else {}
        for member, count in counts.items():
            begun = counts[fault.member].number
            is_behind = count.is_exact and count.number < begun
            if (
                is_behind
                and said[member].message.startswith(("stood at ", "waited for "))
                and not said[member].stood.operation
            ):
                named.setdefault(member, f"did not come to {fault.stood}")
    return named
