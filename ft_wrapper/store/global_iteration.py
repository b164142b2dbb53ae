"""Head and decisions: how the members go from one iteration to the next (DESIGN.md 5).

Safety comes from one thing, a compare_set on the head register. Who proposes, and when, is only about
progress and may be wrong at any time without harm:

- head moves from n to n+1 only from the exact value read, after n has ended, to a decision that is
  already written;
- a decision keeps the members of n that have left the function (arrived) and are not dead; at the barrier
  timeout those that never arrived are dropped;
- in the usual case the one whose arrival (or logging of a death) is the last proposes at once. If it died
  doing so, the waiting members come forward one after the other.

Nothing here starts a thread or a process, so all of it runs on a fake store with a turned clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from .. import events
from ..exception import InternalError, StoreError, TimeoutError
from . import keys
from .heartbeat import HeartbeatMixin, HeartbeatObserver
from .interruption import InterruptionMixin
from .records import (
    DONE,
    FAULT,
    Decision,
    Fault,
    Head,
    Member,
    Outcome,
    View,
    roster_from_json,
    roster_to_json,
)

_FIRST_LOOK = 0.5  # seconds until the first waiting member looks whether it must propose
_STAGGER = 0.05  # seconds between one member's look and the next one's
_LAST_STAGGER = 2.0
_LONGEST_LOOK = 8.0


class GlobalIterationMixin(HeartbeatMixin, InterruptionMixin):
    """The first formation, leaving an iteration, and going on to the next."""

    def register(self, slot: int, record: str) -> Member:
        """Takes the slot's next incarnation and writes the member's record.

        Args:
            slot: the initial rank.
            record: JSON for people: host, pid.
        """
        member = Member(slot, self.add(keys.incarnations(slot), 1) - 1)
        self.set(keys.member(str(member)), record)
        self.send_heartbeat(member)
        return member

    def read_head(self) -> Head | None:
        """Which iteration is on; None before the first decision."""
        text = self.try_get(keys.HEAD)
        return None if text is None else Head.parse(text, keys.HEAD)

    def read_decision(self, head: Head) -> Decision:
        """The decision behind a head."""
        key = keys.decision(head.n, head.nonce)
        return Decision.from_json(self._written(key), key)

    def read_view(self, head: Head) -> View:
        """Everything about a head's iteration: O(world size), for those who come from outside."""
        key = keys.roster(head.n, head.nonce)
        members = roster_from_json(self._written(key), key)
        decision = self.read_decision(head)
        return View(head.call, head.n, head.nonce, decision.first, members, decision.min_world_size)

    def outcome(self) -> Outcome:
        """How the job stands, seen from outside, by a launcher for instance."""
        head = self.read_head()
        if head is None:
            return Outcome(False, frozenset())
        members = set(self.read_view(head).members) - self.deaths_of(head.n)
        return Outcome(self.outcome_of(head.n) == DONE, frozenset(member.slot for member in members))

    # The first formation -------------------------------------------------------------------------------

    def join_first(self, member: Member, slots: Iterable[int], min_world_size: int = 1) -> None:
        """Joins the first iteration; the last of all slots to come decides it.

        Args:
            member: who joins.
            slots: the slots that the job begins with.
            min_world_size: the job goes on with no fewer members; the same on every rank.
        """
        n = keys.BEFORE_FIRST
        expected = frozenset(slots)
        self.log_append(keys.join(n), str(member))
        if self.add(keys.count_gone(n), 1) >= len(expected):
            self.form(expected, min_world_size)

    def joined_first(self) -> set[Member]:
        """The members that have joined the first iteration."""
        return self.joins_of(keys.BEFORE_FIRST)

    def form(self, slots: frozenset[int], min_world_size: int = 1) -> bool:
        """Decides the first iteration if every slot has joined; tells whether there is a head now."""
        if self.read_head() is not None:
            return True
        joined = self.joins_of(keys.BEFORE_FIRST)
        dead = self.deaths_of(keys.BEFORE_FIRST)  # read second, as in `advance`
        latest: dict[int, Member] = {}
        for member in sorted(joined - dead):
            latest[member.slot] = member
        if latest.keys() < slots:
            return False
        members = tuple(sorted(latest.values()))
        n = keys.BEFORE_FIRST + 1
        return self._decide(None, Decision(0, n, n, (), (), members, len(members), min_world_size), members)

    def await_first(
        self, member: Member, slots: Iterable[int], timeout: float, min_world_size: int = 1
    ) -> View | None:
        """Waits for the first decision.

        Args:
            member: who waits.
            slots: the slots that the job begins with.
            timeout: seconds to wait at the longest.
            min_world_size: as in `join_first`.

        Returns:
            The view of the first iteration; None if this member is not in it.

        Raises:
            TimeoutError: not all slots joined in time; names the missing ones.
        """
        expected = frozenset(slots)
        first = keys.BEFORE_FIRST + 1
        for remaining in self._looks(keys.wake_head(first), sorted(expected).index(member.slot), timeout):
            if self.form(expected, min_world_size):
                head = self.read_head()
                assert head is not None
                view = self.read_view(head)
                return view if member in view.members else None
            if remaining <= 0:
                break
        joined = {
            joiner.slot for joiner in self.joins_of(keys.BEFORE_FIRST) - self.deaths_of(keys.BEFORE_FIRST)
        }
        missing = sorted(expected - joined)
        raise TimeoutError(
            f"the job did not form within {timeout:g} s: ranks {missing} of {len(expected)} are missing; "
            "see whether their processes started and reach the store, or raise barrier_timeout"
        )

    # Leaving an iteration ------------------------------------------------------------------------------

    def arrive(self, view: View, member: Member, rank: int, world_size: int) -> None:
        """Says that a member has left the function of its iteration; the last one decides the next.

        Args:
            view: the iteration that it has left.
            member: who.
            rank: its rank, in a world of
            world_size: so many, before the next rank assignment.
        """
        self.log_append(keys.arrived(view.n), f"{member} {rank} {world_size}")
        if self.add(keys.count_gone(view.n), 1) >= len(view.members):
            self.advance(view, member)

    def log_death(self, n: int, member: Member, fault: Fault | None, *, ends: bool) -> None:
        """Logs, by evidence, that a member of n has ended.

        Args:
            n: the iteration.
            member: who has ended.
            fault: what is known of it, for people; None to keep quiet.
            ends: whether the iteration ends by it; not by a spare's death.
        """
        if fault is not None:
            self.log_fault(n, fault)
        # Ended first: observers of silence leave the logged dead alone, so whoever logged one and died
        # before ending n would have left everybody waiting.
        if ends:
            self.end_iteration(n, FAULT)
        self.log_append(keys.dead(n), str(member))

    def joins_of(self, n: int) -> set[Member]:
        """The members that want into the iteration after n."""
        key = keys.join(n)
        return {Member.parse(line, key) for line in self.log_read(key)}

    def arrivals_of(self, n: int) -> set[Member]:
        """The members that have left the function of n."""
        return set(self._arrivals(n))

    def count_death(self, view: View) -> None:
        """Counts a logged death; decides the next iteration if it was the last thing missing."""
        if self.add(keys.count_gone(view.n), 1) >= len(view.members):
            self.advance(view, None)

    def advance(
        self,
        view: View,
        proposer: Member | None,
        *,
        silent: frozenset[Member] = frozenset(),
        drop_missing: bool = False,
    ) -> bool:
        """Proposes the next iteration, if nothing stands in its way.

        Args:
            view: the iteration that has ended.
            proposer: an arrived member; None for a monitor that logged a death.
            silent: members that the proposer itself has seen stand still for ``heartbeat_timeout``.
            drop_missing: go on without members that live but have not arrived.

        Returns:
            Whether head has left ``view`` behind, by this proposal or by another one. Where head had done so
            before, False is possible, too.
        """
        outcome = self.outcome_of(view.n)
        if outcome is None:
            return False
        # In this order: whoever logs a death first and then finds the member not arrived may be sure that no
        # proposal will keep it.
        arrived = self._arrivals(view.n)
        dead = self.deaths_of(view.n)
        if proposer is not None and (proposer in dead or proposer not in arrived):
            return False
        kept = tuple(
            member
            for member in view.members
            if member in arrived and member not in dead and (member not in silent or member == proposer)
        )
        missing = set(view.members) - arrived.keys() - dead - silent
        if (missing and not drop_missing) or len(kept) < max(1, view.min_world_size):
            return False
        return self._decide(view.head, self._next_decision(view, outcome, kept, arrived), kept)

    def await_next(
        self,
        view: View,
        member: Member,
        *,
        timeout: float,
        heartbeat_timeout: float,
    ) -> tuple[Decision, View] | None:
        """Waits, once arrived, for the decision of the next iteration; proposes it if nobody else does.

        Args:
            view: the iteration that has ended.
            member: who waits.
            timeout: seconds until those that live but have not arrived are left behind.
            heartbeat_timeout: seconds without a heartbeat until a missing member counts as silent.

        Returns:
            The decision and the view after it; None if this member is not in it.

        Raises:
            TimeoutError: fewer than the job's ``min_world_size`` members were left; names the missing ones.
        """
        observer = HeartbeatObserver(self, heartbeat_timeout)
        position = view.members.index(member)
        for remaining in self._looks(keys.wake_head(view.n + 1), position, timeout):
            head = self.read_head()
            if head != view.head:
                return self._follow(view, member, head)
            if member in self.deaths_of(view.n):
                return None
            missing = set(view.members) - self._arrivals(view.n).keys() - self.deaths_of(view.n)
            self.advance(
                view,
                member,
                silent=observer.silent(sorted(missing)),
                drop_missing=remaining <= 0,
            )
            head = self.read_head()
            if head != view.head:
                return self._follow(view, member, head)
            if remaining <= 0:
                break
        absent = sorted(set(view.members) - (self._arrivals(view.n).keys() - self.deaths_of(view.n)))
        raise TimeoutError(
            f"iteration {view.n} was not followed by another one within {timeout:g} s: fewer than "
            f"min_world_size={view.min_world_size} ranks are left; missing slots: {[m.slot for m in absent]}"
        )

    # Agreement of the rank assignments -----------------------------------------------------------------

    def check_assignment(
        self, n: int, member: Member, active_rank: int | None, world_size: int, active_world_size: int
    ) -> None:
        """Checks, before a rank enters n, that its rank assignment fits the others'.

        Args:
            n: the iteration.
            member: who is about to enter.
            active_rank: the active rank that it was given; None for a spare.
            world_size: the world size that it was given.
            active_world_size: the active world size that it was given.

        Raises:
            InternalError: another rank was given other sizes, or the same active rank.
        """
        mine = f"{world_size} {active_world_size}"
        agreed = self.claim(keys.world(n), mine)
        if agreed != mine:
            raise InternalError(
                f"rank_assignment disagrees in iteration {n}: slot {member.slot} was given world size and "
                f"active world size {mine}, another rank {agreed}; it must give the same sizes on every rank"
            )
        if active_rank is None:
            return
        holder = self.claim(keys.seat(n, active_rank), str(member))
        if holder != str(member):
            raise InternalError(
                f"rank_assignment gave active rank {active_rank} of iteration {n} to slot {member.slot} and "
                f"to slot {holder.partition(':')[0]}; it must give each active rank once"
            )

    # Where torch.distributed meets in an iteration -----------------------------------------------------

    def publish_endpoint(self, n: int, host: str, port: int) -> None:
        """Says where the store is that ``torch.distributed`` uses in n."""
        self.set(keys.endpoint(n), f"{host} {port}")
        self.set(keys.wake_endpoint(n), "1")

    def await_endpoint(self, n: int, timeout: float, look_every: float) -> tuple[str, int] | None:
        """Waits for `publish_endpoint`; None if n ended before it came.

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
            if self.wait_for(keys.wake_endpoint(n), min(look_every, remaining)):
                host, port = self._written(keys.endpoint(n)).split()
                return host, int(port)
            if self.outcome_of(n) is not None:
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

    def _looks(self, wake: str, position: int, timeout: float) -> Iterable[float]:
        """Yields the seconds that remain, once the wake key is set or at growing intervals without it."""
        deadline = self.now() + timeout
        pause = _FIRST_LOOK + min(position * _STAGGER, _LAST_STAGGER)
        while True:
            self.wait_for(wake, min(pause, deadline - self.now()))
            yield deadline - self.now()
            pause = min(2 * pause, _LONGEST_LOOK)

    def _arrivals(self, n: int) -> dict[Member, tuple[int, int]]:
        """Members that have left the function of n, each with its rank and the size of that world."""
        key = keys.arrived(n)
        arrivals = {}
        for line in self.log_read(key):
            name, rank, world_size = line.split()
            arrivals[Member.parse(name, key)] = (int(rank), int(world_size))
        return arrivals

    def _next_decision(
        self, view: View, outcome: str, kept: tuple[Member, ...], arrived: dict[Member, tuple[int, int]]
    ) -> Decision:
        ranks = {arrived[member][0] for member in kept}
        sizes = {arrived[member][1] for member in kept}
        if len(sizes) > 1 or len(ranks) < len(kept):
            raise InternalError(
                f"the ranks of iteration {view.n} do not fit together: "
                + ", ".join(f"slot {m.slot} is rank {arrived[m][0]} of {arrived[m][1]}" for m in kept)
            )
        world_size = sizes.pop()
        n = view.n + 1
        return Decision(
            call=view.call + (outcome == DONE),
            n=n,
            first=n if outcome == DONE else view.first,
            removed=tuple(sorted(set(view.members) - set(kept))),
            # A rank that nobody kept has is one that is gone, whoever had it.
            ranks=tuple(sorted(set(range(world_size)) - ranks)),
            joined=(),
            world_size=world_size,
            min_world_size=view.min_world_size,
        )

    def _decide(self, head: Head | None, decision: Decision, members: tuple[Member, ...]) -> bool:
        """Writes a decision, then tries to move head to it. True: head has moved, whoever moved it."""
        proposal = Head(decision.call, decision.n, self.new_nonce())
        self.multi_set(
            [keys.decision(proposal.n, proposal.nonce), keys.roster(proposal.n, proposal.nonce)],
            [decision.to_json(), roster_to_json(members)],
        )
        self.compare_set(keys.HEAD, "" if head is None else str(head), str(proposal))
        events.emit("decide", iteration=decision.n)
        # Whoever won, head has moved. Also a lost proposer wakes: the winner may have died before it could.
        self.set(keys.wake_head(proposal.n), "1")
        return True

    def _follow(self, view: View, member: Member, head: Head | None) -> tuple[Decision, View] | None:
        if head is None or head.n != view.n + 1:
            return None  # head has passed an iteration in which this member did not arrive: it is out
        decision = self.read_decision(head)
        after = view.after(decision, head.nonce)
        return (decision, after) if member in after.members else None

    def _written(self, key: str) -> str:
        """Reads a key that has been written before this one is told of it."""
        text = self.try_get(key)
        if text is None:
            raise StoreError(f"store key {key!r} is gone, though what leads to it is there")
        return text
