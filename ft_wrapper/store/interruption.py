"""How an iteration ends: faults, deaths, and the register that says which came first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ..exception import StoreError
from . import keys
from .operations import StoreOperations
from .records import DONE, FAULT, Fault, Member, to_number
from .steps import Append, Claim, Step, Wake

_RETURNS = "returns"
_GAVE_UP = "gave_up"


class InterruptionMixin(StoreOperations):
    """The end of an iteration."""

    def end_iteration(self, n: int, outcome: str) -> str:
        """Ends iteration n, unless it has ended already, and wakes everybody.

        The caller wakes others, also when somebody else ended n: that one may have died before waking.

        Args:
            n: the iteration.
            outcome: ``fault`` or ``done``.

        Returns:
            The outcome that stands: the first one written.
        """
        return self._end(n, outcome)

    def pass_on_end(self, n: int) -> None:
        """Wakes everybody again, for iteration n has ended.

        Its ender may have been stopped, or cut off with its monitor, before it could wake anybody.
        """
        self.set(keys.wake_end(n), "1")

    def outcome_of(self, n: int) -> str | None:
        """How iteration n ended: ``fault``, ``done``, or None while it is on."""
        return outcome_in(n, self.try_get(keys.end(n)))

    def log_fault(self, n: int, fault: Fault) -> None:
        """Writes down, for people, what happened to a member in iteration n."""
        self.log_append(keys.faults(n), fault.to_json())

    def report_fault(self, n: int, fault: Fault) -> str:
        """Publishes a fault of a member that lives on, and ends iteration n.

        Returns:
            The outcome that stands.
        """
        return self._end(n, FAULT, Append(keys.faults(n), fault.to_json()))

    def faults_of(self, n: int) -> list[Fault]:
        """The faults published for iteration n, first one first."""
        key = keys.faults(n)
        return [Fault.from_json(line, key) for line in self.log_read(key)]

    def deaths_of(self, n: int) -> set[Member]:
        """The members of n that have ended, by evidence."""
        return set(self.announced_deaths_of(n))

    def announced_deaths_of(self, n: int) -> dict[Member, bool]:
        """The members of n that have ended, each with whether a replacement was announced."""
        return announced_deaths_in(n, self.log_read(keys.dead(n)))

    def give_up(self, n: int, member: Member) -> None:
        """Says that a member waits no more for the iteration after n, and must not be reckoned with."""
        self.log_append(keys.dead(n), f"{member} {_GAVE_UP}")

    def gave_up(self, n: int) -> set[Member]:
        """Those who said so."""
        return {member for member, mark in self._deaths(n) if mark == _GAVE_UP}

    def log_death(
        self, n: int, member: Member, fault: Fault | None, *, ends: bool, returns: bool = False
    ) -> None:
        """Logs, by evidence, that a member of n, or one that wants in after n, has ended.

        Args:
            n: the iteration.
            member: who has ended.
            fault: what is known of it, for people; None to keep quiet.
            ends: whether the iteration ends by it; not by a spare's death.
            returns: whether a replacement is on its way, for which a restart may wait a little.
        """
        steps: list[Step] = [] if fault is None else [Append(keys.faults(n), fault.to_json())]
        # Ended first: observers of silence leave the logged dead alone, so one that logged one and died
        # before ending n would have left everybody waiting.
        if ends:
            steps += _ending(n, FAULT)
        self.carry_out([*steps, Append(keys.dead(n), f"{member} {_RETURNS}" if returns else str(member))])

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
        if self.wait_for(keys.wake_end(n), seconds) and not may_be_done():
            return FAULT
        return self.outcome_of(n)

    def finish(self, n: int, active_rank: int, active_world_size: int) -> None:
        """Says that an active rank has returned from the function of n; the last one ends n as done."""
        finished = self.log_append_counted(keys.finished(n), str(active_rank), keys.count_finished(n))
        if finished >= active_world_size:
            self.complete(n, active_world_size)

    def complete(self, n: int, active_world_size: int) -> str | None:
        """Ends n as done if every active rank has finished; the log decides, not the count.

        Returns:
            The outcome that stands, None if somebody has not finished.
        """
        if len(self.finished_in(n)) < active_world_size:
            return self.outcome_of(n)
        return self.end_iteration(n, DONE)

    def finished_in(self, n: int) -> set[int]:
        """The active ranks that have returned from the function of n."""
        key = keys.finished(n)
        return {to_number(rank, key) for rank in self.log_read(key)}

    def _end(self, n: int, outcome: str, *before: Step) -> str:
        *_, stands, _ = self.carry_out([*before, *_ending(n, outcome)])
        if stands is None:
            raise StoreError(f"store key {keys.end(n)!r} is gone, though it was written just now")
        return outcome_in(n, stands) or outcome

    def _deaths(self, n: int) -> Iterator[tuple[Member, str]]:
        return _deaths_in(n, self.log_read(keys.dead(n)))


def outcome_in(n: int, register: str | None) -> str | None:
    """How iteration n ended, by what its register holds; None while it is on."""
    if register not in (None, DONE, FAULT):
        raise StoreError(f"store key {keys.end(n)!r} holds {register!r}, which is no outcome")
    return register


def announced_deaths_in(n: int, log: Iterable[str]) -> dict[Member, bool]:
    """The members of n that have ended, by its log, each with whether a replacement was announced."""
    deaths: dict[Member, bool] = {}
    for member, mark in _deaths_in(n, log):
        deaths[member] = mark == _RETURNS or deaths.get(member, False)
    return deaths


def _deaths_in(n: int, log: Iterable[str]) -> Iterator[tuple[Member, str]]:
    key = keys.dead(n)
    for line in log:
        name, _, mark = line.partition(" ")
        if mark not in ("", _RETURNS, _GAVE_UP):
            raise StoreError(f"store key {key!r} holds the entry {line!r}, which is no member's death")
        yield Member.parse(name, key), mark


def _ending(n: int, outcome: str) -> list[Step]:
    return [Claim(keys.end(n), outcome), Wake(keys.wake_end(n), "1")]
