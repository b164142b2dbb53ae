"""Watches the next members in the ring, so that the loss of a host or network is noticed."""

import bisect
import enum
from collections.abc import Collection, Iterator

from ..attribution import Interruption
from . import Agreement, keys
from .records import FAULT, Fault, Head, Member, View
from .silence import HeartbeatObserver

_SOON = 8  # once a heartbeat is unchanged for this fraction of the timeout, looks include members behind it
_AHEAD = 8  # new members that a look adds for each member whose heartbeat is unchanged
_FIRST_TRY = 0.05  # seconds between attempts to propose, once an iteration with a silent member has ended


class Sight(enum.Flag):
    """What a look reads. Each part is one request."""

    HEARTS = enum.auto()
    HEAD = enum.auto()
    END = enum.auto()
    ALL = HEARTS | HEAD | END


class NeighbourWatch:
    """Watches the heartbeat of the next member in the ring; while it is unchanged, also of members behind.

    So a look mostly costs one request. While heartbeats are unchanged, each look adds more members, so if
    many are lost together, the last one is known to be silent soon after the first.

    Args:
        agreement: the protocol over the job's store.
        heart: name of the watchers' heartbeat.
        timeout: seconds without a heartbeat after which a member is silent.

    Attributes:
        doubts: whether a heartbeat was unchanged at the last look, so that looks include members behind it.
        left_out: watchers that were not in the current iteration when head was last read.
    """

    def __init__(self, agreement: Agreement, heart: str, timeout: float) -> None:
        self._agreement = agreement
        self._heart = heart
        self._timeout = timeout
        self._observer = HeartbeatObserver(agreement.heartbeats, timeout)
        self._head: Head | None = None  # as last read
        self._current: View | None = None  # the same, with its members
        self._spares: tuple[Head, set[Member]] | None = None  # silent members that are known to be spares
        self._suspicion: tuple[View, Member, frozenset[Member]] | None = None
        self._ended: Head | None = None  # the iteration that this watch has ended for a member's silence
        # Seconds to the next attempt; it grows, since between two calls an ended iteration may last long.
        self._pause = _FIRST_TRY
        self.doubts = False
        self.left_out: frozenset[Member] = frozenset()

    def look(self, view: View, watchers: Collection[Member], sight: Sight = Sight.ALL) -> frozenset[Member]:
        """Looks at the job; ends the iteration if an active member has fallen silent.

        Once the iteration has ended for any reason, proposes the next one without the silent members. If it
        has ended, wakes its waiters again, in case no other process has. If a watcher was left out of the
        current iteration, ends ``view`` for the watcher, since its old end may have been deleted.

        Args:
            view: the watchers' iteration.
            watchers: the members for which this watches.
            sight: what to look at.

        Returns:
            The members that are silent, as far as this watch knows.
        """
        own = frozenset(watchers)
        if self._ended is not None and view.head != self._ended:
            # A silent member of the new iteration has nevertheless arrived, whatever stops its heartbeat. Its
            # silence is measured from zero: it causes a restart per timeout, not per look.
            self._observer.forget_all_but(())
            self._ended = None
        try:
            if Sight.HEAD in sight:
                self._look_at_head(view, own)
            if self._has_passed(view):
                self._suspicion = None
                return frozenset()
            if Sight.END in sight and self._agreement.ends.outcome_of(view.n) is not None:
                self._agreement.ends.pass_on_end(view.n)
            return self._look_at_hearts(view, own) if Sight.HEARTS in sight else frozenset()
        except Exception:
            self._observer.forget_all_but(())
            raise

    def leave_out_suspects(self) -> float | None:
        """Once an iteration with silent members has ended, proposes the next one without them.

        So the restart does not wait for members that were already silent.

        Returns:
            Seconds after which to call this again; None if there is nothing to do.
        """
        if self._suspicion is None:
            return None
        view, watcher, silent = self._suspicion
        store = self._agreement.store
        # Not a wait, which would time out repeatedly while a lost spare is in a healthy iteration.
        if not store.check([store.wake_name(keys.wake_end(view.n))]):
            self._pause = _FIRST_TRY
            return None
        if not self._agreement.iterations.advance(view, watcher, silent=silent):
            self._pause *= 2
            return self._pause / 2
        self._suspicion = None
        return None

    def _look_at_head(self, view: View, own: frozenset[Member]) -> None:
        self._head = self._agreement.iterations.read_head()
        self.left_out = frozenset()
        if self._head is not None and self._has_passed(view):
            if self._current is None or self._current.head != self._head:
                self._current = self._agreement.iterations.read_current()
            self.left_out = own.difference(() if self._current is None else self._current.members)
        if self.left_out:
            self._agreement.ends.end_iteration(view.n, FAULT)

    def _look_at_hearts(self, view: View, own: frozenset[Member]) -> frozenset[Member]:
        silent = self._silent(view, own)
        if silent:
            silent -= self._agreement.ends.deaths_of(view.n)
        self._suspicion = None
        if silent:
            self._head = self._agreement.iterations.read_head()  # the last read may be long ago
            if self._has_passed(view):
                return frozenset()
            self._suspicion = view, min(own.intersection(view.members)), silent
            self._act(*self._suspicion)
        return silent

    def _has_passed(self, view: View) -> bool:
        return self._head is not None and self._head.n > view.n

    def _silent(self, view: View, own: frozenset[Member]) -> frozenset[Member]:
        """The silent members among those that the watchers have to look at."""
        read: dict[str, float] = {}  # seconds that each heartbeat read in this look has been unchanged
        watched: list[Member] = []
        silent: list[Member] = []
        starts = _starts(view, own)
        for start in starts:
            still = new = 0
            for peer in _behind(view, start):
                is_new = not self._observer.knows(peer)
                if peer in own or (is_new and new >= max(1, _AHEAD * still)):
                    break
                watched.append(peer)
                if self._observer.heart_of(peer) == self._heart:
                    continue  # a lost member of this node, which its monitor reports
                new += is_new
                stillness = self._observer.stillness(peer, read)
                if stillness > (0.0 if still else self._timeout / _SOON):
                    still += 1
                elif not is_new:
                    break
                if stillness >= self._timeout:
                    silent.append(peer)
        self._observer.forget_all_but(watched)
        self.doubts = len(watched) > len(starts)
        return frozenset(silent)

    def _act(self, view: View, watcher: Member, silent: frozenset[Member]) -> None:
        outcome = self._agreement.ends.outcome_of(view.n)
        active = sorted(silent - self._known_spares(view, watcher, silent)) if outcome is None else []
        if active:
            self._ended = view.head
        for peer in active:
            self._warn(f"slot {peer.slot}", "evicted")
            self._agreement.ends.log_fault(view.n, self._fault_of(peer, watcher))
        if active or outcome is not None:
            # Even if it has already ended: the process that ended it may have died before it woke anyone.
            self._agreement.ends.end_iteration(view.n, FAULT)
            # Only arrived members may propose, so this does nothing until the watcher has arrived.
            self._agreement.iterations.advance(view, watcher, silent=silent)

    def _known_spares(self, view: View, watcher: Member, silent: frozenset[Member]) -> frozenset[Member]:
        """The silent members that are certainly spares, whose silence does not end the iteration."""
        if self._spares is None or self._spares[0] != view.head:
            self._spares = view.head, set()
        known = self._spares[1]
        for peer in sorted(silent - known):
            if not self._agreement.entering.may_be_active(view.n, peer):
                known.add(peer)
                self._warn(f"slot {peer.slot}, a spare,", "the next restart goes on without it")
                self._agreement.ends.log_fault(view.n, self._fault_of(peer, watcher))
        return silent & known

    def _warn(self, who: str, what_follows: str) -> None:
        self._agreement.store.warn(f"{who} has sent no heartbeat for {self._timeout:g} s: {what_follows}")

    def _fault_of(self, peer: Member, watcher: Member) -> Fault:
        message = f"sent no heartbeat for {self._timeout:g} s, says slot {watcher.slot}"
        return Fault(peer, None, Interruption.UNRESPONSIVE, message)


def _starts(view: View, own: frozenset[Member]) -> list[int]:
    """The places in the ring of watchers that no watcher follows; one if the watchers are in a row."""
    ring, size = view.members, len(view.members)
    places = sorted({bisect.bisect_left(ring, one) % size for one in own})  # some may not be in the ring
    return [place for place in places if ring[place] in own and ring[(place + 1) % size] not in own]


def _behind(view: View, start: int) -> Iterator[Member]:
    """The members after a place in the ring, the next one first."""
    size = len(view.members)
    return (view.members[(start + step) % size] for step in range(1, size))
