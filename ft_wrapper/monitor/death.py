"""Telling the others that a member has ended, until they go on without it."""

from __future__ import annotations

import logging
import os

from ..store import Fault, Member, StoreMixin, View
from ..store import keys as names

log = logging.getLogger(__name__)

REPLACED_ENV = "FT_WRAPPER_REPLACED"

_FIRST_LOOK = 0.1  # seconds between looks whether head has moved, should a wake be lost
_LONGEST_LOOK = 4.0


def is_replaced() -> bool:
    """Whether an agent has said, in the environment, that it starts this process again if it dies."""
    return os.environ.get(REPLACED_ENV) == "1"


def report_death(
    store: StoreMixin,
    view: View | None,
    member: Member,
    fault: Fault | None,
    *,
    active: bool,
    timeout: float,
    returns: bool = False,
) -> None:
    """Logs a death, ends the iteration if the member was active, and keeps at it.

    A proposal that was under way may not have seen the log, and keep the dead member in the next iteration:
    then it is logged there too, until head leaves it out.

    Args:
        store: where to.
        view: the iteration that the member was last known in; None before the first one.
        member: who has ended.
        fault: what is known of it, for people; None to keep quiet.
        active: whether it called the function in ``view``; in an iteration that the caller was not told of
            it counts as active unless others have all the active ranks.
        timeout: seconds after which to give up.
        returns: whether a replacement is on its way.
    """
    deadline = store.now() + timeout
    told = fault
    while True:
        head = store.read_head()
        if head is None:
            n = names.BEFORE_FIRST
            store.log_death(n, member, told, ends=False, returns=returns)
            kept = member in store.joins_of(n)
        else:
            if view is None or head != view.head:
                current = store.read_current()
                assert current is not None
                view = current[0]
                active = store.may_be_active(view.n, member)
            n = view.n
            if member in view.members:
                store.log_death(n, member, told, ends=active, returns=returns)
                store.count_death(view)
                kept = member in store.arrivals_of(n)
            else:
                # It may have asked to be let in. Where n has not ended yet, each proposer reads the log.
                store.log_death(n, member, None, ends=False, returns=returns)
                kept = store.outcome_of(n) is not None and member in store.joins_of(n)
        told = None
        # A later proposer reads the log. Only a proposal that was under way may have read it too early,
        # and it takes the member only if that had arrived (or joined) before.
        if not kept:
            return
        if not _await_move(store, n, view, deadline):
            log.info("%s has ended, and the others have not gone on without it", member.name)
            return


def await_others(store: StoreMixin, view: View, timeout: float) -> None:
    """Waits until those who are left have gone on from an iteration, or no one is left.

    Args:
        store: where they agree.
        view: the iteration.
        timeout: seconds to wait at the longest.
    """
    deadline = store.now() + timeout
    pause = _FIRST_LOOK
    while store.now() < deadline and not store.deaths_of(view.n).issuperset(view.members):
        if store.wait_for(names.wake_head(view.n + 1), min(pause, deadline - store.now())):
            return
        if store.read_head() != view.head:
            return  # long ago: the wake has been deleted
        pause = min(2 * pause, _LONGEST_LOOK)


def _await_move(store: StoreMixin, n: int, view: View | None, deadline: float) -> bool:
    pause = _FIRST_LOOK
    while store.now() < deadline:
        if store.wait_for(names.wake_head(n + 1), min(pause, deadline - store.now())):
            return True
        head = store.read_head()
        if head is not None and head.n > n:
            return True  # long ago: the wake has been deleted
        if view is not None and store.advance(view, None):
            return True
        here = store.joins_of(n) if view is None else set(view.members)
        if here <= store.deaths_of(n):
            return False  # no one is left who could go on
        pause = min(2 * pause, _LONGEST_LOOK)
    return False
