"""Watching the next members in the ring, so that a lost host or network is noticed by somebody."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..attribution import Interruption
from ..store import Fault, HeartbeatObserver, Member, StoreMixin, View
from ..store.records import FAULT

log = logging.getLogger(__name__)


class NeighbourWatch:
    """Watches the heartbeat of the next member; of those behind it too while it stands still.

    So each member costs one look an interval, and a whole lost host is still noticed at once: its first
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
        ring = self._ring(view)
        try:
            seen = self._store.glance(view.n, ring[0] if ring else None)
        except Exception:
            self._observer.forget_all_but(())
            raise
        passed = seen.head is not None and seen.head.n > view.n
        self.left_out = passed and not self._store.lists(self._member)
        if self.left_out:
            self._store.end_iteration(view.n, FAULT)
        if passed:
            return frozenset()
        if seen.has_ended:
            self._store.pass_on_end(view.n)
        silent = self._silent(ring, seen.heartbeats)
        if silent:
            silent -= self._store.deaths_of(view.n)
        if silent:
            self._end(view, silent)
            # Only an arrived member's proposal counts, so this does nothing until its rank has left too.
            self._store.advance(view, self._member, silent=silent)
        return silent

    def _ring(self, view: View) -> tuple[Member, ...]:
        """The other members, from the next one on."""
        if self._member not in view.members:
            return ()
        start = view.members.index(self._member)
        return view.members[start + 1 :] + view.members[:start]

    def _silent(self, ring: Sequence[Member], heartbeats: int | None) -> frozenset[Member]:
        """Who of the others is silent, as far as this one has to find out.

        Args:
            ring: the others.
            heartbeats: those of the first of them, which were read just now.
        """
        watched: list[Member] = []
        silent: list[Member] = []
        for peer in ring:
            if watched or heartbeats is None:
                stillness = self._observer.stillness(peer)
            else:
                stillness = self._observer.stillness_at(peer, heartbeats)
            watched.append(peer)
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
