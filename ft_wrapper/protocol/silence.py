"""Heartbeats, and how long an observer has seen none.

Heartbeats are counters or leases, and silence is measured on the observer's own clock: no times of two hosts
are compared. Silence is suspicion. Only the log of deaths is evidence.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from ..settings import AllLimits
from . import keys, operations
from .operations import LAPSED, Heartbeat, Operations
from .records import Member, record_of

K = TypeVar("K", bound=Hashable)
_LASTS = AllLimits.heartbeat_timeout / 2


def beat_lasts(timeout: float, interval: float) -> float:
    """How many seconds a heartbeat lasts where it is a lease.

    That is half of the timeout, as `CounterObserver` assumes when a lease expires; but always longer than the
    interval.

    Args:
        timeout: seconds without a heartbeat after which a member is silent.
        interval: seconds between two heartbeats.
    """
    return max(timeout / 2, 1.5 * interval)


class Heartbeats:
    """Heartbeats in a store. A member has its own, or shares one with all members on its node.

    Args:
        store: a client of the job's store.
    """

    def __init__(self, store: Operations) -> None:
        self.store = store

    def beat_heart(self, heart: str, lasts: float = _LASTS) -> None:
        """Sends a heartbeat: the members that use it are alive.

        Args:
            heart: name of the heartbeat; a member's own has the member's name.
            lasts: seconds for which the heartbeat lasts where it is a lease; see `beat_lasts`.
        """
        self.store.execute([Heartbeat(keys.heartbeat(heart), lasts)])

    def heart_of(self, member: Member) -> str:
        """The name of a member's heartbeat, from its record; its own heartbeat if the record is absent."""
        return record_of(self.store, member).heart or str(member)

    def get_heartbeat(self, member: Member) -> int:
        """A number that changes while a member's heartbeats come; see `ReadHeartbeat`."""
        return self.count_of(self.heart_of(member))

    def count_of(self, heart: str) -> int:
        """A number that changes while heartbeats of this name come; see `ReadHeartbeat`."""
        return operations.read_heartbeat(self.store, keys.heartbeat(heart))


class CounterObserver(Generic[K]):
    """Watches heartbeats, which are counters or leases, and measures how long each has been unchanged.

    Only the time between two reads that the store answered counts. A failed read forgets all observations, so
    an outage of the store makes no member silent. The time between two reads counts as at most half of the
    timeout: if the observer was stopped for longer, or waited for the store, all others may have done the
    same, and may send heartbeats a moment later.

    An expired lease counts as half of the timeout, which is about how long it lasts. So a member that has
    lost its lease by mistake has the other half to recover.

    Args:
        read: reads a heartbeat; see `ReadHeartbeat`.
        now: the observer's own clock, in seconds.
        timeout: seconds for which a heartbeat has to be unchanged until its member is silent.
    """

    def __init__(self, read: Callable[[K], int], now: Callable[[], float], timeout: float) -> None:
        self._read = read
        self._now = now
        self._timeout = timeout
        # The value, when it was last read, and how long it had then been unchanged.
        self._seen: dict[K, tuple[int, float, float]] = {}

    def stillness(self, one: K) -> float:
        """Reads a heartbeat; returns the seconds for which this observer has seen it unchanged.

        Raises:
            Exception: the store's error; all earlier observations are then forgotten.
        """
        try:
            count = self._read(one)
        except Exception:
            self._seen.clear()
            raise
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
        """Forgets the observations of heartbeats that are no longer watched."""
        keep = set(watched)
        self._seen = {one: seen for one, seen in self._seen.items() if one in keep}


class HeartbeatObserver:
    """Watches the heartbeats of members; a shared heartbeat is read once for all its members.

    The name of a member's heartbeat is read once, and again before the member counts as silent: the name
    changes when something else begins to watch the member's process.

    Args:
        heartbeats: the heartbeats in the store.
        timeout: seconds without a heartbeat after which a member is silent.
    """

    def __init__(self, heartbeats: Heartbeats, timeout: float) -> None:
        self._heartbeats = heartbeats
        self._timeout = timeout
        self._hearts: dict[Member, str] = {}
        self._counters: CounterObserver[str] = CounterObserver(
            heartbeats.count_of, heartbeats.store.now, timeout
        )

    def silent(self, watched: Iterable[Member]) -> frozenset[Member]:
        """Reads the heartbeats of members; returns the members whose heartbeat was unchanged for the timeout.

        Raises:
            Exception: the store's error; all earlier observations are then forgotten.
        """
        read: dict[str, float] = {}
        return frozenset(one for one in watched if self.stillness(one, read) >= self._timeout)

    def stillness(self, member: Member, read: dict[str, float] | None = None) -> float:
        """Seconds for which this observer has seen a member's heartbeat unchanged.

        Args:
            member: the member.
            read: stillness of heartbeats that were read in this look, by name; this one is added.
        """
        read = {} if read is None else read
        still = self._stillness_of(self.heart_of(member), read)
        if still >= self._timeout:
            del self._hearts[member]
            still = self._stillness_of(self.heart_of(member), read)
        return still

    def heart_of(self, member: Member) -> str:
        """The name of a member's heartbeat, as last read."""
        if member not in self._hearts:
            try:
                self._hearts[member] = self._heartbeats.heart_of(member)
            except Exception:
                self.forget_all_but(())
                raise
        return self._hearts[member]

    def knows(self, member: Member) -> bool:
        """Whether this observer has looked at a member and not forgotten it."""
        return member in self._hearts

    def forget_all_but(self, watched: Iterable[Member]) -> None:
        """Forgets the observations of members that are no longer watched."""
        keep = set(watched)
        self._hearts = {member: heart for member, heart in self._hearts.items() if member in keep}
        self._counters.forget_all_but(self._hearts.values())

    def _stillness_of(self, heart: str, read: dict[str, float]) -> float:
        if heart not in read:
            read[heart] = self._counters.stillness(heart)
        return read[heart]
