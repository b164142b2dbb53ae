"""The deaths of processes on lost nodes, told to the ranks that live."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable

from ..protocol import Agreement
from ..protocol.deaths import report_lost
from ..store import Member, StoreMixin
from ..store.bounded import in_background


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
        tell = functools.partial(_tell, store.clone(), member, why, return_)
        threads.append(in_background(f"telling of the death of {member.name}", tell))
    return threads


def _tell(store: StoreMixin, member: Member, why: str, returns: bool) -> None:
    with contextlib.closing(store):
        report_lost(Agreement(store), member, why, returns=returns)
