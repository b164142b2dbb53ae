"""What is known of members and iterations: who is silent, who has died, how an iteration ended.

Heartbeats are counters or leases, observed on the observer's own clock: no times of two hosts are compared.
Silence is suspicion. Only the log of deaths is evidence.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

from ..exception import StoreError
from ..settings import Limits
from . import entries, keys, operations
from .operations import LAPSED, Append, Beat, Claim, Operations, Step, Wake, read, read_log
from .records import DONE, FAULT, GAVE_UP, LEFT_BY, RETURNS, Fault, Member, MemberRecord

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
        self.store.execute([Beat(keys.heartbeat(heart), lasts)])

    def heart_of(self, member: Member) -> str:
        """The name of the heart that beats for a member, as its record says; its own one without a record."""
        key = keys.member(str(member))
        record = read(self.store, key)
        return (record and MemberRecord.from_json(record, key).heart) or str(member)

    def get_heartbeat(self, member: Member) -> int:
        """A number that moves as long as a member's heart beats; see `Beats`."""
        return self.count_of(self.heart_of(member))

    def count_of(self, heart: str) -> int:
        """A number that moves as long as a heart beats; see `Beats`."""
        return operations.beats(self.store, keys.heartbeat(heart))


class CounterObserver(Generic[K]):
    """Watches counters, or leases, and says for how long there has been no sign of life.

    Standing still counts only between two reads that the store answered: a failed read forgets what was seen,
    so an outage of the store silences no one. And of the time between two reads no more than half of the
    timeout counts: where the observer was stopped for longer, or had to wait for the store, so may all others
    have been, and a moment later they are heard again.

    A number that has lapsed was a lease, and no sign of life has come for the time of that: it counts as half
    of the timeout. So a member that has lost its lease by mistake has the other half to come back.

    Args:
        read: reads the counter of a member; see `Beats`.
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


class Ends:
    """How an iteration ends: faults, deaths, and the register that says which came first.

    Args:
        store: where.
    """

    def __init__(self, store: Operations) -> None:
        self.store = store

    def end_iteration(self, n: int, outcome: str, *before: Step) -> str:
        """Ends iteration n, unless it has ended already, and wakes all members.

        The caller wakes others, also when another process ended n: it may have died before waking them.

        Args:
            n: the iteration.
            outcome: ``fault`` or ``done``.
            before: what to write before.

        Returns:
            The outcome that stands: the first one written.
        """
        *_, stands, _ = self.store.execute([*before, *_ending(n, outcome)])
        if stands is None:
            raise StoreError(f"store key {keys.end(n)!r} is gone, though it was written just now")
        return entries.outcome_in(n, stands) or outcome

    def pass_on_end(self, n: int) -> None:
        """Wakes all members again, because iteration n has ended.

        The process that ended it may have been stopped, or cut off with its monitor, before it did so.
        """
        self.store.execute([Wake(keys.wake_end(n), "1")])

    def outcome_of(self, n: int) -> str | None:
        """How iteration n ended: ``fault``, ``done``, or None while it is on."""
        return entries.outcome_in(n, read(self.store, keys.end(n)))

    def log_fault(self, n: int, fault: Fault) -> None:
        """Writes down, for people, what happened to a member in iteration n."""
        self.store.execute([Append(keys.faults(n), fault.to_json())])

    def report_fault(self, n: int, fault: Fault) -> str:
        """Publishes a fault of a member that lives on, and ends iteration n.

        Returns:
            The outcome that stands.
        """
        return self.end_iteration(n, FAULT, Append(keys.faults(n), fault.to_json()))

    def faults_of(self, n: int) -> list[Fault]:
        """The faults published for iteration n, first one first."""
        key = keys.faults(n)
        return [Fault.from_json(line, key) for line in read_log(self.store, key)]

    def deaths_of(self, n: int) -> set[Member]:
        """The members of n that have ended, by evidence."""
        return set(self.marked_deaths_of(n))

    def marked_deaths_of(self, n: int) -> dict[Member, set[str]]:
        """The members of n that have ended, each with what was noted: see `entries.deaths_in`."""
        return entries.deaths_in(n, read_log(self.store, keys.dead(n)))

    def give_up(self, n: int, member: Member) -> None:
        """Says that a member waits no more for the iteration after n, and must not be reckoned with."""
        self.store.execute([Append(keys.dead(n), f"{member} {GAVE_UP}")])

    def gave_up(self, n: int) -> set[Member]:
        """Those who said so."""
        return {member for member, marks in self.marked_deaths_of(n).items() if GAVE_UP in marks}

    def log_deaths(
        self, n: int, dead: Mapping[Member, Fault | None], *, ends: bool, returns: bool = False
    ) -> None:
        """Logs, by evidence, that members of n, or such as want in after n, have ended.

        A proposer sees all of them in the log, or none.

        Args:
            n: the iteration.
            dead: who has ended, each with what is known of it, for people; None to keep quiet.
            ends: whether the iteration ends by them; not by a spare's death.
            returns: whether replacements are on their way, for which a restart may wait a little.
        """
        steps: list[Step] = [
            Append(keys.faults(n), fault.to_json()) for fault in dead.values() if fault is not None
        ]
        # Ended first: observers of silence leave the logged dead alone, so one that logged one and died
        # before ending n would have left all others waiting.
        if ends:
            steps += _ending(n, FAULT)
        entries = [f"{member} {RETURNS}" if returns else str(member) for member in sorted(dead)]
        entries += [
            f"{one} {LEFT_BY}{fault.counted}" for one, fault in dead.items() if fault and fault.counted
        ]
        self.store.execute([*steps, Append(keys.dead(n), "\n".join(entries))])

    def wait_for_end(
        self, n: int, seconds: float, may_be_done: Callable[[], bool] = lambda: True
    ) -> str | None:
        """Waits for the end of iteration n.

        Args:
            n: the iteration.
            seconds: how long to wait.
            may_be_done: asked after the wait; False for an active rank that has not said that it finished:
                then n can only have ended by a fault, and need not be read.

        Returns:
            How it ended; None if it is still on.
        """
        if self.store.hear(keys.wake_end(n), seconds) is not None and not may_be_done():
            return FAULT
        return self.outcome_of(n)

    def finish(self, n: int, active_rank: int, active_world_size: int) -> None:
        """Says that an active rank has returned from the function of n; the last one ends n as done."""
        finished = operations.append_counted(
            self.store, keys.finished(n), str(active_rank), keys.count_finished(n)
        )
        if finished >= active_world_size:
            self.complete(n, active_world_size)

    def complete(self, n: int, active_world_size: int) -> str | None:
        """Ends n as done if every active rank has finished; the log decides, not the count.

        Returns:
            The outcome that stands, None if a rank has not finished.
        """
        if len(self.finished_in(n)) < active_world_size:
            return self.outcome_of(n)
        return self.end_iteration(n, DONE)

    def finished_in(self, n: int) -> set[int]:
        """The active ranks that have returned from the function of n."""
        key = keys.finished(n)
        return {entries.to_number(rank, key) for rank in read_log(self.store, key)}

    def say_goodbye(self, member: Member) -> None:
        """A member's last word: it needs the store no more."""
        one = str(member)
        self.store.execute([Append(keys.GOODBYES, one), Wake(keys.wake_goodbye(one), "1")])

    def await_goodbye(self, member: Member, seconds: float) -> bool:
        """Waits for a member's last word; tells whether it came."""
        return self.store.hear(keys.wake_goodbye(str(member)), seconds) is not None

    def goodbyes(self) -> set[Member]:
        """The members that need the store no more."""
        return {Member.parse(line, keys.GOODBYES) for line in read_log(self.store, keys.GOODBYES)}


def _ending(n: int, outcome: str) -> list[Step]:
    return [Claim(keys.end(n), outcome), Wake(keys.wake_end(n), "1")]
