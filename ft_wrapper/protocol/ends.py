"""How an iteration ends: faults, deaths, and the register that says which came first."""

from collections.abc import Callable, Mapping

from ..exception import StoreError
from . import keys, records
from .operations import Append, Notify, Operations, SetIfAbsent, Step, append_counted, read, read_log
from .records import DONE, FAULT, GAVE_UP, LEFT_BY, RETURNS, Fault, Member


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
        return records.outcome_in(n, stands) or outcome

    def pass_on_end(self, n: int) -> None:
        """Wakes all members again, because iteration n has ended.

        The process that ended it may have been stopped, or cut off with its monitor, before it did so.
        """
        self.store.execute([Notify(keys.wake_end(n), "1")])

    def outcome_of(self, n: int) -> str | None:
        """How iteration n ended: ``fault``, ``done``, or None while it is on."""
        return records.outcome_in(n, read(self.store, keys.end(n)))

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
        """The members of n that have ended, each with what was noted: see `records.deaths_in`."""
        return records.deaths_in(n, read_log(self.store, keys.dead(n)))

    def give_up(self, n: int, member: Member) -> None:
        """Says that a member waits no more for the iteration after n, and must not be reckoned with."""
        self.store.execute([Append(keys.dead(n), f"{member} {GAVE_UP}")])

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
        if self.store.wait_for(keys.wake_end(n), seconds) is not None and not may_be_done():
            return FAULT
        return self.outcome_of(n)

    def finish(self, n: int, active_rank: int, active_world_size: int) -> None:
        """Says that an active rank has returned from the function of n; the last one ends n as done."""
        finished = append_counted(self.store, keys.finished(n), str(active_rank), keys.count_finished(n))
        if finished >= active_world_size:
            self.complete(n, active_world_size)

    def complete(self, n: int, active_world_size: int) -> None:
        """Ends n as done if every active rank has finished; the log decides, not the count."""
        if len(self.finished_in(n)) >= active_world_size:
            self.end_iteration(n, DONE)

    def finished_in(self, n: int) -> set[int]:
        """The active ranks that have returned from the function of n."""
        key = keys.finished(n)
        return {records.to_number(rank, key) for rank in read_log(self.store, key)}

    def say_goodbye(self, member: Member) -> None:
        """A member's last word: it needs the store no more."""
        one = str(member)
        self.store.execute([Append(keys.GOODBYES, one), Notify(keys.wake_goodbye(one), "1")])

    def await_goodbye(self, member: Member, seconds: float) -> bool:
        """Waits for a member's last word; tells whether it came."""
        return self.store.wait_for(keys.wake_goodbye(str(member)), seconds) is not None

    def goodbyes(self) -> set[Member]:
        """The members that need the store no more."""
        return {Member.parse(line, keys.GOODBYES) for line in read_log(self.store, keys.GOODBYES)}


def _ending(n: int, outcome: str) -> list[Step]:
    return [SetIfAbsent(keys.end(n), outcome), Notify(keys.wake_end(n), "1")]
