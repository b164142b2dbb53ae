"""What must always hold (DESIGN.md 5.5), checked after every step of a simulated job."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ..exception import StoreError, TimeoutError
from ..state import State
from ..store import Head, Member, StoreMixin, View
from ..store.records import DONE, FAULT

if TYPE_CHECKING:
    from .process import SimulatedProcess
    from .simulation import Simulation

# Beside the waits that were asked for: looks of those who come forward one after the other.
_QUICK = 3.0
_LONGEST_LOOK = 8.0
_SLACK = 10.0
_MOST_DOUBLINGS = 6

# After these only silence tells what happened, or somebody is waited for.
_SLOW = ("host", "pause", "freeze", "deaf", "mute", "reporter", "outage", "error", "loop")

_KEY = re.compile(
    r"ft_wrapper/1/(?P<name>head|(?P<kind>end|decision|roster|member|heartbeat|arrived|dead|join|finished"
    r"|world|seat|user|endpoint)/(?P<what>-?\d+)(?::(?P<incarnation>\d+))?.*)$"
)


class Violation(AssertionError):
    """An invariant does not hold."""


class Invariants:
    """The invariants of one simulated job.

    They see the store through a client of their own, whose operations are no steps, and hear from the
    processes what those do.

    Args:
        simulation: the job.
        store: a client of its store.
        slot_order: whether the rank assignment keeps the ranks in the order of the slots, and all of them.
    """

    def __init__(self, simulation: Simulation, store: StoreMixin, *, slot_order: bool) -> None:
        self.simulation = simulation
        self.heads: list[Head] = []
        self.rosters: dict[int, tuple[Member, ...]] = {}
        self.outcomes: dict[int, str] = {}
        self.ended_at: dict[int, float] = {}
        self.decided_at: dict[int, float] = {}
        self.sizes: dict[int, tuple[int, ...]] = {}
        self._store = store
        self._slot_order = slot_order
        self._scheduler = simulation.scheduler
        self._known: dict[str, re.Match[str] | None] = {}
        self._immutable: dict[str, str] = {}
        self._holders: dict[tuple[int, str, int], Member] = {}
        self._ever: set[Member] = set()
        self._owners: dict[Member, SimulatedProcess] = {}
        self._untold = 0.0
        self._noted = 0

    def known(self) -> object:
        """What tells states apart of all that is remembered here."""
        return self._noted, self._untold

    # After every step --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Looks at what the last operation may have changed."""
        step = self._scheduler.last_step
        if step is None or not step.args:
            return
        touched = step.args[0]
        if isinstance(touched, str):
            self._check_key(touched, step.what)
        elif isinstance(touched, list):
            for key in touched:
                self._check_key(key, step.what)

    def _check_key(self, key: str, operation: str) -> None:
        try:
            match = self._known[key]
        except KeyError:
            match = self._known[key] = _KEY.search(key)
        if match is None:
            return
        if operation == "delete_key":
            self._check_deletion(match)
        elif match["name"] == "head":
            self._check_head()
        elif match["kind"] == "end":
            self._check_end(int(match["what"]))
        elif match["kind"] in ("decision", "roster"):
            self._check_immutable(match[0])

    def _check_head(self) -> None:
        head = self._store.read_head()
        if head is None:
            if self.heads:
                raise Violation("I8: head was deleted")
            return
        if self.heads and head == self.heads[-1]:
            return
        if head.n != len(self.heads):
            raise Violation(f"I1: head moved from {_last(self.heads)} to {head}")
        try:
            view, decision = self._store.read_view(head), self._store.read_decision(head)
        except StoreError as error:
            raise Violation(f"I1: head moved to {head}, whose decision is not written: {error}") from None
        if head.n > 0 and head.n - 1 not in self.outcomes:
            raise Violation(f"I1: head moved to {head} before {head.n - 1} had ended")
        if head.n > 0 and head.call != self.heads[-1].call + (self.outcomes[head.n - 1] == DONE):
            raise Violation(f"I1: the call of {head} does not follow from {self.heads[-1]}")
        roster = view.members
        if len(roster) < max(1, self.simulation.scenario.min_world_size):
            raise Violation(f"I11: {len(roster)} members are in {head}")
        if len({member.slot for member in roster}) < len(roster):
            raise Violation(f"I2: two incarnations of a slot are in {head}: {_names(roster)}")
        for process in self.simulation.processes:
            if process.inside is not None and process.inside < head.n and process.member in roster:
                raise Violation(f"I12: {process.name} is in the function of {process.inside} while in {head}")
        before = set(self.rosters.get(head.n - 1, ()))
        newcomers = set(roster) - before
        if newcomers & self._ever:
            raise Violation(f"I5: {_names(newcomers & self._ever)} had been left out, and are in {head}")
        if set(decision.joined) != newcomers or set(decision.removed) != before - set(roster):
            raise Violation(f"I2: {decision} does not lead from {_names(before)} to {_names(roster)}")
        if head.n > 0:
            self._check_pace(f"I4: {head.n - 1} was followed", self.ended_at[head.n - 1])
        self._ever.update(roster)
        self.heads.append(head)
        self.decided_at[head.n] = self._scheduler.now()
        self.rosters[head.n] = roster
        self._note("head", head, roster, self._scheduler.now())

    def _check_end(self, n: int) -> None:
        outcome = self._store.outcome_of(n)
        if outcome is None:
            return
        if self.outcomes.setdefault(n, outcome) != outcome:
            if n < len(self.heads) - 1:
                return  # a zombie writes late, when that key was deleted: nobody who is in reads it any more
            raise Violation(f"I9: {n} ended as {self.outcomes[n]} and as {outcome}")
        if outcome not in (DONE, FAULT):
            raise Violation(f"I9: {n} ended as {outcome!r}")
        if n in self.ended_at:
            return
        self.ended_at[n] = self._scheduler.now()
        self._note("end", n, outcome, self._scheduler.now())
        for position, member in enumerate(self.rosters.get(n, ()) if outcome == FAULT else ()):
            owner = self._owners.get(member)
            if owner is not None and owner.fate in ("dead", "left") and position < self._active(n):
                since = max(owner.died_at, self.decided_at[n])
                self._check_pace(f"I4: {n} ended by the death of {owner.name}", since)

    def _active(self, n: int) -> int:
        return self.sizes[n][3] if n in self.sizes else 0

    def _check_immutable(self, key: str) -> None:
        value = self._store.try_get(key)
        if value is None:
            return
        if key not in self._immutable:
            self._immutable[key] = value
            self._note(key, value)
        elif self._immutable[key] != value:
            raise Violation(f"I1: {key} changed from {self._immutable[key]} to {value}")

    def _check_deletion(self, match: re.Match[str]) -> None:
        if match["name"] == "head":
            raise Violation("I8: head was deleted")
        number = int(match["what"])
        if match["kind"] in ("member", "heartbeat"):
            member = Member(number, int(match["incarnation"]))
            if self.heads and member in self.rosters[self.heads[-1].n]:
                raise Violation(f"I8: {match[0]} was deleted while {member} is in {self.heads[-1]}")
        elif number >= len(self.heads) - 2 and not (self.heads and number < 0):
            raise Violation(f"I8: {match[0]} was deleted while head is {_last(self.heads)}")

    def _check_pace(self, what: str, since: float) -> None:
        processes = self.simulation.processes
        there = [process.started_at for process in processes if process.alive and not process.disturbed]
        if not there:
            return  # nobody was there to go on
        took = self._scheduler.now() - max(since, min(there))
        if took > self.patience:
            raise Violation(f"{what} after {took:.1f} s, more than {self.patience:g} s")

    def _note(self, *fact: object) -> None:
        """Something is remembered here that was not before: states are told apart by that, too."""
        self._noted ^= hash(fact)

    # What processes say of themselves ----------------------------------------------------------------------

    def registered(self, process: SimulatedProcess) -> None:
        """A process took the next incarnation of its slot."""
        member = process.member
        assert member is not None
        if member in self._owners:
            raise Violation(f"I2: {member} is {self._owners[member].name} and {process.name}")
        self._owners[member] = process
        self._note("owner", member, process.name)
        for other in self.simulation.processes:
            if other is not process and other.slot == process.slot and other.member is not None:
                # What a newer incarnation does to an older one is right; the oldest may also be the late one.
                (other if other.member < member else process).disturbed = True

    def entered(self, process: SimulatedProcess, view: View, state: State) -> None:
        """A process enters the function, or its place as spare."""
        n, member = view.n, process.member
        assert member is not None
        if n <= process.last:
            raise Violation(f"I3: {process.name} enters {n} after {process.last}")
        roster = self.rosters.get(n, ())
        if member not in roster:
            raise Violation(f"I5: {process.name} enters {n} as {member}, and in it are {_names(roster)}")
        if view.members != roster or view.head != self.heads[n]:
            raise Violation(f"I2: {process.name} believes in {view}, decided is {self.heads[n]}: {roster}")
        active = state.active_world_size or 0
        mine = (view.call, view.first, state.world_size, active)
        if n not in self.sizes:
            self.sizes[n] = mine
            self._note("sizes", n, mine)
        elif self.sizes[n] != mine:
            raise Violation(f"I2: {process.name} enters {n} with {mine}, others with {self.sizes[n]}")
        self._take("rank", n, member, state.rank, state.world_size)
        if self._slot_order and (state.rank, state.world_size) != (roster.index(member), len(roster)):
            raise Violation(f"I2: {member} has rank {state.rank} of {state.world_size} in {_names(roster)}")
        if process.last < 0:
            self._check_entry(process, n)
        process.last = n
        if state.active_rank is not None:
            process.inside = n
            self._take("active rank", n, member, state.active_rank, active)

    def _take(self, what: str, n: int, member: Member, rank: int | None, size: int) -> None:
        if rank is None or not 0 <= rank < size:
            raise Violation(f"I2: {member} has {what} {rank} of {size} in {n}")
        if (n, what, rank) not in self._holders:
            self._holders[n, what, rank] = member
            self._note(what, n, rank, member)
        elif self._holders[n, what, rank] != member:
            raise Violation(f"I2: {member} and {self._holders[n, what, rank]} have {what} {rank} in {n}")

    def _check_entry(self, process: SimulatedProcess, n: int) -> None:
        """I4 for joiners: one that ends the iteration itself is in soon."""
        scenario = self.simulation.scenario
        if process.disturbed or n == 0 or scenario.on_join != "now":
            return
        window = scenario.join_window * 2.0 ** min(_MOST_DOUBLINGS, len(self.heads))
        took = self._scheduler.now() - process.wants_since
        if took > window + _LONGEST_LOOK + self.patience:
            raise Violation(f"I4: {process.name} got in after {took:.1f} s")

    def completed(self, process: SimulatedProcess, view: View) -> None:
        """A process was told that all is done."""
        if self.outcomes.get(view.n) != DONE:
            raise Violation(f"I9: {process.name} returns from {view.n}, which is {self.outcomes.get(view.n)}")
        process.completed.append(view.n)

    def nobody_tells(self) -> None:
        """A process ended before it was in, or between two calls: it is waited for in vain."""
        scenario = self.simulation.scenario
        self._untold += scenario.barrier_timeout + scenario.heartbeat_timeout + _LONGEST_LOOK

    @property
    def patience(self) -> float:
        """The longest that an iteration which has ended may last, in virtual seconds."""
        scenario = self.simulation.scenario
        lost = sum(process.fate not in ("running", "done", "late") for process in self.simulation.processes)
        patience = (1 + lost) * _QUICK + scenario.join_window + scenario.between + self._untold
        if any(scenario.of(*_SLOW)):
            patience += (1 + lost) * (scenario.heartbeat_timeout + _LONGEST_LOOK)
            patience += scenario.barrier_timeout + _SLACK
            # Two that are stopped or lost at once may be each other's only observers.
            patience += sum(disturbance.seconds for disturbance in scenario.disturbances)
        return patience

    # At the end --------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Everybody has come to an end: a good one, unless something was done to it."""
        processes = self.simulation.processes
        done = {process.completed[-1] for process in processes if process.fate == "done"}
        if len(done) > 1:
            raise Violation(f"I9: processes completed different iterations: {sorted(done)}")
        fates = {process.fate for process in processes}
        if self.heads and not fates & {"done", "dead", "left", "failed"}:
            raise Violation(f"I4: everybody lives and nobody went on: {sorted(fates)}")
        anything = any(process.disturbed for process in processes)
        for process in processes:
            if process.alive:
                raise Violation(f"I10: {process.name} came to no end")
            gives_up_at = process.wants_since + self.simulation.scenario.barrier_timeout
            formed_at = self.decided_at.get(0, gives_up_at)
            formation_failed = anything and process.fate == "failed" and formed_at >= gives_up_at
            excused = formation_failed or self._may_give_up(process)
            if process.fate not in ("done", "late") and not process.disturbed and not excused:
                raise Violation(
                    f"{process.name} is {process.fate}, though nothing was done to it: {process.error}"
                )

    def _may_give_up(self, process: SimulatedProcess) -> bool:
        """Whether a joiner waited in vain: somebody stood still for longer, or was lost between two calls.

        It has to give up: between two calls nobody's silence is judged, so a joiner that went on without the
        members would throw out ranks that only take their time.
        """
        if process.entered > 0 or not isinstance(process.error, TimeoutError):
            return False
        scenario = self.simulation.scenario
        waits = scenario.barrier_timeout + scenario.heartbeat_timeout
        for begin, end in self.simulation.stops:
            if end - begin > waits and begin < process.died_at and end > process.wants_since:
                return True
        newest = {other.slot: other for other in self.simulation.processes}.values()
        is_lost = any(other.fate in ("dead", "left", "failed") for other in newest if other is not process)
        return is_lost and bool(self.heads) and self.outcomes.get(self.heads[-1].n) == DONE


def _last(heads: list[Head]) -> str:
    return str(heads[-1]) if heads else "nothing"


def _names(members: Any) -> str:
    return ", ".join(str(member) for member in sorted(members)) or "nobody"
