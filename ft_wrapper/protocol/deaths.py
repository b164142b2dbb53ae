"""Telling the others that a member has ended, until they go on without it.

A node's slots outlive it: the node that takes its seat later has the same slots. So the members that held
them are looked up first (`holders`), and the deaths of exactly these are reported.
"""

from collections.abc import Iterable, Mapping

from ..attribution import Interruption
from . import Agreement, keys
from .records import Fault, Member, View, record_of
from .waiting import looks

#: Seconds after which a report gives up, if every next iteration still lists the dead.
TIMEOUT = 120.0

_FIRST_LOOK = 0.1  # seconds between looks whether head has moved, should a wake be lost
_LONGEST_LOOK = 4.0


def report_deaths(
    agreement: Agreement,
    view: View | None,
    dead: Mapping[Member, Fault | None],
    *,
    active: bool,
    timeout: float,
    returns: bool = False,
) -> None:
    """Logs deaths, ends the iteration if one of the members was active, and keeps at it.

    A proposal that was under way may not have seen the log, and keep a dead member in the next iteration:
    then it is logged there too, until head leaves it out.

    Args:
        agreement: where to.
        view: the iteration that the members were last known in; None before the first one.
        dead: who has ended, each with what is known of it, for people; None to keep quiet.
        active: whether one of them called the function in ``view``; in an iteration that the caller was not
            told of, one counts as active unless others have all the active ranks.
        timeout: seconds after which to give up.
        returns: whether replacements are on their way.
    """
    ends, iterations, store = agreement.ends, agreement.iterations, agreement.store
    deadline, said = store.now() + timeout, dict(dead)
    while True:
        head = iterations.read_head()
        if head is not None and (view is None or head != view.head):
            view = iterations.read_current()
            assert view is not None
            active = any(agreement.entering.may_be_active(view.n, member) for member in dead)
        n, members = (keys.BEFORE_FIRST, ()) if view is None else (view.n, view.members)
        inside, kept = {member: fault for member, fault in said.items() if member in members}, set[Member]()
        if view is not None and inside:
            ends.log_deaths(n, inside, ends=active, returns=returns)
            iterations.count_deaths(view, len(inside))
            kept |= iterations.arrivals_of(n) & inside.keys()
        # Members outside may have asked to join. While n runs, every later proposer reads the log.
        outside = said if view is None else dict.fromkeys(dead.keys() - inside.keys())
        if outside:
            ends.log_deaths(n, outside, ends=False, returns=returns)
            if view is None or ends.outcome_of(n) is not None:
                kept |= iterations.joins_of(n) & outside.keys()
        said = dict.fromkeys(dead)
        # A later proposer reads the log. Only a proposal that was under way may have read it too early,
        # and it takes a member only if that had arrived (or joined) before.
        if not (kept and _await_move(agreement, n, view, deadline - store.now())):
            return


def report_lost(agreement: Agreement, lost: Mapping[Member, str], *, returns: bool) -> None:
    """Reports the deaths of members whose own monitors cannot report them: their node is lost, or has left.

    They are logged together. One that had arrived before it died would be kept in the next iteration if its
    death came later than the others', and cost another restart.

    Args:
        agreement: of the ranks.
        lost: who is dead, and why, for people.
        returns: whether other processes take their places, for which a restart may wait a little.
    """
    if not lost:
        return
    store, now = agreement.store, agreement.store.wall_clock()
    faults = {
        member: record_of(store, member).fault(member, None, Interruption.TERMINATED, why, now)
        for member, why in lost.items()
    }
    report_deaths(agreement, None, faults, active=True, timeout=TIMEOUT, returns=returns)


def await_others(agreement: Agreement, view: View, timeout: float) -> None:
    """Waits until those who are left have gone on from an iteration, or no one is left.

    Args:
        agreement: where they agree.
        view: the iteration.
        timeout: seconds to wait at the longest.
    """
    if not agreement.ends.deaths_of(view.n).issuperset(view.members):
        _await_move(agreement, view.n, view, timeout)


def _await_move(agreement: Agreement, n: int, view: View | None, timeout: float) -> bool:
    """Waits until head moves from n, and moves it if it can; False if it does not, or no one is left."""
    wake = keys.wake_head(n + 1)
    for look in looks(agreement.store, wake, timeout, first=_FIRST_LOOK, longest=_LONGEST_LOOK):
        if look.value is not None:
            return True
        head = agreement.iterations.read_head()
        if head is not None and head.n > n:
            return True  # long ago: the wake has been deleted
        if view is not None and agreement.iterations.advance(view, None):
            return True
        here = agreement.iterations.joins_of(n) if view is None else set(view.members)
        if here <= agreement.ends.deaths_of(n):
            return False  # no one is left who could go on
    return False


def holders(agreement: Agreement, slots: Iterable[int]) -> list[Member]:
    """Who holds the slots now; those that no one has held are left out.

    Args:
        agreement: of the ranks.
        slots: which ones.
    """
    newest = (agreement.joining.newest_of(slot) for slot in slots)
    return [member for member in newest if member.incarnation >= 0]
