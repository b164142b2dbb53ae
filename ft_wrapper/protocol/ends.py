"""How an iteration ends: faults, deaths, and the register that holds the outcome."""

from collections.abc import Callable, Mapping

from ..exception import StoreError
from . import keys, records
from .operations import Append, Notify, Operations, SetIfAbsent, Step, append_counted, read, read_log
from .records import DONE, FAULT, LEFT_BY, RETURNS, STOPPED_WAITING, Fault, Member


class Ends:
    """How an iteration ends: faults, deaths, and the register that holds the outcome.

    Args:
        store: a client of the job's store.
    """

    def __init__(self, store: Operations) -> None:
        self.store = store

    def end_iteration(self, n: int, outcome: str, *before: Step) -> str:
        """Ends iteration n, unless it has ended already, and wakes all members.

        It wakes them even if another process has ended n: that process may have died before waking them.

        Args:
            n: the iteration.
            outcome: ``fault`` or ``done``.
            before: steps to execute first.

        Returns:
            The outcome that counts: the first one written.
        """
        *_, first, _ = self.store.execute([*before, *_ending(n, outcome)])
        if first is None:
            raise StoreError(f"store key {keys.end(n)!r} is missing, though it was just written")
        return records.outcome_in(n, first) or outcome

    def pass_on_end(self, n: int) -> None:
        """Wakes all members again, because iteration n has ended.

        The process that ended n may have been stopped, or cut off with its monitor, before waking them.
        """
        self.store.execute([Notify(keys.wake_end(n), "1")])

    def outcome_of(self, n: int) -> str | None:
        """How iteration n ended: ``fault`` or ``done``; None while it runs."""
        return records.outcome_in(n, read(self.store, keys.end(n)))

    def log_fault(self, n: int, fault: Fault) -> None:
        """Logs a fault in iteration n, for people; this does not end n."""
        self.store.execute([Append(keys.faults(n), fault.to_json())])

    def report_fault(self, n: int, fault: Fault) -> str:
        """Logs a fault of a member that lives on, and ends iteration n.

        Returns:
            The outcome that counts.
        """
        return self.end_iteration(n, FAULT, Append(keys.faults(n), fault.to_json()))

    def faults_of(self, n: int) -> list[Fault]:
        """The faults logged for iteration n, oldest first."""
        key = keys.faults(n)
        return [Fault.from_json(line, key) for line in read_log(self.store, key)]

    def deaths_of(self, n: int) -> set[Member]:
        """The dead of n, from its log."""
        return set(self.marked_deaths_of(n))

    def marked_deaths_of(self, n: int) -> dict[Member, set[str]]:
        """The dead of n, from its log, each with its marks; see `records.deaths_in`."""
        return records.deaths_in(n, read_log(self.store, keys.dead(n)))

    def give_up(self, n: int, member: Member) -> None:
        """Logs that a member no longer waits for the iteration after n, so that no proposal includes it."""
        self.store.execute([Append(keys.dead(n), f"{member} {STOPPED_WAITING}")])

    def log_deaths(
        self, n: int, dead: Mapping[Member, Fault | None], *, ends: bool, returns: bool = False
    ) -> None:
        """Logs the deaths, known by evidence, of members of n or of joiners that wait for n + 1.

        A proposer sees all of these deaths in the log, or none.

        Args:
            n: the iteration.
            dead: the dead, each with its fault, for people; None to log no fault.
            ends: whether the deaths end the iteration; those of spares do not.
            returns: whether replacements are on their way; a restart may wait a little for them.
        """
        steps: list[Step] = [
            Append(keys.faults(n), fault.to_json()) for fault in dead.values() if fault is not None
        ]
        # n ends before the deaths are logged. Observers of silence ignore the logged dead. So if the caller
        # logged a death and died before ending n, all others would wait.
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
            may_be_done: called after the wait. False for an active rank that has not finished: then only a
                fault can have ended n, and its outcome need not be read.

        Returns:
            How n ended; None while it runs.
        """
        if self.store.wait_for(keys.wake_end(n), seconds) is not None and not may_be_done():
            return FAULT
        return self.outcome_of(n)

    def finish(self, n: int, active_rank: int, active_world_size: int) -> None:
        """Logs that an active rank has returned from the function of n; the last one ends n as done."""
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
        """Logs that a member no longer needs the store, and wakes those that wait for it."""
        one = str(member)
        self.store.execute([Append(keys.GOODBYES, one), Notify(keys.wake_goodbye(one), "1")])

    def await_goodbye(self, member: Member, seconds: float) -> bool:
        """Waits until a member no longer needs the store; returns whether that happened in time."""
        return self.store.wait_for(keys.wake_goodbye(str(member)), seconds) is not None

    def goodbyes(self) -> set[Member]:
        """The members that no longer need the store."""
        return {Member.parse(line, keys.GOODBYES) for line in read_log(self.store, keys.GOODBYES)}


def _ending(n: int, outcome: str) -> list[Step]:
    return [SetIfAbsent(keys.end(n), outcome), Notify(keys.wake_end(n), "1")]
