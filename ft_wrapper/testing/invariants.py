"""What must always hold (DESIGN.md 5.5), checked after every step of a simulated job."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ..exception import StoreError, TimeoutError
from ..state import State
from ..store import Decision, Head, Member, StoreMixin, View, keys
from ..store.records import DONE, FAULT

if TYPE_CHECKING:
    from .process import SimulatedProcess
    from .simulation import Simulation

# Looks of those who come forward one after the other.
_FIRST_LOOK = 0.5
_LONGEST_LOOK = 8.0
_STAGGER = 0.05
_LOOKS_FOR_END = 1.0  # who waits for others while it enters looks every so often whether that is over
_SLACK = 0.2
_TURNS = 8  # heartbeats in the timeout, from which on a heart does one thing at a time
_BEATS_OF_TURNS = 13  # until it has done all of them
_MOST_DOUBLINGS = 6
_SETTLES_AFTER = 4.0  # join windows
_HARMLESS = 4.0  # a shorter stop keeps no one from anything
_STEPS_OF_A_RESTART = 80  # of one process at the most, each of which takes time where it is slow

# After these only silence tells what happened, or somebody is waited for.
_SLOW = ("host", "node", "hang", "pause", "freeze", "deaf", "mute", "outage", "loop", "error")

# Operations on the store that a process, its monitor's heart included, may need for an iteration: so many,
# and so many more for each second that it lasts. O(N) for reading who has died is left out: there are few.
_OPERATIONS = 150
_OPERATIONS_A_SECOND = 20.0

_WRITES = ("append", "carry_out", "set", "multi_set")

_KEY = re.compile(
    r"ft_wrapper/1/(?P<name>head|(?P<kind>end|decision|roster|member|heartbeat|arrived|dead|join|finished"
    r"|faults|world|seat|user|entered)/(?P<what>-?\d+)(?::(?P<incarnation>\d+))?.*)$"
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
        self._published: set[int] = set()
        self._returned: dict[int, set[int]] = {}
        self._beats: dict[Member, float] = {}  # when each was heard last
        self._silences: dict[Member, tuple[float, float]] = {}  # the last long ones: until when, how long
        self._joined_at: dict[tuple[int, Member], float] = {}
        self._returns_at: dict[tuple[int, Member], float] = {}
        self._operations: dict[tuple[str, int], tuple[int, float]] = {}
        self._wanted = 0
        self._announced: dict[int, int] = {}  # the active ranks of each, as the first that enters claims them
        self._arrived_at: dict[tuple[int, Member], float] = {}
        self._full_at: dict[int, float] = {}  # when another one took an active rank
        self._dead_at: dict[int, float] = {}  # when a death was logged last
        self._superseders: set[str] = set()  # and others who logged a death

    def known(self) -> object:
        """What tells states apart of all that is remembered here."""
        return self._noted, self._untold

    # After every step --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Looks at what the last operation may have changed."""
        step = self._scheduler.last_step
        if step is None or not step.args:
            return
        if self.simulation.knows_store and step.what not in ("sleep", "delete_key"):
            self._count_operation(step.task)
        touched = step.args[0]
        if isinstance(touched, str):
            self._check_key(touched, step.what)
        elif isinstance(touched, list):
            for key in touched:
                self._check_key(key, step.what)

    def _count_operation(self, task: str) -> None:
        """I7: what a process asks of the store for an iteration is bounded."""
        place = (task, len(self.heads))
        now = self._scheduler.now()
        count, since = self._operations.get(place, (0, now))
        self._operations[place] = count + 1, since
        members = self.simulation.scenario.members
        # Who looks at all the others, because they are silent, needs some for each of them.
        most = _OPERATIONS + 6 * members + (_OPERATIONS_A_SECOND + 2 * members) * (now - since)
        if count + 1 > most and not task.startswith("again"):
            raise Violation(
                f"I7: {task} asks {count + 1} times of the store in {now - since:.1f} s of iteration "
                f"{len(self.heads) - 1}"
            )

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
        elif match["kind"] == "heartbeat":
            self._hear(match)
        elif match["kind"] == "world":
            claimed = self._store.try_get(match[0])
            if claimed is not None:
                self._announced[int(match["what"])] = int(claimed.split()[1])
        elif match["kind"] == "dead" and operation in _WRITES:
            step = self._scheduler.last_step
            self._superseders.add("" if step is None else step.task)
            self._dead_at[int(match["what"])] = self._scheduler.now()
        if operation in _WRITES and self.simulation.knows_store:
            self._note_log(int(match["what"] or 0), match["kind"])

    def _note_log(self, n: int, kind: str | None) -> None:
        """Notes when an entry of a log was there. A reader of another store might have to wait for it."""
        now = self._scheduler.now()
        if kind == "arrived":
            for member in self._store.arrivals_of(n):
                self._arrived_at.setdefault((n, member), now)
        elif kind == "join":
            for member in self._store.joins_of(n):
                self._joined_at.setdefault((n, member), now)
        elif kind == "dead":
            for member, returns in self._store.announced_deaths_of(n).items():
                if returns:
                    self._returns_at.setdefault((n, member), now)

    def _hear(self, match: re.Match[str]) -> None:
        """A sign of life, unless it is only read."""
        step = self._scheduler.last_step
        if step is None or step.what != "add" or step.args[1] != 1:
            return
        member, now = Member(int(match["what"]), int(match["incarnation"])), self._scheduler.now()
        before = self._beats.get(member)
        if before is not None and now - before >= self._silent_after:
            self._silences[member] = now, now - before
        self._beats[member] = now

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
        # All get their ranks again where they had those of different worlds: then all are joined.
        joined = set(decision.joined)
        if not newcomers <= joined <= set(roster) or set(decision.removed) != before - set(roster):
            raise Violation(f"I2: {decision} does not lead from {_names(before)} to {_names(roster)}")
        if head.n > 0:
            self._check_following(head, decision, roster)
        else:
            self._check_first(roster)
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
                return  # a zombie writes late, when that key was deleted: no one who is in reads it any more
            raise Violation(f"I9: {n} ended as {self.outcomes[n]} and as {outcome}")
        if outcome not in (DONE, FAULT):
            raise Violation(f"I9: {n} ended as {outcome!r}")
        if n in self.ended_at:
            return
        self.ended_at[n] = self._scheduler.now()
        self._note("end", n, outcome, self._scheduler.now())
        if n not in self.rosters:
            return
        if outcome == DONE:
            self._check_done(n)
        else:
            self._check_cause(n)

    def _check_done(self, n: int) -> None:
        if n not in self.sizes or self._returned.get(n, set()) != set(range(self.sizes[n][3])):
            finished = sorted(self._returned.get(n, ()))
            raise Violation(f"I9: {n} is done, and finished have {finished} of {self.sizes.get(n)}")
        for process in self.simulation.processes:
            if process.alive and process.inside == n:
                raise Violation(f"I9: {n} is done, and {process.name} is still in its function")

    # What ended an iteration, and who was left out of the next one ------------------------------------------

    def _check_cause(self, n: int) -> None:
        """A fault has a cause: one that was published, a death, a silence, a join that wanted it."""
        if n != self.heads[-1].n:
            return  # by one that is late: no one who is in reads it any more
        now = self._scheduler.now()
        current = self._scheduler.current
        who, _, name = ("", "", "") if current is None else current.name.partition(" ")
        if n in self._published:
            return
        members = [(member, self._owners.get(member)) for member in self.rosters[n]]
        for member, process in members:
            is_leaver = process is not None and process.leaving and process.name == f"{who} {name}"
            if process is not None and is_leaver and (process.active or process.last != n):
                return
            if process is None or self._is_spare(n, member, process, to_all=who != "report"):
                continue
            if process.fate != "running" or process.doomed or process.leaving:
                for_ = f"I4: {n} ended by the death of {process.name}"
                since = max(process.died_at, self.decided_at[n])
                if process.fate in ("dead", "left") and not process.doomed and who == "heart":
                    self._check_pace(for_, since)
                    self._check_silence(for_, since)
                return
            if self._newest(member.slot) > member and who == "rank":
                return  # taken over
            if who in ("heart", "rank") and self._is_silent(member, now):
                return
        if who == "rank":
            self._check_join(n, name, now)
            return
        raise Violation(f"I13: {n} is ended by {who} {name}, and of {_names(self.rosters[n])} no one is lost")

    def _check_silence(self, what: str, since: float) -> None:
        """Any number that are lost are known to be silent soon after the first."""
        scenario, now = self.simulation.scenario, self._scheduler.now()
        happened = [begin for begin, _, _ in self.simulation.troubles]
        happened += [min(end, now) for _, end, _ in self.simulation.troubles]
        happened += [process.started_at for process in self.simulation.processes]
        took = now - max(since, *happened)
        turns = scenario.heartbeat_timeout >= _TURNS * scenario.heartbeat_interval
        most = scenario.heartbeat_timeout + (8 if turns else 4) * scenario.heartbeat_interval + self._slowness
        if took > most + self._untold:
            raise Violation(f"{what}, {took:.1f} s after the last one was lost, more than {most:g} s")

    def _is_spare(self, n: int, member: Member, process: SimulatedProcess, *, to_all: bool) -> bool:
        """Whether a member is known to be a spare in n: to its monitor, or to all who look."""
        if not to_all:
            return process.reported_as_spare_in == n
        if n not in self.sizes:
            return False
        holders = {self._holders.get((n, "active rank", rank)) for rank in range(self.sizes[n][3])}
        if self._lately(self._full_at.get(n, self._scheduler.now())):
            return False  # somebody may have looked before
        return None not in holders and member not in holders

    def _check_join(self, n: int, name: str, now: float) -> None:
        """One that wants in ends the iteration only where that is asked for, and after the window."""
        scenario = self.simulation.scenario
        process = next((p for p in self.simulation.processes if p.name == f"rank {name}"), None)
        if process is None or process.member is None or process.member in self.rosters[n]:
            raise Violation(f"I13: {n} is ended by rank {name}, and no one is lost")
        asked = self._joined_at.get((n, process.member))
        if asked is None and not self.simulation.knows_store:
            return  # in a store whose logs are not seen to be written
        if asked is None or now - asked < scenario.join_window - 1e-6:
            raise Violation(f"I13: {n} is ended by rank {name}, which has not gathered joins")
        # Claimed is enough: the one that claims may not have entered yet.
        degraded = n in self._announced and self._announced[n] < max(self._announced.values())
        if scenario.on_join == "next" or (scenario.on_join == "degraded" and not degraded):
            raise Violation(f"I13: {n} is ended by rank {name}, though it is not wanted")

    @property
    def _silent_after(self) -> float:
        """Seconds between two heartbeats, as they were sent, in which somebody may take one for silent."""
        scenario = self.simulation.scenario
        return scenario.heartbeat_timeout - scenario.heartbeat_interval / 2

    def _is_silent(self, member: Member, now: float) -> bool:
        """Whether a member is silent, or was until a moment ago."""
        if member not in self._beats:
            return False
        if self._is_long(self._beats[member], now):
            return True
        until, lasted = self._silences.get(member, (-1e9, 0.0))
        return now - until <= self._moment and self._is_long(until - lasted, until)

    def _is_long(self, begin: float, end: float) -> bool:
        """Whether a silence is one, and not an outage of the store, of which no one may conclude anything."""
        silence, timeout = end - begin, self.simulation.scenario.heartbeat_timeout
        out = [
            min(end, until) - max(begin, since)
            for since, until, kind in self.simulation.troubles
            if kind == "outage" and since < end and until > begin
        ]
        if out:
            return silence - sum(out) >= timeout / 2 - _SLACK
        return silence >= self._silent_after

    @property
    def _moment(self) -> float:
        """For how long after a silence somebody may still act on it."""
        scenario = self.simulation.scenario
        stops = [end - begin for begin, end, kind in self.simulation.troubles]
        return 2 * scenario.heartbeat_interval + max(stops, default=0.0) + self._slowness

    def _newest(self, slot: int) -> Member:
        return max(member for member in self._owners if member.slot == slot)

    def _check_following(self, head: Head, decision: Decision, roster: tuple[Member, ...]) -> None:
        n, now = head.n - 1, self._scheduler.now()
        outcome = self.outcomes[n]
        for member in decision.removed:
            self._check_removal(n, member, outcome, now)
        if outcome == FAULT:
            self._check_pace(f"I4: {n} was followed", self.ended_at[n])
            self._check_hold(n, roster, now)
        proposer = self._scheduler.current
        joins = proposer is not None and proposer.name.startswith("rank")
        # Who supersedes the last one that was missing decides at once.
        joins = joins and proposer is not None and proposer.name not in self._superseders
        joins = joins and not self._lately(self._dead_at.get(n, -1e9))
        if joins and not set(self.rosters[n]) & set(roster):
            self._check_gathering(n, roster, now)
        self._check_keys(n)

    def _check_first(self, roster: tuple[Member, ...]) -> None:
        missing = set(range(self.simulation.scenario.members)) - {member.slot for member in roster}
        if missing:
            raise Violation(f"I14: the job forms without the slots {sorted(missing)} that it begins with")
        if not self.simulation.knows_store:
            return
        dead = self._store.deaths_of(keys.BEFORE_FIRST)
        for member in dead & set(roster):
            process = self._owners.get(member)
            if process is not None and process.fate != "running" and not self._lately(process.died_at):
                raise Violation(f"I14: the job forms with {process.name}, which is {process.fate}")
        joined = [self._joined_at.get((-1, member), 0.0) for member in roster]
        if not self._troubled:
            took = self._scheduler.now() - max(joined, default=0.0)
            if took > self._slowness + _SLACK:
                raise Violation(f"I4: the job forms {took:.1f} s after the last one has joined")

    def _lately(self, then: float) -> bool:
        """Whether something is no longer ago than it may take to be heard of."""
        stops = [end - begin for begin, end, _ in self.simulation.troubles]
        return self._scheduler.now() - then <= max(stops, default=0.0) + self._slowness + self._reported

    def _check_removal(self, n: int, member: Member, outcome: str, now: float) -> None:
        """Who lives and is heard stays, unless it keeps the others waiting in an iteration that failed."""
        process = self._owners.get(member)
        if process is None or process.fate != "running" or process.doomed or process.leaving:
            return
        if not self.simulation.knows_store:
            return
        if self._newest(member.slot) > member or self._is_silent(member, now):
            return
        late = now - self.ended_at[n] >= self.simulation.scenario.barrier_timeout - _SLACK
        arrived_at = self._arrived_at.get((n, member), now)
        if outcome == FAULT and late and self._lately(arrived_at):
            return
        if member in self._store.deaths_of(n) and any(
            kind in ("node", "loop") and member.slot in self.simulation.scenario.node_of(member.slot)
            for _, _, kind in self.simulation.troubles
        ):
            return
        raise Violation(f"I13: {process.name} lives and is heard, and is left out after {n}")

    def _check_hold(self, n: int, roster: tuple[Member, ...], now: float) -> None:
        """With a replacement announced, and too few ranks without it, no one goes on before rejoin_wait."""
        scenario = self.simulation.scenario
        here = {member.slot for member in roster}
        if len(roster) >= self._wanted or now - self.ended_at[n] >= scenario.rejoin_wait - _SLACK:
            return
        for (iteration, member), since in self._returns_at.items():
            known = max(since, self.ended_at[n])
            if iteration == n and member.slot not in here and not self._lately(known):
                raise Violation(f"I15: {n} is followed without {member.slot}, whose return was announced")

    def _check_gathering(self, n: int, roster: tuple[Member, ...], now: float) -> None:
        """Where no member of the last iteration is left, the first to come back waits for the others."""
        scenario = self.simulation.scenario
        everybody = {member.slot for member in self.rosters[n]}
        if not self.simulation.knows_store or everybody <= {
            member.slot for member in self._store.joins_of(n)
        }:
            return
        if now - self.ended_at[n] < scenario.join_window - 1e-6:
            raise Violation(f"I15: {n} is followed by {_names(roster)}, who did not wait for the others")

    def _check_keys(self, n: int) -> None:
        """I8: when an iteration has been on for a while, the keys of those long past are gone."""
        kinds = {kind for _, _, kind in self.simulation.troubles}
        if kinds - {"crash"} or self.simulation.scenario.slow:
            return  # somebody may have written late
        first = self._holders.get((n, "rank", 0))
        if first is None or self._owners[first].disturbed:
            return  # no one keeps house
        until = self.ended_at.get(n, self._scheduler.now())
        if until - self.decided_at[n] <= 3 * self.simulation.scenario.heartbeat_interval + self._slowness:
            return
        if any(begin >= self.decided_at[n] for begin, _, _ in self.simulation.troubles):
            return
        past = [
            name
            for name in self._store.list_keys()
            if (of := keys.iteration_of(name)) is not None and keys.BEFORE_FIRST < of < n - 1
        ]
        if past:
            raise Violation(f"I8: {len(past)} keys of past iterations are there in {n}: {past[0]} ...")

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
        elif match["kind"] in ("member", "heartbeat"):
            pass
        elif number < 0 or number >= len(self.heads) - 2:
            raise Violation(f"I8: {match[0]} was deleted while head is {_last(self.heads)}")

    def _check_pace(self, what: str, since: float) -> None:
        """That something came in time, which is counted from the last thing that happened."""
        processes = self.simulation.processes
        there = [
            max(process.started_at, process.called_at)
            for process in processes
            if process.alive and not process.disturbed and not process.away
        ]
        if not there or self.simulation.scenario.min_world_size > 1:
            return  # no one was there to go on, or they had to wait for others
        now = self._scheduler.now()
        # A stop ends a wait, too: nothing tells how long it will be.
        happened = [begin for begin, _, _ in self.simulation.troubles]
        happened += [min(end, now) for _, end, kind in self.simulation.troubles if kind in ("outage", "deaf")]
        took = now - max(since, min(there), *happened)
        most = self.patience(since) if not self._is_plain_death() else self._slowness + _SLACK
        if took > most:
            raise Violation(f"{what} after {took:.1f} s, more than {most:g} s")

    def _is_plain_death(self) -> bool:
        """Whether nothing has happened but that one process died in the function, and its monitor lives."""
        scenario = self.simulation.scenario
        if [kind for _, _, kind in self.simulation.troubles] != ["crash"] or scenario.replaced:
            return False
        others = ("repeat", "reporter", "respawn", "exception")
        if any(scenario.of(*others)) or scenario.extra or scenario.stagger or self._untold:
            return False
        dead = [process for process in self.simulation.processes if process.fate == "dead"]
        return len(dead) == 1 and dead[0].died_inside is not None

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
        process.entered_at = self._scheduler.now()
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
        self._wanted = max(self._wanted, active)
        self._check_promptness(process, n)
        self.simulation.entered(process)
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
            if what == "active rank":
                self._full_at[n] = self._scheduler.now()
        elif self._holders[n, what, rank] != member:
            raise Violation(f"I2: {member} and {self._holders[n, what, rank]} have {what} {rank} in {n}")

    def _check_promptness(self, process: SimulatedProcess, n: int) -> None:
        """Who was waiting for the decision hears of it at once."""
        scenario = self.simulation.scenario
        if self._troubled or scenario.exchange or scenario.endpoint or process.last < 0:
            return
        took = self._scheduler.now() - self.decided_at[n]
        if took > self._slowness + _SLACK:
            raise Violation(f"I4: {process.name} enters {n} {took:.1f} s after it was decided")

    def _check_entry(self, process: SimulatedProcess, n: int) -> None:
        """I4 for joiners: one that ends the iteration itself is in soon."""
        scenario = self.simulation.scenario
        if process.disturbed or n == 0 or scenario.on_join == "next" or scenario.min_world_size > 1:
            return
        if scenario.on_join == "degraded":
            sizes = {of: size[3] for of, size in self.sizes.items() if of < n}
            if sizes.get(n - 1, 0) >= max(sizes.values(), default=0):
                return
        if self.heads[n].call != self.heads[n - 1].call or self.sizes.get(n - 1) is None:
            return
        window = scenario.join_window * 2.0 ** min(_MOST_DOUBLINGS, len(self.heads))
        happened = [begin for begin, _, _ in self.simulation.troubles]
        happened += [min(end, self._scheduler.now()) for _, end, _ in self.simulation.troubles]
        since = max(process.wants_since, self.decided_at[n - 1], *happened)
        took = self._scheduler.now() - since
        if took > window + _LONGEST_LOOK + self.patience(since):
            raise Violation(f"I4: {process.name} got in after {took:.1f} s")

    def completed(self, process: SimulatedProcess, view: View) -> None:
        """A process was told that all is done."""
        if self.outcomes.get(view.n) != DONE:
            raise Violation(f"I9: {process.name} returns from {view.n}, which is {self.outcomes.get(view.n)}")
        process.completed.append(view.n)

    def heard_of_end(self, process: SimulatedProcess, n: int) -> None:
        """A process has left n. It hears of the end at once, or with the next heartbeat of anybody."""
        if process.disturbed or n not in self.ended_at or n < self.heads[-1].n - 1:
            return
        now = self._scheduler.now()
        stops = [
            min(end, now)
            for begin, end, kind in self.simulation.troubles
            if kind != "pause" or end - begin <= _HARMLESS
        ]
        took = now - max([self.ended_at[n], self.decided_at[n], process.entered_at, *stops])
        if took > self._reported + self._slowness:
            raise Violation(f"I4: {process.name} hears of the end of {n} {took:.1f} s after it")

    def publishes(self, n: int) -> None:
        """A fault of n is about to be published."""
        self._published.add(n)
        self._note("published", n)

    def returned(self, n: int, active_rank: int) -> None:
        """The function of n has returned on an active rank."""
        self._returned.setdefault(n, set()).add(active_rank)
        self._note("returned", n, active_rank)

    def leaves(self, process: SimulatedProcess) -> None:
        """A process is about to say that it leaves."""
        process.leaving = True

    def ends(self, process: SimulatedProcess, fate: str) -> None:
        """A process has come to its end. Who is still listed has no reason to think that it is out."""
        member = process.member
        if fate != "out" or member is None or not self.heads or process.doomed:
            return
        head = self.heads[-1]
        is_listed = member in self.rosters[head.n] and self._newest(member.slot) == member
        is_on = self.outcomes.get(head.n) is None
        if (
            is_listed
            and is_on
            and self.simulation.knows_store
            and member not in self._store.deaths_of(head.n)
        ):
            raise Violation(f"I13: {process.name} takes itself for out, and is listed in {head}")

    def ended_as_left_out(self, process: SimulatedProcess) -> None:
        """A process's monitor is about to end it, since the others seem to have gone on without it."""
        head, member = self.heads[-1], process.member
        task, now = process.task, self._scheduler.now()
        stopped = task is not None and task.is_paused(now - self.simulation.scenario.heartbeat_interval)
        # Where a read is two steps it may wait for a key that is deleted between them.
        reads_at_once = self.simulation.scenario.use_libuv
        stopped = stopped or not reads_at_once
        if not stopped and not process.leaving and not self._slowness and not self._troubled_at(now):
            raise Violation(f"I5: {process.name} is out, and does not hear of it")
        if member in self.rosters[head.n] and not process.doomed:
            raise Violation(
                f"I13: the monitor of {process.name} ends it as left out, and it is listed in {head}"
            )

    def _troubled_at(self, now: float) -> bool:
        """Whether something stood still until a moment ago."""
        moment = now - 2 * self.simulation.scenario.heartbeat_interval
        return any(end > moment for begin, end, kind in self.simulation.troubles if end > begin)

    def nobody_tells(self) -> None:
        """A process ended before it was in: it is waited for in vain."""
        scenario = self.simulation.scenario
        self._untold += scenario.barrier_timeout + scenario.heartbeat_timeout + _LONGEST_LOOK

    @property
    def _troubled(self) -> bool:
        return bool(self.simulation.troubles) or bool(
            self.simulation.scenario.of("repeat", "reporter", "loop")
        )

    @property
    def _slowness(self) -> float:
        """What the steps of the slowest process take in one restart."""
        scenario = self.simulation.scenario
        exchanges = 0.0 if not (scenario.exchange or scenario.endpoint) else _LOOKS_FOR_END + _SLACK
        return _STEPS_OF_A_RESTART * scenario.slow + exchanges

    @property
    def _reported(self) -> float:
        """How long it may take until what was reported is known: somebody dies before it wakes the others."""
        scenario = self.simulation.scenario
        if not self._troubled:
            return _SLACK
        turns = scenario.heartbeat_timeout >= _TURNS * scenario.heartbeat_interval
        beats = _BEATS_OF_TURNS if turns else 1
        return beats * scenario.heartbeat_interval + _FIRST_LOOK + _STAGGER * scenario.members + _SLACK

    def patience(self, since: float) -> float:
        """The longest that an iteration which has ended may last, in virtual seconds, after the last fault.

        It does not depend on how many there were. What happened long before is known to all by then.

        Args:
            since: when it ended.
        """
        scenario = self.simulation.scenario
        long_ago = since - 2 * scenario.heartbeat_timeout - 8 * scenario.heartbeat_interval
        # But each call has another monitor.
        several = scenario.calls > 1
        troubles = [trouble for trouble in self.simulation.troubles if several or trouble[1] >= long_ago]
        kinds = {kind for _, _, kind in troubles}
        patience = self._reported + self._slowness + self._untold
        if kinds:
            patience += 2 * _FIRST_LOOK + scenario.join_window
        if kinds and several:
            # Who moves the head and dies before it wakes the others: those who wait for long look seldom.
            patience += _LONGEST_LOOK
        if scenario.replaced:
            patience += scenario.rejoin_wait + scenario.replaced_after
        slow = kinds & set(_SLOW)
        if slow and slow <= {"host", "node"} and not any(scenario.of("reporter", "repeat")) and not several:
            # Their neighbours see all of them at once, and go on without them.
            turns = scenario.heartbeat_timeout >= _TURNS * scenario.heartbeat_interval
            patience += scenario.heartbeat_timeout + (8 if turns else 4) * scenario.heartbeat_interval
        elif slow or any(scenario.of("reporter")):
            patience += 2 * scenario.heartbeat_timeout + 2 * scenario.heartbeat_interval + 2 * _LONGEST_LOOK
        if any(end - begin > _HARMLESS for begin, end, _ in troubles) or "error" in kinds:
            patience += scenario.barrier_timeout + _LONGEST_LOOK
        return patience

    # At the end --------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Everybody has come to an end: a good one, unless something was done to it."""
        processes = self.simulation.processes
        if self.heads:
            self._check_keys(self.heads[-1].n)
        done = {process.completed[-1] for process in processes if process.fate == "done"}
        if len(done) > 1:
            raise Violation(f"I9: processes completed different iterations: {sorted(done)}")
        fates = {process.fate for process in processes}
        if self.heads and not fates & {"done", "dead", "left", "failed", "quit"}:
            raise Violation(f"I4: everybody lives and no one went on: {sorted(fates)}")
        anything = any(process.disturbed for process in processes)
        for process in processes:
            if process.alive:
                raise Violation(f"I10: {process.name} came to no end")
            gives_up_at = process.wants_since + self.simulation.scenario.barrier_timeout
            formed_at = self.decided_at.get(0, gives_up_at)
            formation_failed = anything and process.fate == "failed" and formed_at >= gives_up_at
            excused = formation_failed or self._may_give_up(process) or self._are_too_few(process)
            out = process.fate == "out"  # for a reason, which was looked at when it was left out
            if (
                not out
                and process.fate not in ("done", "late", "quit")
                and not process.disturbed
                and not excused
            ):
                raise Violation(
                    f"{process.name} is {process.fate}, though nothing was done to it: {process.error}"
                )

    def _are_too_few(self, process: SimulatedProcess) -> bool:
        """Whether a process gives up since too many others were lost to go on."""
        least = self.simulation.scenario.min_world_size
        if least == 1 or process.fate != "failed" or not isinstance(process.error, TimeoutError):
            return False
        owners = [self._owners.get(member) for member in self.rosters[self.heads[-1].n]] if self.heads else []
        left = [owner for owner in owners if owner is not None and not owner.disturbed]
        return self.simulation.scenario.replaced or len(left) < least

    def _may_give_up(self, process: SimulatedProcess) -> bool:
        """Whether a joiner waited in vain: somebody stood still for longer, or was lost between two calls.

        It has to give up: between two calls no one's silence is judged, so a joiner that went on without the
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
    return ", ".join(str(member) for member in sorted(members)) or "no one"
