"""Signs of life, and for how long an observer has seen none.

Heartbeats are counters or leases, observed on the observer's own clock: no times of two hosts are compared.
Silence is suspicion. Only the log of deaths is evidence.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from ..settings import Limits
from . import keys, operations
from .operations import LAPSED, Heartbeat, Operations
from .records import Member, record_of

K = TypeVar("K", bound=Hashable)
_LASTS = Limits.heartbeat_timeout / 2


def beat_lasts(timeout: float, interval: float) -> float:
    """For how long a sign of life should hold where it is a lease.

    Half of the timeout, which is what `CounterObserver` takes the silence for when it lapses. But never less
    than it takes until the next one.

    Args:
        timeout: seconds after which a member that gives none is silent.
        interval: seconds between two of them.
    """
    return max(timeout / 2, 1.5 * interval)


class Heartbeats:
    """Signs of life. What beats for a member is a heart: its own, or one that all members on its node share.

    Args:
        store: where.
    """

    def __init__(self, store: Operations) -> None:
        self.store = store

    def beat_heart(self, heart: str, lasts: float = _LASTS) -> None:
        """Says that all members live whose heart this is.

        Args:
            heart: its name; a member's own has the member's.
            lasts: for how long this holds where it is a lease: see `beat_lasts`.
        """
        self.store.execute([Heartbeat(keys.heartbeat(heart), lasts)])

    def heart_of(self, member: Member) -> str:
        """The name of the heart that beats for a member, as its record says; its own one without a record."""
        return record_of(self.store, member).heart or str(member)

    def get_heartbeat(self, member: Member) -> int:
        """A number that moves as long as a member's heart beats; see `ReadHeartbeat`."""
        return self.count_of(self.heart_of(member))

    def count_of(self, heart: str) -> int:
        """A number that moves as long as a heart beats; see `ReadHeartbeat`."""
        return operations.read_heartbeat(self.store, keys.heartbeat(heart))


class CounterObserver(Generic[K]):
    """Watches counters, or leases, and says for how long there has been no sign of life.

    Standing still counts only between two reads that the store answered: a failed read forgets what was seen,
    so an outage of the store silences no one. And of the time between two reads no more than half of the
    timeout counts: where the observer was stopped for longer, or had to wait for the store, so may all others
    have been, and a moment later they are heard again.

    A number that has lapsed was a lease, and no sign of life has come for the time of that: it counts as half
    of the timeout. So a member that has lost its lease by mistake has the other half to come back.

    Args:
        read: reads the counter of a member; see `ReadHeartbeat`.
        now: the observer's own clock, in seconds.
        timeout: seconds after which a member whose counter stands still is silent.
    """

    def __init__(self, read: Callable[[K], int], now: Callable[[], float], timeout: float) -> None:
        self._read = read
        self._now = now
        self._timeout = timeout
        # The counter, when it was read last, and for how long it has stood still by then.
        self._seen: dict[K, tuple[int, float, float]] = {}

    def stillness(self, one: K) -> float:
        """Reads a member's counter; seconds for which this observer has seen it stand still.

        Raises:
            Exception: whatever the store raised; all earlier observations are forgotten then.
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
        """Drops what was seen of those that are no longer watched."""
        keep = set(watched)
        self._seen = {one: seen for one, seen in self._seen.items() if one in keep}


class HeartbeatObserver:
    """Watches the hearts of members: each heart once, and where it stands still, all whose heart it is.

    Which heart a member has is read once, and again before the member counts as silent: it has another one
    when something else watches it.

    Args:
        heartbeats: what to read.
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
        """Reads the hearts of members, and returns those whose hearts have stood still for the timeout.

        Raises:
            Exception: whatever the store raised; all earlier observations are forgotten then.
        """
        read: dict[str, float] = {}
        return frozenset(one for one in watched if self.stillness(one, read) >= self._timeout)

    def stillness(self, member: Member, read: dict[str, float] | None = None) -> float:
        """Seconds for which this observer has seen a member's heart stand still.

        Args:
            member: who.
            read: the stillness of hearts that were read just now; this one's is added. None for none.
        """
        read = {} if read is None else read
        still = self._stillness_of(self.heart_of(member), read)
        if still >= self._timeout:
            del self._hearts[member]
            still = self._stillness_of(self.heart_of(member), read)
        return still

    def heart_of(self, member: Member) -> str:
        """The name of a member's heart, as it was when it was read last."""
        if member not in self._hearts:
            try:
                self._hearts[member] = self._heartbeats.heart_of(member)
            except Exception:
                self.forget_all_but(())
                raise
        return self._hearts[member]

    def knows(self, member: Member) -> bool:
        """Whether this has looked at a member before, and not forgotten it."""
        return member in self._hearts

    def forget_all_but(self, watched: Iterable[Member]) -> None:
        """Drops what was seen of those that are no longer watched."""
        keep = set(watched)
        self._hearts = {member: heart for member, heart in self._hearts.items() if member in keep}
        self._counters.forget_all_but(self._hearts.values())

    def _stillness_of(self, heart: str, read: dict[str, float]) -> float:
        if heart not in read:
            read[heart] = self._counters.stillness(heart)
        return read[heart]
