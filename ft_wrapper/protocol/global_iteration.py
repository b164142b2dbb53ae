"""How the members go from one iteration to the next: head and decisions.

Safety comes from one compare-and-set on the head register. Which member proposes, and when, only affects
progress, and a wrong choice never does harm:

- Head moves from n to n + 1 only after n has ended, only from the exact value that was read, and only to a
  decision that is already written.
- A decision keeps the members of n that have arrived (have left the function) and are not dead.
- It waits for living members that have not arrived. At the barrier timeout it drops them, unless n ended as
  done: between two calls a member may take its time.
- It adds joiners, the newest incarnation of each slot.
- Usually the last member to arrive, or the monitor that logs the last death, proposes at once. If it dies,
  the waiting members propose one after another.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from ..exception import RestartTimeout, StoreError
from ..settings import AllLimits
from . import history, keys, operations, records
from .ends import Ends
from .entering import spares_in
from .operations import Append, CompareAndSet, Count, Notify, Operations, Read, ReadLog, Write, read, read_log
from .proposal import Evidence, awaited_replacements, candidates, may_propose, next_call, next_decision
from .records import DONE, FAULT, ArrivalEntry, Decision, Head, Member, View, record_of
from .seal import forged
from .silence import HeartbeatObserver, Heartbeats
from .waiting import FIRST_LOOK, LOOKS_BETWEEN_CALLS, is_checker, looks, stagger

_SAY_MISSING_AFTER = 1.0  # seconds
#: Takes the members that a restart waits for, and the seconds it has waited.
OnMissing = Callable[[Sequence[Member], float], None]


@dataclasses.dataclass(frozen=True)
class Proposed:
    """A proposal that was made. Since then this proposal or another one has moved head.

    Args:
        decision: the proposed decision.
        head: the head of this proposal.
        won: whether head is known to have moved to it.
    """

    decision: Decision
    head: Head
    won: bool


class GlobalIteration:
    """Leaving an iteration, and going on to the next.

    Args:
        store: the job's store.
        ends: how iterations end.
        heartbeats: which members are silent.
    """

    def __init__(self, store: Operations, ends: Ends, heartbeats: Heartbeats) -> None:
        self.store = store
        self.ends = ends
        self.heartbeats = heartbeats

    def read_head(self) -> Head | None:
        """The current iteration; None before the first decision."""
        text = read(self.store, keys.HEAD)
        if text is None and self.store.seal is not None and self.store.check([keys.HEAD]):
            text = read(self.store, keys.HEAD)  # it may just have been written
            if text is None:
                raise forged(keys.HEAD)  # without a head the job would start over
        return None if text is None else Head.parse(text, keys.HEAD)

    def read_decision(self, head: Head) -> Decision:
        """The decision behind a head."""
        key = keys.decision(head.n, head.nonce)
        return records.decision_in(head, records.present(key, read(self.store, key)))

    def read_iteration(self, head: Head) -> View:
        """A head's iteration, for joiners and tools. It reads O(world size)."""
        key, decision_key = keys.roster(head.n, head.nonce), keys.decision(head.n, head.nonce)
        roster, text = self.store.execute([Read(key), Read(decision_key)])
        members = records.roster_from_json(records.present(key, roster), key)
        return View(records.decision_in(head, records.present(decision_key, text)), head.nonce, members)

    def read_current(self) -> View | None:
        """The current iteration; None before the first one."""
        head = self.read_head()
        while head is not None:
            try:
                return self.read_iteration(head)
            except StoreError:
                # Head moved on by two while the reader was paused, so the old keys are deleted.
                last, head = head, self.read_head()
                if head == last:
                    raise
        return None

    def active_target(self) -> int:
        """The most active ranks of any iteration so far; with fewer the job is degraded. 0: unknown yet."""
        return records.to_number(read(self.store, keys.ACTIVE_TARGET) or "0", keys.ACTIVE_TARGET)

    # Leaving an iteration ------------------------------------------------------------------------------

    def arrive(
        self, view: View, member: Member, rank: int, world_size: int, fault: str | None = None
    ) -> Proposed | None:
        """Logs that a member has left the function of an iteration. The last to arrive proposes the next.

        Args:
            view: the iteration.
            member: the member.
            rank: its rank in that iteration.
            world_size: size of the world that this rank belongs to.
            fault: signature of its fault, if `max_same_faults` counts it; None if there was progress.

        Returns:
            Its proposal, if it was the last to arrive.
        """
        arrival = f"{member} {ArrivalEntry(rank, world_size, fault or '')}"
        gone = operations.append_counted(self.store, keys.arrived(view.n), arrival, keys.count_gone(view.n))
        return self.advance(view, member) if gone >= len(view.members) else None

    def ask_to_join(self, n: int, member: Member, call: int, mark: str = "") -> None:
        """Asks to join the iteration after n, if that belongs to the call; see `records.joins_in`."""
        self.store.execute([Append(keys.join(n), f"{member} {call} {mark}".rstrip())])

    def joins_of(self, n: int) -> set[Member]:
        """The members that ask to join the iteration after n."""
        return set(records.joins_in(n, read_log(self.store, keys.join(n))))

    def arrivals_of(self, n: int) -> set[Member]:
        """The members that have arrived: they have left the function of n."""
        return set(records.arrivals_in(n, read_log(self.store, keys.arrived(n))))

    def count_deaths(self, view: View, deaths: int = 1) -> None:
        """Counts logged deaths; proposes the next iteration if no other member is missing."""
        counts = self.store.execute([Count(keys.count_gone(view.n))] * deaths)
        if int(counts[-1] or 0) >= len(view.members):
            self.advance(view, None)

    def advance(
        self,
        view: View,
        proposer: Member | None,
        *,
        silent: frozenset[Member] = frozenset(),
        drop_missing: bool = False,
        hold: bool = True,
    ) -> Proposed | None:
        """Proposes the next iteration, unless it has to wait for a member.

        Args:
            view: the iteration that has ended.
            proposer: an arrived member; None for a monitor that logged a death, and for a joiner.
            silent: members whose heartbeat the proposer has seen unchanged for ``heartbeat_timeout``.
            drop_missing: after a fault, go on without living members that have not arrived.
            hold: wait for announced replacements, if fewer ranks than `active_target` would be left.

        Returns:
            The proposal: this one or another one has then moved head on from ``view``. None if it has to
            wait; head may have moved on before.
        """
        found = self._read_evidence(view)
        if found is None or not may_propose(found, proposer):
            return None
        chosen = candidates(view, found, proposer, silent)
        if chosen.missing and not (drop_missing and found.outcome == FAULT):
            return None
        if not (chosen.kept or any(found.joining.values()) or chosen.all_came_back(view)):
            return None  # the first newcomer waits for the other ones
        judgement = history.Judgement(view.decision.blamed)
        if view.decision.max_faults and found.outcome == FAULT:
            faults, now = self.ends.faults_of(view.n), self.store.wall_clock()
            judgement = history.judge(
                view, faults, chosen.kept, chosen.newcomers, lambda one: record_of(self.store, one).host, now
            )
            chosen = chosen.without(judgement.out)
        if len(chosen.members) < max(1, view.decision.min_world_size):
            return None
        holds = hold and awaited_replacements(found, chosen, judgement)
        if holds and len(chosen.members) < self.active_target():
            return None
        spares, active = set[Member](), 0
        if chosen.newcomers and 0 < len(chosen.kept) < len(view.members):
            spares, active = spares_in(self.store, view.n)
        decision = next_decision(view, found, chosen, judgement, spares, active)
        return self.decide(view.head, decision, chosen.members)

    def await_next(
        self,
        view: View,
        member: Member,
        limits: AllLimits,
        proposed: Proposed | None = None,
        on_missing: OnMissing | None = None,
    ) -> View | None:
        """Waits, after `arrive`, for the decision of the next iteration; proposes it if no other member does.

        After an iteration that ended as done it waits as long as the missing members live: they are between
        two calls.

        Args:
            view: the iteration that has ended.
            member: the member that waits.
            limits: ``barrier_timeout``, after which living members that have not arrived are left behind (or,
                between two calls, logged again); ``heartbeat_timeout``; and ``rejoin_wait`` for announced
                replacements.
            proposed: the result of `arrive`.
            on_missing: called once, on one of the waiting members, if others have not arrived a second after
                a fault.

        Returns:
            The next iteration; None if this member is not in it.

        Raises:
            RestartTimeout: fewer than ``min_world_size`` members are left; names the missing ones.
        """
        if proposed is not None and proposed.won:
            return self._follow(view, member, proposed.head, proposed.decision)
        observer = HeartbeatObserver(self.heartbeats, limits.heartbeat_timeout)
        position, size = view.members.index(member), len(view.members)
        # Staggered, so that only one member proposes without the missing: each proposer reads the whole log.
        timeout = limits.barrier_timeout + stagger(position)
        first, wake = FIRST_LOOK + stagger(position), keys.wake_head(view.n + 1)
        while True:
            for look in looks(self.store, wake, timeout, first=first, also_after=limits.rejoin_wait):
                head, decision = self._read_ahead(look.value)
                if head != view.head:
                    return self._follow(view, member, head, decision)
                if member in self.ends.deaths_of(view.n):
                    return None
                between_calls = self.ends.outcome_of(view.n) == DONE
                number = min(look.number, LOOKS_BETWEEN_CALLS) if between_calls else look.number
                if not (look.is_last or is_checker(position, size, number)):
                    continue
                arrived, missing = self.arrived_and_missing(view)
                if missing and not between_calls and look.waited >= _SAY_MISSING_AFTER:
                    if on_missing is not None and member == _first_checker(view, arrived, number):
                        on_missing(missing, look.waited)
                    on_missing = None
                silent = observer.silent(missing)
                hold = look.waited < limits.rejoin_wait
                self.advance(view, member, silent=silent, drop_missing=look.is_last, hold=hold)
                head = self.read_head()
                if head != view.head:
                    return self._follow(view, member, head)
                if look.is_last:
                    # Members missing before `advance`: one that arrives during it makes its own proposal.
                    awaited = set(missing) - silent
                    if not (between_calls and awaited):
                        absent = sorted(one.slot for one in set(view.members) - arrived)
                        raise RestartTimeout(
                            f"iteration {view.n} was not followed by another one within "
                            f"{limits.barrier_timeout:g} s: fewer than min_world_size="
                            f"{view.decision.min_world_size} ranks are left; missing slots: {absent}"
                        )
                    self.log_awaited(view, awaited)
            if not is_checker(position, size):
                timeout *= 2  # each look reads the log; the checkers log it often enough

    def log_awaited(self, view: View, awaited: Iterable[Member]) -> None:
        """Logs which members the next wrapped call waits for.

        Args:
            view: the last iteration of the last call.
            awaited: living members that have not made the call.
        """
        slots = sorted(member.slot for member in awaited)
        alive = "their processes are alive but have not called the wrapped function again"
        self.store.warn(f"call {view.call + 1} waits for slots {slots}: {alive}")

    def arrived_and_missing(self, view: View) -> tuple[set[Member], list[Member]]:
        """The members not logged dead: those that have arrived, and those that have not."""
        arrived = self.arrivals_of(view.n)
        dead = self.ends.deaths_of(view.n)
        return arrived - dead, sorted(set(view.members) - arrived - dead)

    # Steps ---------------------------------------------------------------------------------------------

    def _read_evidence(self, view: View) -> Evidence | None:
        """What the store holds on an iteration; None while it runs."""
        n = view.n
        # Deaths last: a process that logs a death, and then reads that the member has neither arrived nor
        # asked to join, can be sure that no proposal includes it.
        end, *logs = self.store.execute(
            [Read(keys.end(n)), ReadLog(keys.arrived(n)), ReadLog(keys.join(n)), ReadLog(keys.dead(n))]
        )
        outcome = records.outcome_in(n, end)
        if outcome is None:
            return None
        arrivals, joins, deaths = ((log or "").splitlines() for log in logs)
        return Evidence(
            outcome,
            records.arrivals_in(n, arrivals),
            records.joins_in(n, joins, next_call(view, outcome)),
            records.deaths_in(n, deaths),
        )

    def decide(self, head: Head | None, decision: Decision, members: tuple[Member, ...]) -> Proposed:
        """Writes a decision, then tries to move head to it. Whichever proposal wins, head has then moved."""
        proposal = Head(decision.call, decision.n, next(self.store.nonces))
        written = {
            keys.decision(proposal.n, proposal.nonce): decision.to_json(),
            keys.roster(proposal.n, proposal.nonce): records.roster_to_json(members),
        }
        _, stands, _ = self.store.execute(
            [
                Write(written),
                CompareAndSet(keys.HEAD, "" if head is None else str(head), str(proposal)),
                # A loser also wakes the other members: the winner may have died before it could.
                Notify(keys.wake_head(proposal.n), str(proposal)),
            ]
        )
        self.store.emit("decide", iteration=decision.n)
        return Proposed(decision, proposal, stands == str(proposal))

    def _read_ahead(self, likely_head: str | None) -> tuple[Head | None, Decision | None]:
        """Reads head, and in the same request the decision behind it, if head is the likely one."""
        if not likely_head:
            return self.read_head(), None
        likely = Head.parse(likely_head, keys.HEAD)
        text, decision = self.store.execute([Read(keys.HEAD), Read(keys.decision(likely.n, likely.nonce))])
        head = None if text is None else Head.parse(text, keys.HEAD)
        return head, None if decision is None or head != likely else records.decision_in(head, decision)

    def _follow(
        self, view: View, member: Member, head: Head | None, decision: Decision | None = None
    ) -> View | None:
        """The iteration after ``view``; None if the member is not in it."""
        if head is None:
            raise StoreError(f"store key {keys.HEAD!r} is missing, though iteration {view.n} has begun")
        if head.n != view.n + 1:
            return None  # head has passed an iteration in which this member did not arrive
        try:
            decision = decision or self.read_decision(head)
        except StoreError:
            if self.read_head() != head:
                return None  # head has passed this member's iteration, without it
            raise
        after = view.after(decision, head.nonce)
        return after if member in after.members else None


def _first_checker(view: View, arrived: set[Member], look: int) -> Member | None:
    """The first of the waiting members that reads the log at this look."""
    size = len(view.members)
    checkers = (one for place, one in enumerate(view.members) if is_checker(place, size, look))
    return next(filter(arrived.__contains__, checkers), None)
