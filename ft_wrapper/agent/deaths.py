"""What an agent knows of the end of processes on other nodes, told to those that live.

A seat's slots outlive the node that had it. A node that has evidence that the node is out (it has taken it
out itself, it leaves itself, or it has been given the seat) notes who held the slots until then, and logs the
deaths of exactly these: processes that take the slots later are not meant.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable

from ..attribution import Interruption
from ..monitor.death import report_death
from ..store import Fault, Member, StoreMixin
from .background import in_background

TIMEOUT = 120.0
"""Seconds for which a death is kept being told, while the others do not go on without it."""


def holders(store: StoreMixin, slots: Iterable[int]) -> list[Member]:
    """Who holds the slots now; those that no one has held are left out.

    Args:
        store: of the ranks.
        slots: which ones.
    """
    newest = (store.newest_of(slot) for slot in slots)
    return [member for member in newest if member.incarnation >= 0]


def log_deaths(
    store: StoreMixin, members: Iterable[Member], why: str, *, return_: bool
) -> list[threading.Thread]:
    """Logs deaths, until the others have gone on without these; each in a thread, for that may take a while.

    Args:
        store: of the ranks; not used after the return.
        members: who is dead.
        why: for people.
        return_: whether others come in their place, for which a restart may wait a little.
    """
    threads = []
    for member in members:
        client = store.clone()
        tell = functools.partial(_tell, client, member, why, return_)
        threads.append(in_background(f"telling of the death of {member.name}", tell))
    return threads


def _tell(store: StoreMixin, member: Member, why: str, return_: bool) -> None:
    try:
        record = store.record_of(member)
        pid = record.get("pid")
        fault = Fault(
            member=member,
            rank=None,
            interruption=Interruption.TERMINATED,
            message=why,
            host=str(record.get("host", "")),
            pid=pid if isinstance(pid, int) else 0,
            at=time.time(),
        )
        current = store.read_current()
        view = None if current is None else current[0]
        active = view is None or store.may_be_active(view.n, member)
        report_death(store, view, member, fault, active=active, timeout=TIMEOUT, returns=return_)
    finally:
        store.close()
