"""What must always hold, checked after every step of a simulated job.

- I1: the head moves from n to n + 1 only, once n has ended; what was decided does not change.
- I2: all that enter an iteration agree on it; each rank is there once, and each slot.
- I3: a process never enters an iteration that is not higher than its last.
- I4: the job goes on in time (`progress`).
- I5: who was left out never comes back under its old incarnation, and hears of it.
- I6: no host's time is compared with another's: nothing is checked, but their clocks are hours apart.
- I7: what a process asks of the store for an iteration is bounded.
- I8: keys of past iterations are deleted, and no others.
- I9: an iteration is done or has a fault, never both; done only once all have finished.
- I10: every process comes to an end.
- I11: no world is smaller than allowed.
- I12: no process is in the function of n while it is listed in n + 1.
- I13 to I15: no process is left out or interrupted without a reason, or too early (`progress`).
- I16: where an active rank is lost, no new process is active while a spare waits on, and ranks do not move.
"""

import re
from typing import TYPE_CHECKING

from ft_wrapper.exception import StoreError
from ft_wrapper.protocol import Agreement, keys
from ft_wrapper.protocol.operations import read, read_log
from ft_wrapper.protocol.records import DONE, FAULT, RETURNS, Decision, Head, Member, View, arrivals_in
from ft_wrapper.state import State
from ft_wrapper.testing.scheduler import Step

from .history import LONGEST_LOOK, History, Violation, names
from .progress import Progress

if TYPE_CHECKING:
    from .process import SimulatedProcess
    from .simulation import Simulation

# Operations on the store that a process, its monitor's heart included, may need for an iteration: so many,
# and so many more for each second that it lasts. O(N) for reading who has died is left out: there are few.
_OPERATIONS = 150
_OPERATIONS_A_SECOND = 20.0

_READS = frozenset(["get", "multi_get", "check", "wait", "num_keys", "list_keys", "sleep"])
_WRITES = ("append", "execute", "set", "multi_set")

_KEY = re.compile(
    r"ft_wrapper/1/(?P<name>head|(?P<kind>end|decision|roster|member|heartbeat|arrived|dead|join|finished"
    r"|faults|meeting|seat|user|entered)/(?P<what>-?\d+)(?::(?P<incarnation>\d+))?.*)$"
)


class Invariants:
    """The invariants of one simulated job.

    The processes say what they do; the store is seen through a client whose operations are no steps.

    Args:
        simulation: the job.
        agreement: a client of its store.
        slot_order: whether the rank assignment keeps the ranks in their order, and all of them.

    Attributes:
        heads: the head of each iteration so far.
        rosters: the members of each iteration, in rank order.
        outcomes: how each iteration ended that has.
    """

    def __init__(self, simulation: "Simulation", agreement: Agreement, *, slot_order: bool) -> None:
        self.simulation = simulation
        self.history = history = History(simulation)
        self.heads, self.rosters, self.outcomes = history.heads, history.rosters, history.outcomes
        self.progress = Progress(simulation, agreement, self.history)
        self._agreement = agreement
        self._slot_order = slot_order
        self._known: dict[str, re.Match[str] | None] = {}
        self._immutable: dict[str, str] = {}
        self._ever: set[Member] = set()
        self._orders: dict[int, tuple[Member, ...]] = {}  # of each iteration, by rank
        self._warm: dict[int, set[Member]] = {}  # the spares that step in before new processes do
        self._unfit: dict[tuple[int, str], Member] = {}
        self._operations: dict[tuple[str, int], tuple[int, float]] = {}

    # After every step --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Looks at what the last operation may have changed."""
        step = self.simulation.scheduler.last_step
        if step is None or not step.args:
            return
        if self.simulation.knows_store and step.what not in ("sleep", "delete_key"):
            self._count_operation(step.task)
        if step.what in _READS or (step.what == "compare_set" and step.args[1] == step.args[2]):
            return
        touched = step.args[0]
        if isinstance(touched, str):
            self._check_key(touched, step)
        elif isinstance(touched, list):
            for key in touched:
                self._check_key(key, step)

    def _count_operation(self, task: str) -> None:
        """I7: what a process asks of the store for an iteration is bounded."""
        place, now = (task, len(self.history.heads)), self.history.now
        count, since = self._operations.get(place, (0, now))
        self._operations[place] = count + 1, since
        # Who looks at all the others, because they are silent, needs some for each of them.
        members = self.history.scenario.members
        most = _OPERATIONS + 6 * members + (_OPERATIONS_A_SECOND + 2 * members) * (now - since)
        if count + 1 > most and not task.startswith("again"):
            raise Violation(
                f"I7: {task} asks {count + 1} times of the store in {now - since:.1f} s of iteration "
                f"{len(self.history.heads) - 1}"
            )

    def _check_key(self, key: str, step: Step) -> None:
        try:
            match = self._known[key]
        except KeyError:
            match = self._known[key] = _KEY.search(key)
        if match is None:
            return
        if step.what == "delete_key":
            self._check_deletion(match)
        elif match["name"] == "head":
            self._check_head()
        elif match["kind"] == "end":
            self._check_end(int(match["what"]))
        elif match["kind"] in ("decision", "roster"):
            self._check_immutable(match[0])
        elif match["kind"] == "heartbeat":
            self._hear(match, step)
        elif match["kind"] == "meeting":
            n = int(match["what"])
            active = self._agreement.entering.active_in(n)
            if active:
                self.history.announced[n] = active
        if step.what in _WRITES:
            self._note_log(int(match["what"] or 0), match["kind"])

    def _note_log(self, n: int, kind: str | None) -> None:
        """Notes when an entry of a log was there. A reader of another store might have to wait for it."""
        history, now = self.history, self.history.now
        if kind == "dead":
            history.dead_at[n] = now
        if not self.simulation.knows_store:
            return
        if kind == "arrived":
            for member in self._agreement.iterations.arrivals_of(n):
                history.arrived_at.setdefault((n, member), now)
        elif kind == "join":
            for member in self._agreement.iterations.joins_of(n):
                history.joined_at.setdefault((n, member), now)
        elif kind == "dead":
            for member, marks in self._agreement.ends.marked_deaths_of(n).items():
                if RETURNS in marks:
                    history.returns_at.setdefault((n, member), now)

    def _hear(self, match: re.Match[str], step: Step) -> None:
        """A sign of life, unless it is only read."""
        history = self.history
        if step.what != "add" or step.args[1] != 1:
            return
        member, now = Member(int(match["what"]), int(match["incarnation"])), self.history.now
        before = history.beats.get(member)
        if before is not None and now - before >= history.silent_after:
            history.silences[member] = now, now - before
        history.beats[member] = now

    # Decisions, ends and keys ------------------------------------------------------------------------------

    def _check_head(self) -> None:
        history, iterations = self.history, self._agreement.iterations
        head = iterations.read_head()
        if head is None and history.heads:
            raise Violation("I8: head was deleted")
        if head is None or (history.heads and head == history.heads[-1]):
            return
        if head.n != len(history.heads):
            raise Violation(f"I1: head moved from {_last(history.heads)} to {head}")
        try:
            view = iterations.read_iteration(head)
            roster, decision = view.members, view.decision
        except StoreError as error:
            raise Violation(f"I1: head moved to {head}, whose decision is not written: {error}") from None
        if head.n > 0 and head.n - 1 not in history.outcomes:
            raise Violation(f"I1: head moved to {head} before {head.n - 1} had ended")
        if head.n > 0 and head.call != history.heads[-1].call + (history.outcomes[head.n - 1] == DONE):
            raise Violation(f"I1: the call of {head} does not follow from {history.heads[-1]}")
        if len(roster) < max(1, self.history.scenario.min_world_size):
            raise Violation(f"I11: {len(roster)} members are in {head}")
        if len({member.slot for member in roster}) < len(roster):
            raise Violation(f"I2: two incarnations of a slot are in {head}: {names(roster)}")
        for process in self.simulation.processes:
            if process.inside is not None and process.inside < head.n and process.member in roster:
                raise Violation(f"I12: {process.name} is in the function of {process.inside} while in {head}")
        before = set(history.rosters.get(head.n - 1, ()))
        newcomers = set(roster) - before
        if newcomers & self._ever:
            raise Violation(f"I5: {names(newcomers & self._ever)} had been left out, and are in {head}")
        # All get their ranks again where they had those of different worlds: then all are joined.
        joined, moved = set(decision.joined), set(decision.removed).intersection(decision.joined)
        lost = set(decision.removed) - moved
        if not newcomers <= joined <= set(roster) or lost != before - set(roster):
            raise Violation(f"I2: {decision} does not lead from {names(before)} to {names(roster)}")
        self._check_order(head.n, decision, roster, by_slot=joined == set(roster), moved=moved)
        if head.n > 0:
            self.progress.check_following(head, decision, roster)
            self._check_keys(head.n - 1)
        else:
            self.progress.check_first(roster)
        self._ever.update(roster)
        history.heads.append(head)
        history.decided_at[head.n] = self.history.now
        history.rosters[head.n] = roster

    def _check_order(
        self, n: int, decision: Decision, roster: tuple[Member, ...], *, by_slot: bool, moved: set[Member]
    ) -> None:
        """Ranks stay in the slots' order until a spare has taken a lost one's place."""
        before = arrivals_in(n - 1, read_log(self._agreement.store, keys.arrived(n - 1)))
        ranks = {
            member: decision.rank_of(member, before[member].rank if member in before else None)
            for member in roster
        }
        last = self._orders.get(n - 1, ())
        self._orders[n] = order = tuple(sorted(roster, key=ranks.__getitem__))
        was_by_slot = self._slot_order and (by_slot or last == tuple(sorted(last)))
        if was_by_slot and not moved and order != roster:
            raise Violation(f"I2: the ranks of {n} are those of {names(roster)} in the order {order}")
        new, lost = set(roster).difference(last), set(last).difference(roster)
        is_anew = n == decision.first and not self._slot_order  # a Tree here, which is made for each call
        if by_slot or is_anew or not (new and lost):
            return
        entered = self._agreement.entering.entered_in(n - 1)
        spares = {member for member, entry in entered.items() if entry.active_rank is None}
        if lost & entered.keys() - spares:
            self._warm[n] = spares.intersection(roster)
        if self._slot_order and self._warm.get(n) and len(lost - spares) <= len(self._warm[n]):
            for member in roster:
                rank = entered[member].active_rank if member in entered else None
                if rank is not None and order[rank] != member:
                    raise Violation(f"I16: {member} loses rank {rank} in {n} to {order[rank]}")

    def _check_warm(self, n: int, member: Member, state: State) -> None:
        """I16: who joins in this very decision is cold, who was there is warm."""
        if member in self._warm[n] and state.active_rank is None:
            self._unfit[n, "waits"] = member
        if member not in self.history.rosters[n - 1] and state.active_rank is not None:
            self._unfit[n, "new"] = member
        if (n, "waits") in self._unfit and (n, "new") in self._unfit:
            new, waits = self._unfit[n, "new"], self._unfit[n, "waits"]
            raise Violation(f"I16: {new} is new and active in {n}, though the spare {waits} waits")

    def _check_immutable(self, key: str) -> None:
        value = read(self._agreement.store, key)
        if value is not None and self._immutable.setdefault(key, value) != value:
            raise Violation(f"I1: {key} changed from {self._immutable[key]} to {value}")

    def _check_end(self, n: int) -> None:
        history = self.history
        outcome = self._agreement.ends.outcome_of(n)
        if outcome is None:
            return
        if history.outcomes.setdefault(n, outcome) != outcome:
            if n < len(history.heads) - 1:
                return  # a zombie writes late, when that key was deleted: no one who is in reads it any more
            raise Violation(f"I9: {n} ended as {history.outcomes[n]} and as {outcome}")
        if outcome not in (DONE, FAULT):
            raise Violation(f"I9: {n} ended as {outcome!r}")
        if n not in history.ended_at:
            history.ended_at[n] = history.now
            if n in history.rosters and outcome == DONE:
                self._check_done(n)
            elif n in history.rosters:
                self.progress.check_cause(n)

    def _check_done(self, n: int) -> None:
        history = self.history
        finished = sorted(history.returned.get(n, ()))
        if n not in history.sizes or finished != list(range(history.sizes[n][3])):
            raise Violation(f"I9: {n} is done, and finished have {finished} of {history.sizes.get(n)}")
        for process in self.simulation.processes:
            if process.alive and process.inside == n:
                raise Violation(f"I9: {n} is done, and {process.name} is still in its function")

    def _check_keys(self, n: int) -> None:
        """I8: when an iteration has been on for a while, the keys of those long past are gone."""
        history = self.history
        kinds = {kind for _, _, kind in self.simulation.troubles}
        if kinds - {"crash"} or self.history.scenario.slow:
            return  # somebody may have written late
        first = history.holders.get((n, "rank", 0))
        if first is None or history.owners[first].facts.disturbed:
            return  # no one keeps house
        until = history.ended_at.get(n, self.history.now)
        if until - history.decided_at[n] <= 3 * self.history.scenario.heartbeat_interval + history.slowness:
            return
        if any(begin >= history.decided_at[n] for begin, _, _ in self.simulation.troubles):
            return
        numbers = {name: keys.iteration_of(name) for name in self._agreement.store.list_keys()}
        past = [name for name, of in numbers.items() if of is not None and keys.BEFORE_FIRST < of < n - 1]
        if past:
            raise Violation(f"I8: {len(past)} keys of past iterations are there in {n}: {past[0]} ...")

    def _check_deletion(self, match: re.Match[str]) -> None:
        history = self.history
        if match["name"] == "head":
            raise Violation("I8: head was deleted")
        number = int(match["what"])
        if match["kind"] in ("member", "heartbeat"):
            member = Member(number, int(match["incarnation"]))
            if history.heads and member in history.rosters[history.heads[-1].n]:
                raise Violation(f"I8: {match[0]} was deleted while {member} is in {history.heads[-1]}")
        elif number < 0 or number >= len(history.heads) - 2:
            raise Violation(f"I8: {match[0]} was deleted while head is {_last(history.heads)}")

    # What processes say of themselves ----------------------------------------------------------------------

    def registered(self, process: "SimulatedProcess") -> None:
        """A process took the next incarnation of its slot."""
        history, member = self.history, process.member
        assert member is not None
        if member in history.owners:
            raise Violation(f"I2: {member} is {history.owners[member].name} and {process.name}")
        history.owners[member] = process
        for other in self.simulation.processes:
            if other is not process and other.slot == process.slot and other.member is not None:
                # What a newer incarnation does to an older one is right; the oldest may also be the late one.
                (other if other.member < member else process).facts.disturbed = True

    def entered(self, process: "SimulatedProcess", view: View, state: State) -> None:
        """A process enters the function, or its place as spare."""
        history = self.history
        n, member = view.n, process.member
        assert member is not None
        process.facts.entered_at = self.history.now
        if n <= process.facts.last:
            raise Violation(f"I3: {process.name} enters {n} after {process.facts.last}")
        roster = history.rosters.get(n, ())
        if member not in roster:
            raise Violation(f"I5: {process.name} enters {n} as {member}, and in it are {names(roster)}")
        if view.members != roster or view.head != history.heads[n]:
            raise Violation(f"I2: {process.name} believes in {view}, decided is {history.heads[n]}: {roster}")
        active = state.active_world_size or 0
        mine = (view.call, view.decision.first, state.world_size, active)
        if history.sizes.setdefault(n, mine) != mine:
            raise Violation(f"I2: {process.name} enters {n} with {mine}, others with {history.sizes[n]}")
        self._take("rank", n, member, state.rank, state.world_size)
        order = self._orders[n]
        if self._slot_order and (state.rank, state.world_size) != (order.index(member), len(order)):
            raise Violation(f"I2: {member} has rank {state.rank} of {state.world_size} in {order}")
        if n in self._warm:
            self._check_warm(n, member, state)
        history.wanted = max(history.wanted, active)
        self.progress.check_promptness(process, n)
        self.simulation.entered(process)
        if process.facts.last < 0:
            self.progress.check_entry(process, n)
        process.facts.last = n
        if state.active_rank is not None:
            process.inside = n
            self._take("active rank", n, member, state.active_rank, active)

    def _take(self, what: str, n: int, member: Member, rank: int | None, size: int) -> None:
        if rank is None or not 0 <= rank < size:
            raise Violation(f"I2: {member} has {what} {rank} of {size} in {n}")
        holder = self.history.holders.setdefault((n, what, rank), member)
        if holder != member:
            raise Violation(f"I2: {member} and {holder} have {what} {rank} in {n}")
        if what == "active rank":
            self.history.full_at[n] = self.history.now

    def completed(self, process: "SimulatedProcess", view: View) -> None:
        """A process was told that all is done."""
        outcome = self.outcomes.get(view.n)
        if outcome != DONE:
            raise Violation(f"I9: {process.name} returns from {view.n}, which is {outcome}")
        process.completed.append(view.n)

    def ends(self, process: "SimulatedProcess", fate: str) -> None:
        """A process has come to its end. Who is still listed has no reason to think that it is out."""
        history, member = self.history, process.member
        if fate != "out" or member is None or not history.heads or process.facts.doomed:
            return
        head = history.heads[-1]
        is_listed = member in history.rosters[head.n] and history.newest(member.slot) == member
        if not is_listed or head.n in history.outcomes or not self.simulation.knows_store:
            return
        if member not in self._agreement.ends.deaths_of(head.n):
            raise Violation(f"I13: {process.name} takes itself for out, and is listed in {head}")

    def ended_as_left_out(self, process: "SimulatedProcess") -> None:
        """A process's monitor is about to end it, since the others seem to have gone on without it."""
        history = self.history
        head, member = history.heads[-1], process.member
        stopped = process.task.is_paused(history.now - history.scenario.heartbeat_interval)
        # Where a read is two steps it may wait for a key that is deleted between them.
        may_wait = stopped or not history.scenario.use_libuv or history.slowness > 0
        if not may_wait and not process.facts.leaving and not history.troubled_at(history.now):
            raise Violation(f"I5: {process.name} is out, and does not hear of it")
        if member in history.rosters[head.n] and not process.facts.doomed:
            raise Violation(f"I13: {process.name} is ended as left out, and it is listed in {head}")

    def nobody_tells(self) -> None:
        """A process ended before it was in: it is waited for in vain."""
        scenario = self.history.scenario
        self.history.untold += scenario.barrier_timeout + scenario.heartbeat_timeout + LONGEST_LOOK

    # At the end --------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Everybody has come to an end: a good one, unless something was done to it."""
        history = self.history
        processes = self.simulation.processes
        if history.heads:
            self._check_keys(history.heads[-1].n)
        done = {process.completed[-1] for process in processes if process.fate == "done"}
        if len(done) > 1:
            raise Violation(f"I9: processes completed different iterations: {sorted(done)}")
        fates = {process.fate for process in processes}
        if history.heads and not fates & {"done", "dead", "left", "failed", "quit"}:
            raise Violation(f"I4: everybody lives and no one went on: {sorted(fates)}")
        for process in processes:
            if process.alive:
                raise Violation(f"I10: {process.name} came to no end")
            # Who is out is so for a reason, which was looked at when it was left out.
            good = process.fate in ("done", "late", "quit", "out")
            if not good and not process.facts.disturbed and not self.progress.is_excused(process):
                what = f"{process.name} is {process.fate}, though nothing was done to it"
                raise Violation(f"{what}: {process.error}")


def _last(heads: list[Head]) -> str:
    return str(heads[-1]) if heads else "nothing"
