"""Who is silent. Heartbeats are counters or leases, observed on the observer's own clock (DESIGN.md, I6)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from . import keys
from .operations import LAPSED, StoreOperations
from .records import Member

K = TypeVar("K", bound=Hashable)

_LASTS = 15.0  # seconds; half of the wrapper's default of heartbeat_timeout


def beat_lasts(timeout: float, interval: float) -> float:
    """For how long a sign of life should hold where it is a lease.

    Half of the timeout, which is what `CounterObserver` takes the silence for when it lapses. But never less
    than it takes until the next one.

    Args:
        timeout: seconds after which whoever gives none is silent.
        interval: seconds between two of them.
    """
    return max(timeout / 2, 1.5 * interval)


class HeartbeatMixin(StoreOperations):
    """Heartbeats of members."""

    def send_heartbeat(self, member: Member, lasts: float = _LASTS) -> None:
        """Says that a member lives.

        Args:
            member: who.
            lasts: for how long this holds where it is a lease: see `beat_lasts`.
        """
        self.beat(keys.heartbeat(str(member)), lasts)

    def get_heartbeat(self, member: Member) -> int:
        """A number that moves as long as a member sends heartbeats; see `StoreOperations.beats`."""
        return self.beats(keys.heartbeat(str(member)))


class CounterObserver(Generic[K]):
    """Watches counters, or leases, and says for how long there has been no sign of life.

    Standing still counts only between two reads that the store answered: a failed read forgets what was seen,
    so an outage of the store silences nobody. And of the time between two reads no more than half of the
    timeout counts: where the observer was stopped for longer, or had to wait for the store, so may all others
    have been, and a moment later they are heard again.

    A number that has lapsed was a lease, and no sign of life has come for the time of that: it counts as half
    of the timeout. So whoever has lost its lease by mistake has the other half to come back.

    Args:
        read: reads the counter of somebody; see `StoreOperations.beats`.
        now: the observer's own clock, in seconds.
        timeout: seconds after which somebody whose counter stands still is silent.
    """

    def __init__(self, read: Callable[[K], int], now: Callable[[], float], timeout: float) -> None:
        self._read = read
        self._now = now
        self._timeout = timeout
        # The counter, when it was read last, and for how long it has stood still by then.
        self._seen: dict[K, tuple[int, float, float]] = {}

    def silent(self, watched: Iterable[K]) -> frozenset[K]:
        """Reads counters and returns whose have stood still for the timeout.

        Raises:
            Exception: whatever the store raised; all earlier observations are forgotten then.
        """
        return frozenset(one for one in watched if self.stillness(one) >= self._timeout)

    def stillness(self, one: K) -> float:
        """Reads somebody's counter; seconds for which this observer has seen it stand still."""
        try:
            count = self._read(one)
        except Exception:
            self._seen.clear()
            raise
        return self.stillness_at(one, count)

    def stillness_at(self, one: K, count: int) -> float:
        """The same for a counter that was read just now.

        Args:
            one: whose it is.
            count: what it was.
        """
        now = self._now()
        still = 0.0
        if one in self._seen:
            last_count, last_read, so_far = self._seen[one]
            if last_count == count:
                still = so_far + min(now - last_read, self._timeout / 2)
            elif count == LAPSED:
                still = self._timeout / 2
        self._seen[one] = (count, now, still)
        return still

    def forget_all_but(self, watched: Iterable[K]) -> None:
        """Drops what was seen of those that are no longer watched."""
        keep = set(watched)
        self._seen = {one: seen for one, seen in self._seen.items() if one in keep}


class HeartbeatObserver(CounterObserver[Member]):
    """Watches the heartbeats of members.

    Args:
        store: where the heartbeats are.
        timeout: seconds without a heartbeat after which a member is silent.
    """

    def __init__(self, store: HeartbeatMixin, timeout: float) -> None:
        super().__init__(store.get_heartbeat, store.now, timeout)
