"""Watching the next members in the ring, so that a lost host or network is noticed by somebody."""

from __future__ import annotations

import logging

from ..attribution import Interruption
from ..store import Fault, HeartbeatObserver, Member, StoreMixin, View
from ..store.records import FAULT

log = logging.getLogger(__name__)


class NeighbourWatch:
    """Watches the heartbeat of the next member; of those behind it too while it stands still.

    So each member costs one read an interval, and a whole lost host is still noticed at once: its first
    member's neighbour watches all of it.

    Args:
        store: where the heartbeats are.
        member: who watches.
        timeout: seconds without a heartbeat after which a member is silent.
    """

    def __init__(self, store: StoreMixin, member: Member, timeout: float) -> None:
        self._store = store
        self._member = member
        self._timeout = timeout
        self._observer = HeartbeatObserver(store, timeout)
        self.left_out = False
        """Whether the others had gone on without the member when this last looked."""

    def look(self, view: View) -> frozenset[Member]:
        """Reads the heartbeats; ends the iteration if somebody has fallen silent, and goes on without it.

        Also passes on the end of the iteration, should nobody have woken those who wait for it, and ends it
        for a member that was left out: what the others did may have been deleted since.

        Args:
            view: the iteration that is on.

        Returns:
            The members that are silent in this observer's eyes.
        """
        head = self._store.read_head()
        passed = head is not None and head.n > view.n
        self.left_out = passed and not self._store.lists(self._member)
        if self.left_out:
            self._store.end_iteration(view.n, FAULT)
        if passed:
            return frozenset()
        self._store.pass_on_end(view.n)
        silent = self._silent(view)
        if silent:
            silent -= self._store.deaths_of(view.n)
        if silent:
            self._end(view, silent)
            # Only an arrived member's proposal counts, so this does nothing until its rank has left too.
            self._store.advance(view, self._member, silent=silent)
        return silent

    def _silent(self, view: View) -> frozenset[Member]:
        if self._member not in view.members:
            return frozenset()
        start = view.members.index(self._member)
        ring = view.members[start + 1 :] + view.members[:start]
        watched: list[Member] = []
        silent: list[Member] = []
        for peer in ring:
            watched.append(peer)
            stillness = self._observer.stillness(peer)
            if stillness == 0.0:
                break
            if stillness >= self._timeout:
                silent.append(peer)
        self._observer.forget_all_but(watched)
        return frozenset(silent)

    def _end(self, view: View, silent: frozenset[Member]) -> None:
        if self._store.outcome_of(view.n) is None:
            for peer in sorted(silent):
                log.warning("slot %d has sent no heartbeat for %g s", peer.slot, self._timeout)
                self._store.log_fault(view.n, self._fault_of(peer))
        # Also when it has ended already: whoever ended it may have been lost before waking the others.
        self._store.end_iteration(view.n, FAULT)

    def _fault_of(self, peer: Member) -> Fault:
        return Fault(
            member=peer,
            rank=None,
            interruption=Interruption.UNRESPONSIVE,
            message=f"sent no heartbeat for {self._timeout:g} s, says slot {self._member.slot}",
            host="",
            pid=0,
        )
