"""Head and decisions: how the members go from one iteration to the next (DESIGN.md 5).

Safety comes from one thing, a compare_set on the head register. Who proposes, and when, is only about
progress and may be wrong at any time without harm:

- head moves from n to n+1 only from the exact value read, after n has ended, to a decision that is
  already written;
- a decision keeps the members of n that have left the function (arrived) and are not dead; at the barrier
  timeout those that never arrived are dropped, unless n ended well: between two calls a member that lives may
  take its time; it adds who wants in, of each slot the last incarnation;
- in the usual case the one whose arrival (or logging of a death) is the last proposes at once. If it died
  doing so, the waiting members come forward one after the other.

How a process gets in, at the start or later, is in `joining`. Nothing here starts a thread or a process, so
all of it runs on a fake store with a turned clock.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from .. import events
from ..exception import InternalError, StoreError, TimeoutError
from . import keys
from .heartbeat import HeartbeatMixin, HeartbeatObserver
from .housekeeping import HousekeepingMixin
from .interruption import InterruptionMixin, announced_deaths_in, outcome_in
from .records import (
    DONE,
    FAULT,
    Decision,
    Entered,
    Head,
    Member,
    Outcome,
    SameFault,
    View,
    roster_from_json,
    roster_to_json,
    split_entry,
    to_number,
)
from .steps import Append, Claim, Count, Move, Read, ReadLog, Step, Wake, Write
from .widening import widen

log = logging.getLogger(__name__)

_FIRST_LOOK = 0.5  # seconds until the first waiting member looks whether it must propose
_STAGGER = 0.05  # seconds between one member's look and the next one's
_LAST_STAGGER = 2.0
_LONGEST_LOOK = 8.0
_SAY_MISSING_AFTER = 1.0  # seconds
_LOOKOUTS = 16  # members that look who is missing
_LOOKS_OF_FEW = 4  # looks after which more of them do
_SAME_FAULTS = 4  # faults that a decision counts: who is next to fail elsewhere each time, fails differently
_LOOKS_BETWEEN_CALLS = _LOOKS_OF_FEW + 3  # a wait between two calls may be long: no more of them than by then


@dataclasses.dataclass(frozen=True)
class Proposed:
    """A proposal that was made: head has moved by now, to this one or to another one.

    Args:
        decision: what was proposed.
        head: where head would be by it.
        won: whether it is there, as far as is known.
    """

    decision: Decision
    head: Head
    won: bool


class GlobalIterationMixin(HeartbeatMixin, InterruptionMixin, HousekeepingMixin):
    """Leaving an iteration, and going on to the next."""

    def read_head(self) -> Head | None:
        """Which iteration is on; None before the first decision."""
        text = self.try_get(keys.HEAD)
        return None if text is None else Head.parse(text, keys.HEAD)

    def read_decision(self, head: Head) -> Decision:
        """The decision behind a head."""
        key = keys.decision(head.n, head.nonce)
        return _decision_in(head, _present(key, self.try_get(key)))

    def read_view(self, head: Head) -> View:
        """Everything about a head's iteration: O(world size), for those who come from outside."""
        return self._read_iteration(head)[0]

    def _read_iteration(self, head: Head) -> tuple[View, Decision]:
        key, decision_key = keys.roster(head.n, head.nonce), keys.decision(head.n, head.nonce)
        roster, text = self.carry_out([Read(key), Read(decision_key)])
        members = roster_from_json(_present(key, roster), key)
        decision = _decision_in(head, _present(decision_key, text))
        return View.of(decision, head.nonce, members), decision

    def read_current(self) -> tuple[View, Decision] | None:
        """The iteration that is on, and the decision that led to it; None before the first one."""
        head = self.read_head()
        while head is not None:
            try:
                return self._read_iteration(head)
            except StoreError:
                # The reader was paused while head moved on by two, so that what it led to was deleted.
                last, head = head, self.read_head()
                if head == last:
                    raise
        return None

    def lists(self, member: Member) -> bool:
        """Whether a member is in the iteration that is on."""
        current = self.read_current()
        return current is not None and member in current[0].members

    def outcome(self) -> Outcome:
        """How the job stands, seen from outside, by a launcher for instance."""
        current = self.read_current()
        if current is None:
            return Outcome(False, frozenset())
        view, _ = current
        members = set(view.members) - self.deaths_of(view.n)
        return Outcome(self.outcome_of(view.n) == DONE, frozenset(member.slot for member in members))

    # Leaving an iteration ------------------------------------------------------------------------------

    def arrive(
        self, view: View, member: Member, rank: int, world_size: int, fault: str | None = None
    ) -> Proposed | None:
        """Says that a member has left the function of its iteration; the last one decides the next.

        Args:
            view: the iteration that it has left.
            member: who.
            rank: its rank, in a world of
            world_size: so many, before the next rank assignment.
            fault: kind and place of its fault, to be counted if it comes again; None if there was none, or
                there was progress before it.

        Returns:
            What it decided, if it was the last one.
        """
        arrival = f"{member} {rank} {world_size}" + (f" {fault}" if fault else "")
        gone = self.log_append_counted(keys.arrived(view.n), arrival, keys.count_gone(view.n))
        return self.advance(view, member) if gone >= len(view.members) else None

    def ask_to_join(self, n: int, member: Member, call: int) -> None:
        """Asks that a member be let into the iteration after n, if that belongs to the call."""
        self.log_append(keys.join(n), f"{member} {call}")

    def joins_of(self, n: int, call: int | None = None) -> set[Member]:
        """The members that want into the iteration after n.

        Args:
            n: the iteration.
            call: only those that come for this call; all when None.
        """
        return _joins_in(n, self.log_read(keys.join(n)), call)

    def arrivals_of(self, n: int) -> set[Member]:
        """The members that have left the function of n."""
        return set(_arrivals_in(n, self.log_read(keys.arrived(n))))

    def count_death(self, view: View) -> None:
        """Counts a logged death; decides the next iteration if it was the last thing missing."""
        if self.count(keys.count_gone(view.n)) >= len(view.members):
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
        """Proposes the next iteration, if nothing stands in its way.

        Args:
            view: the iteration that has ended.
            proposer: an arrived member; None for a monitor that logged a death, and for one that wants in.
            silent: members that the proposer itself has seen stand still for ``heartbeat_timeout``.
            drop_missing: after a fault, go on without members that live but have not arrived.
            hold: wait for replacements that were announced, if fewer ranks than wanted would be left.

        Returns:
            The proposal: then head has left ``view`` behind, by this one or by another one. None if there was
            nothing to propose; head may have left it behind before.
        """
        n = view.n
        # Deaths last: one that logs a death first and then finds that the member has neither arrived nor
        # asked to join may be sure that no proposal will have it.
        end, *logs = self.carry_out(
            [Read(keys.end(n)), ReadLog(keys.arrived(n)), ReadLog(keys.join(n)), ReadLog(keys.dead(n))]
        )
        outcome = outcome_in(n, end)
        if outcome is None:
            return None
        arrivals, joins, deaths = ((log or "").splitlines() for log in logs)
        arrived = _arrivals_in(n, arrivals)
        joining = _joins_in(n, joins, _call_after(view, outcome))
        dead = announced_deaths_in(n, deaths)
        if proposer is not None and (proposer in dead or proposer not in arrived):
            return None
        latest = {member.slot: member for member in sorted(joining)}
        kept = tuple(
            member
            for member in view.members
            if member in arrived
            and member not in dead
            and (member not in silent or member == proposer)
            and latest.get(member.slot, member) <= member
        )
        holders = {member.slot for member in kept}
        newcomers = tuple(
            member for slot, member in sorted(latest.items()) if slot not in holders and member not in dead
        )
        missing = set(view.members) - arrived.keys() - dead.keys() - silent
        left = len(kept) + len(newcomers)
        if missing and not (drop_missing and outcome == FAULT):
            return None
        if left < max(1, view.min_world_size):
            return None
        announced = {member.slot for member, returns in dead.items() if returns}
        if hold and announced - {member.slot for member in newcomers} and left < self.wanted():
            return None
        decision = self._next_decision(view, outcome, kept, newcomers, arrived)
        if not decision.removed:  # else the loss of a rank may be why the others failed
            same = _same_faults(view.same_faults, _faults_in(n, arrivals))
            decision = dataclasses.replace(decision, same_faults=same)
        return self._decide(view.head, decision, tuple(sorted(kept + newcomers)))

    def await_next(
        self,
        view: View,
        member: Member,
        *,
        timeout: float,
        heartbeat_timeout: float,
        rejoin_wait: float = 0.0,
        proposed: Proposed | None = None,
        on_missing: Callable[[Sequence[Member], float], None] | None = None,
    ) -> tuple[View, Decision] | None:
        """Waits, once arrived, for the decision of the next iteration; proposes it if no one else does.

        After an iteration that ended well it waits for as long as a missing member lives and is heard: that
        one is between two calls.

        Args:
            view: the iteration that has ended.
            member: who waits.
            timeout: seconds until those that live but have not arrived are left behind; between two calls,
                until the log says again for whom it waits.
            heartbeat_timeout: seconds without a heartbeat until a missing member counts as silent.
            rejoin_wait: seconds to wait for replacements that were announced.
            proposed: what `arrive` gave.
            on_missing: called once, by one of those who wait, if others have not left an iteration that ended
                by a fault a second ago: with these, and the seconds waited.

        Returns:
            The view of that iteration and the decision; None if this member is not in it.

        Raises:
            TimeoutError: fewer than the job's ``min_world_size`` members were left; names the missing ones.
        """
        if proposed is not None and proposed.won:
            return _step_to(view, member, proposed.head, proposed.decision)
        observer = HeartbeatObserver(self, heartbeat_timeout)
        position, size = view.members.index(member), len(view.members)
        # The first to give up on the missing goes on without them: all at once would have a lot to read.
        limit = timeout + min(position * _STAGGER, _LAST_STAGGER)
        while True:
            looks = self._looks(keys.wake_head(view.n + 1), position, limit, rejoin_wait)
            silent: frozenset[Member] = frozenset()
            absent: list[Member] = []
            between_calls = False
            for look, (remaining, said) in enumerate(looks):
                head, decision = self._read_ahead(said)
                if head != view.head:
                    return self._follow(view, member, head, decision)
                if member in self.deaths_of(view.n):
                    return None
                between_calls = self.outcome_of(view.n) == DONE
                look = min(look, _LOOKS_BETWEEN_CALLS) if between_calls else look
                if remaining > 0 and not keeps_lookout(position, size, look):
                    continue
                arrived, missing = self._arrived_and_missing(view)
                waited = limit - remaining
                if on_missing is not None and missing and not between_calls and waited >= _SAY_MISSING_AFTER:
                    lookouts = (
                        each
                        for place, each in enumerate(view.members)
                        if each in arrived and keeps_lookout(place, size, look)
                    )
                    if member == next(lookouts, None):
                        on_missing(missing, waited)
                    on_missing = None
                silent = observer.silent(missing)
                if remaining <= 0:
                    # Before the proposal: one who arrives during that may not be seen by it, and decide.
                    absent = sorted(set(view.members) - (self.arrivals_of(view.n) - self.deaths_of(view.n)))
                self.advance(
                    view,
                    member,
                    silent=silent,
                    drop_missing=remaining <= 0,
                    hold=limit - remaining < rejoin_wait,
                )
                head = self.read_head()
                if head != view.head:
                    return self._follow(view, member, head)
                if remaining <= 0:
                    break
            awaited = set(absent) - self.deaths_of(view.n) - silent
            if not (between_calls and awaited):
                raise TimeoutError(
                    f"iteration {view.n} was not followed by another one within {timeout:g} s: fewer than "
                    f"min_world_size={view.min_world_size} ranks are left; "
                    f"missing slots: {[m.slot for m in absent]}"
                )
            self.log_awaited(view, awaited)
            if not keeps_lookout(position, size, 0):
                limit *= 2  # for what each of them reads; the lookouts say it often enough

    def log_awaited(self, view: View, awaited: Iterable[Member]) -> None:
        """Logs for whom the next wrapped call waits.

        Args:
            view: the last call's last iteration.
            awaited: members that live, and have not made the call.
        """
        slots = sorted(member.slot for member in awaited)
        log.warning(
            "call %d waits for slots %s: their processes live and have not called the wrapped function again",
            view.call + 1,
            slots,
        )

    def silent_missing(self, view: View, observer: HeartbeatObserver) -> frozenset[Member]:
        """The members that have not left an ended iteration and are silent in the observer's eyes."""
        return observer.silent(self._arrived_and_missing(view)[1])

    def _arrived_and_missing(self, view: View) -> tuple[set[Member], list[Member]]:
        """Of the members that live, as far as is known: who has left an ended iteration, and who has not."""
        arrived = set(self.arrivals_of(view.n))
        dead = self.deaths_of(view.n)
        return arrived - dead, sorted(set(view.members) - arrived - dead)

    # Agreement of the rank assignments -----------------------------------------------------------------

    def check_assignment(
        self,
        n: int,
        member: Member,
        active_rank: int | None,
        world_size: int,
        active_world_size: int,
        *,
        promoted: bool = False,
        recompiles: bool = False,
        endpoint: tuple[str, int] | None = None,
    ) -> int:
        """Checks, before a rank enters n, that its rank assignment fits the others'.

        Args:
            n: the iteration.
            member: who is about to enter.
            active_rank: the active rank that it was given; None for a spare.
            world_size: the world size that it was given.
            active_world_size: the active world size that it was given.
            promoted: whether it was a spare before; noted for people.
            recompiles: whether its compiled code was dropped, since ranks have moved; noted for people.
            endpoint: from active rank 0: host and port of the store that ``torch.distributed`` uses in n.

        Returns:
            How many active ranks have come as far as this, with this one: a hint. 0 for a spare.

        Raises:
            InternalError: another rank was given other sizes, or the same active rank.
        """
        mine = f"{world_size} {active_world_size}"
        before: list[Step] = [Write({keys.endpoint(n): f"{endpoint[0]} {endpoint[1]}"})] if endpoint else []
        steps: list[Step] = [Claim(keys.world(n), mine)]
        entry = Entered(member, active_rank, promoted, recompiles)
        if active_rank is None:
            steps.append(Append(keys.entered(n), entry.to_text()))
        else:
            steps.append(Claim(keys.seat(n, active_rank), str(member)))
            steps.append(Append(keys.entered(n), entry.to_text()))
            steps.append(Count(keys.count_entered(n)))
        agreed, *given = self.carry_out([*before, *steps])[len(before) :]
        if agreed != mine:
            raise InternalError(
                f"rank_assignment disagrees in iteration {n}: slot {member.slot} was given world size and "
                f"active world size {mine}, another rank {agreed}; it must give the same sizes on every rank"
            )
        if active_rank is None:
            return 0
        holder, *_, count = given
        if holder != str(member):
            raise InternalError(
                f"rank_assignment gave active rank {active_rank} of iteration {n} to slot {member.slot} and "
                f"to slot {str(holder).partition(':')[0]}; it must give each active rank once"
            )
        return int(count or 0)

    # Where torch.distributed meets in an iteration -----------------------------------------------------

    def await_endpoint(self, n: int, timeout: float, look_every: float) -> tuple[str, int] | None:
        """Waits for the endpoint that rank 0 tells; None if a fault ended n before it came.

        Where n is done already, this member is a spare that was slow to look: its rank 0 has been here.

        Args:
            n: the iteration.
            timeout: seconds to wait at the longest.
            look_every: seconds between looks whether n has ended, should its rank 0 have died.

        Raises:
            TimeoutError: neither came.
        """
        deadline = self.now() + timeout
        while True:
            remaining = deadline - self.now()
            key = keys.endpoint(n)
            said = self.hear(key, min(look_every, remaining))
            if said is not None:
                host, port = split_entry(said or _present(key, self.try_get(key)), 2, key)
                return host, to_number(port, key)
            if self.outcome_of(n) == FAULT:
                return None
            if remaining <= 0:
                raise TimeoutError(f"rank 0 of iteration {n} opened no store for it within {timeout:g} s")

    # The end of a job ----------------------------------------------------------------------------------

    def say_goodbye(self, member: Member) -> None:
        """A member's last word: it needs the store no more."""
        self.log_append(keys.GOODBYES, str(member))
        self.set(keys.wake_goodbye(str(member)), "1")

    def await_goodbye(self, member: Member, seconds: float) -> bool:
        """Waits for a member's last word; tells whether it came."""
        return self.wait_for(keys.wake_goodbye(str(member)), seconds)

    def goodbyes(self) -> set[Member]:
        """The members that need the store no more."""
        return {Member.parse(line, keys.GOODBYES) for line in self.log_read(keys.GOODBYES)}

    # Steps ---------------------------------------------------------------------------------------------

    def _looks(
        self, wake: str, position: int, timeout: float, also_after: float = 0.0
    ) -> Iterable[tuple[float, str]]:
        """Looks once the wake key is set, or at growing intervals without it.

        Yields:
            The seconds that remain, and what the wake key says, if that is known.
        """
        start = self.now()
        pause = _FIRST_LOOK + min(position * _STAGGER, _LAST_STAGGER)
        while True:
            waited = self.now() - start
            until = [pause, timeout - waited]
            if waited < also_after:
                until.append(also_after - waited)
            said = self.hear(wake, min(until))
            yield timeout - (self.now() - start), said or ""
            pause = min(2 * pause, _LONGEST_LOOK)

    def _next_decision(
        self,
        view: View,
        outcome: str,
        kept: tuple[Member, ...],
        newcomers: tuple[Member, ...],
        arrived: dict[Member, tuple[int, int]],
    ) -> Decision:
        sizes = {arrived[member][1] for member in kept}
        removed = tuple(sorted(set(view.members) - set(kept)))
        if len(sizes) > 1:
            # The iteration ended when the rank assignment was through on some ranks, and not on others. No
            # world is left whose ranks they all have: a new one, in which all get theirs by slot.
            newcomers, kept = tuple(sorted(kept + newcomers)), ()
        if len({arrived[member][0] for member in kept}) < len(kept):
            raise InternalError(
                f"the ranks of iteration {view.n} do not fit together: "
                + ", ".join(f"slot {m.slot} is rank {arrived[m][0]} of {arrived[m][1]}" for m in kept)
            )
        size = sizes.pop() if kept else 0  # or no one is left of that world: a new one of newcomers alone
        ranks = {member: rank for member, (rank, of) in arrived.items() if of == size}
        world = widen(size, ranks, kept, removed, newcomers)
        n = view.n + 1
        return Decision(
            call=_call_after(view, outcome),
            n=n,
            first=n if outcome == DONE else view.first,
            removed=removed,
            ranks=world.gaps,
            joined=newcomers,
            joined_ranks=world.joined_ranks,
            inserted=world.inserted,
            world_size=world.size,
            min_world_size=view.min_world_size,
        )

    def _decide(self, head: Head | None, decision: Decision, members: tuple[Member, ...]) -> Proposed:
        """Writes a decision, then tries to move head to it. No matter who wins, head has moved after that."""
        proposal = Head(decision.call, decision.n, self.new_nonce())
        written = {
            keys.decision(proposal.n, proposal.nonce): decision.to_json(),
            keys.roster(proposal.n, proposal.nonce): roster_to_json(members),
        }
        _, stands, _ = self.carry_out(
            [
                Write(written),
                Move(keys.HEAD, "" if head is None else str(head), str(proposal)),
                # Also a lost proposer wakes: the winner may have died before it could.
                Wake(keys.wake_head(proposal.n), str(proposal)),
            ]
        )
        events.emit("decide", iteration=decision.n)
        return Proposed(decision, proposal, stands == str(proposal))

    def _read_ahead(self, said: str) -> tuple[Head | None, Decision | None]:
        """Reads head; and the decision behind it, if it is where somebody said that it was likely to be."""
        if not said:
            return self.read_head(), None
        likely = Head.parse(said, keys.HEAD)
        text, decision = self.carry_out([Read(keys.HEAD), Read(keys.decision(likely.n, likely.nonce))])
        head = None if text is None else Head.parse(text, keys.HEAD)
        return head, None if decision is None or head != likely else _decision_in(head, decision)

    def _follow(
        self, view: View, member: Member, head: Head | None, decision: Decision | None = None
    ) -> tuple[View, Decision] | None:
        if head is None or head.n != view.n + 1:
            return None  # head has passed an iteration in which this member did not arrive: it is out
        try:
            decision = decision or self.read_decision(head)
        except StoreError:
            if self.read_head() != head:
                return None  # head has passed this member's iteration meanwhile, without it
            raise
        return _step_to(view, member, head, decision)


def _present(key: str, text: str | None) -> str:
    """What a key holds that has been written before this one is told of it."""
    if text is None:
        raise StoreError(f"store key {key!r} is gone, though what leads to it is there")
    return text


def _decision_in(head: Head, text: str) -> Decision:
    key = keys.decision(head.n, head.nonce)
    decision = Decision.from_json(text, key)
    if (decision.call, decision.n) != (head.call, head.n):
        raise StoreError(
            f"store key {key!r} holds a decision on iteration {decision.n} of call {decision.call}, "
            f"where one on iteration {head.n} of call {head.call} belongs"
        )
    return decision


def _arrivals_in(n: int, log: Iterable[str]) -> dict[Member, tuple[int, int]]:
    """Members that have left the function of n, each with its rank and the size of that world."""
    key = keys.arrived(n)
    arrivals = {}
    for line in log:
        name, rank, world_size, *_ = split_entry(line, 3, key, rest=True)
        arrivals[Member.parse(name, key)] = (to_number(rank, key), to_number(world_size, key))
    return arrivals


def _faults_in(n: int, log: Iterable[str]) -> dict[str, Member]:
    """The faults with which members have left n, each with the first one that had it."""
    key = keys.arrived(n)
    faults: dict[str, Member] = {}
    for line in log:
        name, _, _, *fault = split_entry(line, 3, key, rest=True)
        if fault:
            faults.setdefault(fault[0], Member.parse(name, key))
    return faults


def _same_faults(before: Iterable[SameFault], faults: Mapping[str, Member]) -> tuple[SameFault, ...]:
    """Counts the faults of an iteration on; those that it did not have are forgotten."""
    counts = {fault.what: fault.count for fault in before}
    same = [SameFault(what, counts.get(what, 0) + 1, member) for what, member in faults.items()]
    return tuple(sorted(same, key=lambda fault: -fault.count)[:_SAME_FAULTS])


def _joins_in(n: int, log: Iterable[str], call: int | None) -> set[Member]:
    key = keys.join(n)
    joins = set()
    for line in log:
        name, comes_for = split_entry(line, 2, key)
        if call is None or to_number(comes_for, key) == call:
            joins.add(Member.parse(name, key))
    return joins


def _step_to(view: View, member: Member, head: Head, decision: Decision) -> tuple[View, Decision] | None:
    """The iteration after one; None if a member is not in it."""
    after = view.after(decision, head.nonce)
    return (after, decision) if member in after.members else None


def keeps_lookout(position: int, size: int, look: int = 0) -> bool:
    """Whether a waiting member reads who is missing, which costs O(size), at one of its looks.

    A few do for all, spread over the world, so that a straggler does not cost O(size²). Should none of them
    be left to do so, they become twice as many with every look.
    """
    stride = max(1, size // _LOOKOUTS) >> max(0, look - _LOOKS_OF_FEW)
    return position % max(1, stride) == 0


def _call_after(view: View, outcome: str) -> int:
    """The call that the iteration after an ended one belongs to."""
    return view.call + (outcome == DONE)
