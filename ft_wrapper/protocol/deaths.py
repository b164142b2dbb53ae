"""Reports of deaths: repeated until the other members go on without the dead member.

A node's slots outlive it: the node that takes its place later has the same slots. So `holders` looks up the
members that held the slots, and only their deaths are reported.
"""

from collections.abc import Iterable, Mapping

from ..attribution import Interruption
from . import Agreement, keys
from .records import Fault, Member, View, record_of
from .waiting import looks

#: Seconds after which a report gives up, if each next iteration still lists the dead member.
TIMEOUT = 120.0

_FIRST_LOOK = 0.1  # seconds between reads of head, in case a notification is lost
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
    """Logs deaths, ends the iteration if a dead member was active, and repeats this in the next iterations.

    A proposal under way may have missed the log, and keep a dead member in the next iteration. The death is
    logged there, too, until head moves to an iteration without the dead member.

    Args:
        agreement: the protocol over the job's store.
        view: the last iteration that the members are known to have been in; None before the first one.
        dead: the dead members, each with its fault, for people; None to publish no fault.
        active: whether one of them was an active rank in ``view``. In an iteration that the caller does not
            know, a member counts as active unless others have all the active ranks.
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
        # Dead processes that are not members may have asked to join. While n runs, each later proposer reads
        # the log.
        outside = said if view is None else dict.fromkeys(dead.keys() - inside.keys())
        if outside:
            ends.log_deaths(n, outside, ends=False, returns=returns)
            if view is None or ends.outcome_of(n) is not None:
                kept |= iterations.joins_of(n) & outside.keys()
        said = dict.fromkeys(dead)
        # A later proposer reads the log. A proposal under way may have read the log too early, but takes only
        # members that had arrived, or asked to join, before.
        if not (kept and _await_move(agreement, n, view, deadline - store.now())):
            return


def report_lost(agreement: Agreement, lost: Mapping[Member, str], *, returns: bool) -> None:
    """Reports the deaths of members whose own monitors cannot: their node is lost, or has left.

    The deaths are logged together. Otherwise the next iteration would keep a member that had arrived before
    it died and was logged after the other members, which would cost another restart.

    Args:
        agreement: the protocol over the ranks' store.
        lost: the dead members, each with the cause, for people.
        returns: whether replacements are on their way; a restart may wait a little for them.
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
    """Waits until the other members have gone on from an iteration, or none is left.

    Args:
        agreement: the protocol over the job's store.
        view: the iteration.
        timeout: longest time to wait, in seconds.
    """
    if not agreement.ends.deaths_of(view.n).issuperset(view.members):
        _await_move(agreement, view.n, view, timeout)


def _await_move(agreement: Agreement, n: int, view: View | None, timeout: float) -> bool:
    """Waits until head moves from n, and proposes if that is possible.

    Returns:
        Whether head has moved. False at the timeout, or if no member is left.
    """
    wake = keys.wake_head(n + 1)
    for look in looks(agreement.store, wake, timeout, first=_FIRST_LOOK, longest=_LONGEST_LOOK):
        if look.value is not None:
            return True
        head = agreement.iterations.read_head()
        if head is not None and head.n > n:
            return True  # it moved so long ago that the notification key has been deleted
        if view is not None and agreement.iterations.advance(view, None):
            return True
        here = agreement.iterations.joins_of(n) if view is None else set(view.members)
        if here <= agreement.ends.deaths_of(n):
            return False
    return False


def holders(agreement: Agreement, slots: Iterable[int]) -> list[Member]:
    """The members that now hold slots; slots that were never held are left out.

    Args:
        agreement: the protocol over the ranks' store.
        slots: the slots.
    """
    newest = (agreement.joining.newest_of(slot) for slot in slots)
    return [member for member in newest if member.incarnation >= 0]
