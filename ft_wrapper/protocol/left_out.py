"""Why the others go on without a member, for people."""

import contextlib

from ..exception import StoreError
from . import Agreement
from .records import Member, MemberRecord


def in_words(agreement: Agreement, member: Member, own: MemberRecord, n: int, barrier_timeout: float) -> str:
    """Why a member is not in the iteration after one that it was in.

    Args:
        agreement: of the ranks.
        member: who.
        own: what is known of its process.
        n: the iteration that it was in.
        barrier_timeout: how long it could take to leave that.
    """
    if agreement.joining.newest_of(member.slot) != member:
        return taken_over(agreement, member, own)
    late = f"it took longer than barrier_timeout={barrier_timeout:g} s to leave the function"
    why = f"it was declared dead, or {late}"  # the keys of an old iteration are deleted
    with contextlib.suppress(StoreError):
        if member in agreement.ends.deaths_of(n):
            known = [fault.message for fault in agreement.ends.faults_of(n) if fault.member == member]
            why = " ".join(["it was declared dead", *(f"({message})" for message in known[-1:])])
        elif agreement.ends.outcome_of(n) is not None:
            why = late
    return f"slot {member.slot} was left out after iteration {n}: {why}"


def taken_over(agreement: Agreement, member: Member, own: MemberRecord) -> str:
    """That another process holds a member's slot.

    Args:
        agreement: of the ranks.
        member: who.
        own: what is known of its process.
    """
    record = agreement.joining.record_of(agreement.joining.newest_of(member.slot))
    return (
        f"slot {member.slot} was taken over by process {record.pid} on {record.host}; this is process "
        f"{own.pid} on {own.host}: no slot can be held by two processes, so make sure that each RANK is "
        "started once"
    )
