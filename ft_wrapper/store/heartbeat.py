"""Who is silent. Heartbeats are counters, observed on the observer's own clock (DESIGN.md, I6)."""

from __future__ import annotations

from collections.abc import Iterable

from . import keys
from .operations import StoreOperations
from .records import Member


class HeartbeatMixin(StoreOperations):
    """Heartbeats of members."""

    def send_heartbeat(self, member: Member) -> int:
        """Moves a member's counter; returns its new value."""
        return self.add(keys.heartbeat(str(member)), 1)

    def get_heartbeat(self, member: Member) -> int:
        """Reads a member's counter; 0 if it has never sent any."""
        return self.add(keys.heartbeat(str(member)), 0)


class HeartbeatObserver:
    """Watches counters and says which have stood still for too long.

    Silence counts only between two reads that the store answered: a failed read forgets what was seen, so
    an outage of the store silences nobody. And of the time between two reads no more than half of the timeout
    counts: where the observer was stopped for longer, or had to wait for the store, so may all others have
    been, and a moment later they are heard again.

    Args:
        store: where the counters are.
        timeout: seconds without a heartbeat after which a member is silent.
    """

    def __init__(self, store: HeartbeatMixin, timeout: float) -> None:
        self._store = store
        self._timeout = timeout
        # The counter, when it was read last, and for how long it has stood still by then.
        self._seen: dict[Member, tuple[int, float, float]] = {}

    def silent(self, members: Iterable[Member]) -> frozenset[Member]:
        """Reads the members' counters and returns those that have stood still for the timeout.

        Raises:
            Exception: whatever the store raised; all earlier observations are forgotten then.
        """
        return frozenset(member for member in members if self.stillness(member) >= self._timeout)

    def stillness(self, member: Member) -> float:
        """Reads a member's counter; seconds for which this observer has seen it stand still."""
        try:
            count = self._store.get_heartbeat(member)
        except Exception:
            self._seen.clear()
            raise
        now = self._store.now()
        still = 0.0
        if member in self._seen:
            last_count, last_read, so_far = self._seen[member]
            if last_count == count:
                still = so_far + min(now - last_read, self._timeout / 2)
        self._seen[member] = (count, now, still)
        return still

    def forget_all_but(self, members: Iterable[Member]) -> None:
        """Drops what was seen of members that are no longer watched."""
        keep = set(members)
        self._seen = {member: seen for member, seen in self._seen.items() if member in keep}
