"""How a process gets into the job: into its first iteration, or later into a running one (DESIGN.md 5.3).

A joining process never relies on a single read. It reads head again and again, from the top, until head lists
it or it knows that head never will. So no process joins too early or too late.
"""

import dataclasses
import enum
import json
import math
from collections.abc import Iterable

from .. import events
from ..attribution import Interruption
from ..exception import StoreError, TimeoutError
from ..settings import Limits, OnJoin
from . import keys
from .entering import Entering
from .entries import to_number
from .evidence import HeartbeatObserver
from .global_iteration import GlobalIteration, keeps_lookout
from .operations import Count, Operations, claim, looks_for, read, write_text
from .records import DONE, FAULT, Decision, Member, MemberRecord, View, roster_from_json

_FIRST_LOOK = 0.5  # seconds until a process that wants in looks at head again, should no wake reach it
_LONGEST_LOOK = 8.0
_LONGEST_WINDOW = 6  # doublings of the window
_UNKNOWN = MemberRecord()
_DEFAULTS = Limits()


class Entry(enum.Enum):
    """How an attempt to join ended.

    Attributes:
        IN: head lists the member.
        DONE: the call that it came for has completed.
        TAKEN_OVER: a newer process holds the slot.
        PASSED: head went on so far that the member may have been in and left out again: it needs a new
            incarnation.
    """

    IN = enum.auto()
    DONE = enum.auto()
    TAKEN_OVER = enum.auto()
    PASSED = enum.auto()


class Joining:
    """Taking a slot, the first formation, and joining later.

    Args:
        store: where.
        iterations: how the members go on.
        entering: who has entered an iteration.
    """

    def __init__(self, store: Operations, iterations: GlobalIteration, entering: Entering) -> None:
        self.store = store
        self.iterations = iterations
        self.entering = entering
        self.ends = iterations.ends
        self.heartbeats = iterations.heartbeats

    def agree_on_version(self) -> None:
        """Makes sure that the store's job names its keys as this version of the package does.

        Raises:
            StoreError: it does not; nothing else of this version has been written then.
        """
        version = claim(self.store, keys.VERSION, keys.THIS_VERSION)
        if version != keys.THIS_VERSION:
            raise StoreError(
                f"the store's job uses version {version} of the keys, this process version "
                f"{keys.THIS_VERSION}; start all processes of a job with the same version of ft_wrapper"
            )

    def register(self, slot: int, record: MemberRecord = _UNKNOWN) -> Member:
        """Takes the slot's next incarnation and writes the member's record.

        Args:
            slot: the initial rank.
            record: what to write: its host and pid; and the name of its heart, if others share that.

        Raises:
            StoreError: the store's job was started by another version of this package.
        """
        self.agree_on_version()
        member = Member(slot, self.store.add(keys.incarnations(slot), 1) - 1)
        self.write_record(member, record)
        if record.heart is None:  # else that one beats already
            self.heartbeats.beat_heart(str(member))
        return member

    def write_record(self, member: Member, record: MemberRecord) -> None:
        """Says what is known of a member's process."""
        write_text(self.store, keys.member(str(member)), record.to_json())

    def newest_of(self, slot: int) -> Member:
        """The last member that took the slot."""
        return Member(slot, self.store.add(keys.incarnations(slot), 0) - 1)

    def record_of(self, member: Member) -> MemberRecord:
        """What is known of a member's process; nothing if its record is gone.

        Raises:
            StoreError: it cannot be read; names the key.
        """
        key = keys.member(str(member))
        text = read(self.store, key)
        return _UNKNOWN if text is None else MemberRecord.from_json(text, key)

    def agree_on_terms(self, call: int, terms: dict[str, object]) -> dict[str, tuple[object, object]]:
        """Says under what terms this process takes part in a call; the first one to say so decides them.

        Args:
            call: number of the wrapped call.
            terms: the function and the settings that must be the same on all ranks.

        Returns:
            What differs: by name, what this process has and what the job has. Empty if it may take part.

        Raises:
            StoreError: the job's terms cannot be read; names the key.
        """
        key = keys.terms(call)
        text = claim(self.store, key, json.dumps(terms, sort_keys=True))
        try:
            agreed = dict(json.loads(text))
        except (ValueError, TypeError) as error:
            raise StoreError(f"store key {key!r} holds {text!r}, which are no terms: {error}") from None
        return {
            name: (terms.get(name), agreed.get(name))
            for name in sorted(terms.keys() | agreed.keys())
            if terms.get(name) != agreed.get(name)
        }

    # The first formation -------------------------------------------------------------------------------

    def join_first(self, member: Member, slots: Iterable[int], limits: Limits = _DEFAULTS) -> None:
        """Joins the first iteration; the last of all slots to come decides it.

        Args:
            member: who joins.
            slots: the slots that the job begins with.
            limits: what the job goes on with, of which the shared ones are the same on every rank.
        """
        n = keys.BEFORE_FIRST
        expected = frozenset(slots)
        self.iterations.ask_to_join(n, member, 0)
        (count,) = self.store.execute([Count(keys.count_gone(n))])
        if int(count or 0) >= len(expected):
            self.form(expected, limits)

    def joined_first(self) -> set[Member]:
        """The members that have joined the first iteration."""
        return self.iterations.joins_of(keys.BEFORE_FIRST)

    def form(self, slots: frozenset[int], limits: Limits = _DEFAULTS) -> bool:
        """Decides the first iteration if every slot has joined; tells whether there is a head now."""
        if self.iterations.read_head() is not None:
            return True
        joined = self.iterations.joins_of(keys.BEFORE_FIRST)
        dead = self.ends.deaths_of(keys.BEFORE_FIRST)  # read second, as in `advance`
        latest: dict[int, Member] = {}
        for member in sorted(joined - dead):
            latest[member.slot] = member
        if not slots <= latest.keys():  # one that is not expected takes no one's place
            return False
        members = tuple(sorted(latest.values()))
        self.iterations._decide(None, _first_decision(members, limits), members)
        return True

    def await_first(
        self, member: Member, slots: Iterable[int], timeout: float, limits: Limits = _DEFAULTS
    ) -> View | None:
        """Waits for the first decision.

        Args:
            member: who waits.
            slots: the slots that the job begins with.
            timeout: seconds to wait at the longest.
            limits: as in `join_first`.

        Returns:
            The first iteration; None if this member is not in it.

        Raises:
            TimeoutError: not all slots joined in time; names the missing ones.
        """
        expected = frozenset(slots)
        first = keys.BEFORE_FIRST + 1
        position = sorted(expected).index(member.slot)
        # All of them have to be there, so the same few can look for all, should the last one have been lost.
        forms = keeps_lookout(position, len(expected))
        for remaining, _ in looks_for(self.store, keys.wake_head(first), position, timeout):
            if self.form(expected, limits) if forms else self.iterations.read_head() is not None:
                current = self._read_first(limits)
                # Who was not in the first decision joins the running job; and who sees a later one only has
                # been paused, and was in the first one if it is in that.
                return current if member in current.members else None
            if remaining <= 0:
                break
        joins, dead = self.iterations.joins_of(keys.BEFORE_FIRST), self.ends.deaths_of(keys.BEFORE_FIRST)
        came = {joiner.slot for joiner in joins - (dead - self.ends.gave_up(keys.BEFORE_FIRST))}
        # Who gave up because of the missing ones is none of them. To one that comes later it is.
        missing = sorted(expected - came or expected - {joiner.slot for joiner in joins - dead})
        raise TimeoutError(
            f"the job did not form within {timeout:g} s: ranks {missing} of {len(expected)} are missing; "
            "see whether their processes started and reach the store, or raise barrier_timeout"
        )

    def _read_first(self, limits: Limits) -> View:
        """The iteration that is on, mostly the first: that one's decision follows from its roster."""
        head = self.iterations.read_head()
        if head is not None and head.n == keys.BEFORE_FIRST + 1:
            key = keys.roster(head.n, head.nonce)
            roster = read(self.store, key)
            if roster is not None:  # else head has moved on by two meanwhile
                members = roster_from_json(roster, key)
                return View(_first_decision(members, limits), head.nonce, members)
        current = self.iterations.read_current()
        if current is None:
            raise StoreError("the store has no head any more; this job cannot go on")
        return current

    def await_head(self, timeout: float) -> None:
        """Waits until the job has formed, for one that comes beside those that it forms of.

        Args:
            timeout: seconds to wait at the longest.

        Raises:
            TimeoutError: it did not form in time.
        """
        first = keys.BEFORE_FIRST + 1
        for remaining, _ in looks_for(self.store, keys.wake_head(first), 0, timeout):
            if self.iterations.read_head() is not None:
                return
            if remaining <= 0:
                raise TimeoutError(
                    f"the job did not form within {timeout:g} s; see whether the ranks that it begins with "
                    "started and reach the store, or raise barrier_timeout"
                )

    # Joining a running job -----------------------------------------------------------------------------

    def await_entry(
        self, member: Member, call: int, limits: Limits, patience: float, asked: int | None = None
    ) -> tuple[Entry, View]:
        """Asks to be let into the running job until head lists the member, or it is clear that it never will.

        Args:
            member: who wants in.
            call: number of the wrapped call that it comes for.
            limits: when to end the iteration that is on, and how long to wait for replacements.
            patience: seconds to wait for an iteration that has ended to be followed by another one.
            asked: the iteration after which the member has asked before to be let in: `BEFORE_FIRST` for one
                that took part in the first formation.

        Returns:
            How it ended, and the iteration that head was at.

        Raises:
            TimeoutError: an iteration had ended and was not followed by another one.
        """
        attempt = _Attempt(self, member, call, limits, patience, asked)
        while True:
            view = self.iterations.read_current()
            if view is None:
                raise StoreError("the store has no head any more; this job cannot go on")
            if view.call > call:
                return Entry.DONE, view
            if member in view.members:
                return Entry.IN, view
            if self.newest_of(member.slot) != member:
                return Entry.TAKEN_OVER, view
            if attempt.asked is not None and view.n > attempt.asked + 1:
                return Entry.PASSED, view
            outcome = self.ends.outcome_of(view.n)
            if view.call == call and outcome == DONE:
                return Entry.DONE, view
            attempt.look_at(view)
            if call == view.call + (outcome == DONE):
                attempt.ask(view)
                attempt.act(view)
            else:
                attempt.wait_for_end(view, outcome)

    def restless(self, n: int) -> int:
        """How many iterations in a row before n ended before they had been on for a while."""
        settled = read(self.store, keys.SETTLED)
        last = keys.BEFORE_FIRST if settled is None else to_number(settled, keys.SETTLED)
        return max(0, n - last - 1)

    def supersede(self, view: View, member: Member) -> bool:
        """Logs the death of an older incarnation of a member's slot; tells whether one was still listed.

        The iteration ends by it, unless it was a spare.
        """
        older = [listed for listed in view.members if listed.slot == member.slot and listed < member]
        if not older or older[0] in self.ends.deaths_of(view.n):
            return False
        fault = self.record_of(older[0]).fault(
            older[0], None, Interruption.TERMINATED, "gave way to a newer process"
        )
        self.ends.log_deaths(view.n, {older[0]: fault}, ends=self.entering.may_be_active(view.n, older[0]))
        return True


@dataclasses.dataclass(eq=False)
class _Attempt:
    """One process's attempt to get in, over all iterations that it sees."""

    joining: Joining
    member: Member
    call: int
    limits: Limits
    patience: float
    asked: int | None  # the iteration into whose successor it asked to be let
    view: View | None = None
    _asked_at: float = 0.0
    _ended_at: float | None = None
    _said_at: float = -math.inf  # when the log said last for whom this waits
    _awaited_at: float = -math.inf  # when a living member was last between two calls
    _pause: float = _FIRST_LOOK

    def __post_init__(self) -> None:
        self._iterations = self.joining.iterations
        self._store = self.joining.store
        self._observer = HeartbeatObserver(self.joining.heartbeats, self.limits.heartbeat_timeout)

    def look_at(self, view: View) -> None:
        """Begins again if head has moved."""
        if self.view is not None and self.view.head == view.head:
            return
        self.view = view
        self._ended_at = None
        self._said_at = -math.inf
        self._awaited_at = -math.inf
        self._pause = _FIRST_LOOK

    def ask(self, view: View) -> None:
        """Asks to be let into the next iteration, once for each iteration."""
        if self.asked == view.n:
            return
        # The older one's death first: a proposal that lets this one in must not keep that one.
        counts = self.joining.supersede(view, self.member)
        self._iterations.ask_to_join(view.n, self.member, self.call)
        self.asked, self._asked_at = view.n, self._store.now()
        events.emit("join", iteration=view.n, slot=self.member.slot)
        if counts:
            self._iterations.count_deaths(view)

    def wait_for_end(self, view: View, outcome: str | None) -> None:
        """Waits a little: the job is in an earlier call than the one that the process came for."""
        self._wait(keys.wake_end(view.n) if outcome is None else keys.wake_head(view.n + 1), 0.0)

    def act(self, view: View) -> None:
        """Does what may bring the next iteration about, then waits a little for it."""
        if self.joining.ends.outcome_of(view.n) is None:
            due = self._asked_at + self._window(view)
            if (self._store.now() >= due and self._is_wanted(view)) or self._is_deserted(view):
                self.joining.ends.end_iteration(view.n, FAULT)
            else:
                # Not beyond that moment; and from then on at times, should it be wanted later.
                self._wait(keys.wake_end(view.n), due - self._store.now())
                return
        self._propose(view)
        self._wait(keys.wake_head(view.n + 1), 0.0)

    def _window(self, view: View) -> float:
        again = min(max(0, self.joining.restless(view.n) - 1), _LONGEST_WINDOW)
        return self.limits.join_window * 2.0**again

    def _is_wanted(self, view: View) -> bool:
        if self.limits.on_join is not OnJoin.DEGRADED:
            return self.limits.on_join is OnJoin.NOW
        return 0 < self.joining.entering.active_in(view.n) < self._iterations.wanted()

    def _is_deserted(self, view: View) -> bool:
        """Whether no member is left that could end the iteration: all are dead, or silent in this one's eyes.

        Members watch each other; so the others are looked at only if the first of the living stands still.
        """
        dead = self.joining.ends.deaths_of(view.n)
        living = [member for member in view.members if member not in dead]
        if living and self._observer.stillness(living[0]) < self.limits.heartbeat_timeout / 2:
            return False
        return len(self._observer.silent(living)) == len(living)

    def _propose(self, view: View) -> None:
        """Proposes, which does nothing unless every member has arrived, is dead or silent."""
        now = self._store.now()
        if self._ended_at is None:
            self._ended_at = now
        arrived, dead = self._iterations.arrivals_of(view.n), self.joining.ends.deaths_of(view.n)
        missing = set(view.members) - arrived - dead
        silent = self._observer.silent(self._iterations.arrived_and_missing(view)[1])
        if view.call < self.call and missing - silent:
            self._awaited_at = now
            if now - max(self._ended_at, self._said_at) >= self.patience:
                self._iterations.log_awaited(view, missing - silent)
                self._said_at = now
        elif now - max(self._ended_at, self._awaited_at) >= self.patience:
            raise TimeoutError(
                f"iteration {view.n} was not followed by another one within {self.patience:g} s: "
                f"slots {sorted(member.slot for member in missing)} have not left it, or fewer than "
                f"min_world_size={view.decision.min_world_size} ranks are left"
            )
        if not arrived - dead and not self._has_gathered(view, now):
            return
        hold = now - self._ended_at < self.limits.rejoin_wait
        self._iterations.advance(view, None, silent=silent, hold=hold)

    def _has_gathered(self, view: View, now: float) -> bool:
        """Where no member is left that could be joined, the first to come back waits for the others."""
        assert self._ended_at is not None
        back = {member.slot for member in self._iterations.joins_of(view.n)}
        everybody = {member.slot for member in view.members}
        return everybody <= back or now - max(self._asked_at, self._ended_at) >= self.limits.join_window

    def _wait(self, wake: str, at_most: float) -> None:
        pause = min(self._pause, at_most) if at_most > 0 else self._pause
        if pause == self._pause:
            self._pause = min(2 * self._pause, _LONGEST_LOOK, max(_FIRST_LOOK, self.limits.heartbeat_timeout))
        self._store.hear(wake, pause)


def _first_decision(members: tuple[Member, ...], limits: Limits) -> Decision:
    n = keys.BEFORE_FIRST + 1
    ranks = tuple(range(len(members)))
    return Decision(
        call=0,
        n=n,
        first=n,
        removed=(),
        ranks=(),
        joined=members,
        joined_ranks=ranks,
        inserted=ranks,
        world_size=len(members),
        min_world_size=limits.min_world_size,
        max_faults=limits.max_faults or 0,
        fault_window=limits.fault_window if limits.max_faults else 0.0,
    )
