"""How a process joins the job: its first iteration, or later a running one (DESIGN.md 5.3).

A joiner never relies on a single read. It keeps reading head until the current iteration lists the joiner, or
it is clear that no iteration will. So no process joins too early or too late.
"""

import dataclasses
import enum
import json
from collections.abc import Iterable

from ..attribution import Interruption
from ..exception import RestartTimeout, StoreError
from ..settings import AllLimits, OnJoin
from . import keys, records
from .entering import Entering
from .global_iteration import GlobalIteration
from .operations import Operations, append_counted, read, set_if_absent, write_text
from .proposal import first_decision
from .records import DONE, FAULT, GATHERED, STOPPED_WAITING, Member, MemberRecord, View, record_of, to_number
from .silence import HeartbeatObserver
from .waiting import FIRST_LOOK, LONGEST_LOOK, is_checker, looks, stagger

_LONGEST_WINDOW = 6  # doublings of the join window
_UNKNOWN = MemberRecord()
_DEFAULTS = AllLimits()


class Entry(enum.Enum):
    """How an attempt to join ended.

    Attributes:
        IN: the current iteration lists the member.
        DONE: the member's call has completed.
        TAKEN_OVER: a newer process holds the slot.
        PASSED: head moved on so far that the member may have been in an iteration and left out again. It
            needs a new incarnation.
    """

    IN = enum.auto()
    DONE = enum.auto()
    TAKEN_OVER = enum.auto()
    PASSED = enum.auto()


class Joining:
    """Taking a slot, the first formation, and joining later.

    Args:
        store: a client of the job's store.
        iterations: how the members go on.
        entering: which members have entered an iteration.
    """

    def __init__(self, store: Operations, iterations: GlobalIteration, entering: Entering) -> None:
        self.store = store
        self.iterations = iterations
        self.entering = entering
        self.ends = iterations.ends
        self.heartbeats = iterations.heartbeats

    def agree_on_version(self) -> None:
        """Makes sure that the job uses the same version of the key names as this process.

        Raises:
            StoreError: the job uses another version. This process has then written nothing else.
        """
        version = set_if_absent(self.store, keys.VERSION, keys.THIS_VERSION)
        if version != keys.THIS_VERSION:
            raise StoreError(
                f"the store's job uses version {version} of the keys, this process version "
                f"{keys.THIS_VERSION}; start all processes of a job with the same version of ft_wrapper"
            )

    def register(self, slot: int, record: MemberRecord = _UNKNOWN) -> Member:
        """Takes the slot's next incarnation and writes the member's record.

        Args:
            slot: the initial rank.
            record: the member's record: host and pid, and the name of its heartbeat if that is shared.
        """
        member = Member(slot, self.store.add(keys.incarnations(slot), 1) - 1)
        self.write_record(member, record)
        if record.heart is None:  # a shared heartbeat is sent already
            self.heartbeats.beat_heart(str(member))
        return member

    def write_record(self, member: Member, record: MemberRecord) -> None:
        """Writes the record of a member's process."""
        write_text(self.store, keys.member(str(member)), record.to_json())

    def newest_of(self, slot: int) -> Member:
        """The newest member that took the slot."""
        return Member(slot, self.store.add(keys.incarnations(slot), 0) - 1)

    def agree_on_terms(self, slot: int, call: int, terms: dict[str, object]) -> None:
        """Compares the terms of a call with the job's; the first process to call this decides them.

        Args:
            slot: the initial rank.
            call: number of the wrapped call.
            terms: the function and the settings that must be the same on all ranks.

        Raises:
            StoreError: the job's terms cannot be read; names the key.
            ValueError: the job has other terms; names the differences.
        """
        key = keys.terms(call)
        text = set_if_absent(self.store, key, json.dumps(terms, sort_keys=True))
        try:
            agreed = dict(json.loads(text))
        except (ValueError, TypeError) as error:
            raise StoreError(f"store key {key!r} holds {text!r}, not the terms of a call: {error}") from None
        different = [
            f"{name}={terms.get(name)!r}, the job has {agreed.get(name)!r}"
            for name in sorted(terms.keys() | agreed.keys())
            if terms.get(name) != agreed.get(name)
        ]
        if different:
            raise ValueError(
                f"slot {slot} cannot take part in the job's call {call}: {', '.join(different)}; "
                "start all ranks with the same script and settings"
            )

    # The first formation -------------------------------------------------------------------------------

    def join_first(self, member: Member, slots: Iterable[int], limits: AllLimits = _DEFAULTS) -> None:
        """Joins the first iteration; the last slot to join decides it.

        Args:
            member: the joiner.
            slots: the slots that the job begins with.
            limits: the job's limits; the shared ones are the same on every rank.
        """
        n = keys.BEFORE_FIRST
        expected = frozenset(slots)
        if append_counted(self.store, keys.join(n), f"{member} 0", keys.count_gone(n)) >= len(expected):
            self.form(expected, limits)

    def living_joiners(self) -> dict[int, Member]:
        """The newest living member of each slot that has joined the first iteration."""
        joined = self.iterations.joins_of(keys.BEFORE_FIRST)
        dead = self.ends.deaths_of(keys.BEFORE_FIRST)  # read second, as in `advance`
        return {member.slot: member for member in sorted(joined - dead)}

    def form(self, slots: frozenset[int], limits: AllLimits = _DEFAULTS) -> bool:
        """Decides the first iteration if every slot has joined; returns whether there is now a head."""
        if self.iterations.read_head() is not None:
            return True
        newest = self.living_joiners()
        if not slots <= newest.keys():  # a joiner of another slot replaces none of them
            return False
        members = tuple(sorted(newest.values()))
        self.iterations.decide(None, first_decision(members, limits), members)
        return True

    def await_first(
        self, member: Member, slots: Iterable[int], timeout: float, limits: AllLimits = _DEFAULTS
    ) -> View | None:
        """Waits for the first decision.

        Args:
            member: the member that waits; its slot need not be one of ``slots``.
            slots: the slots that the job begins with.
            timeout: longest time to wait, in seconds.
            limits: as in `join_first`.

        Returns:
            The first iteration; None if this member is not in it.

        Raises:
            RestartTimeout: some slots did not join in time; names the missing ones.
        """
        expected = frozenset(slots)
        wake = keys.wake_head(keys.BEFORE_FIRST + 1)
        position = sum(slot < member.slot for slot in expected)
        # Every slot has to join, so a few of them can check for all, in case the last joiner has died.
        forms = is_checker(position, len(expected))
        for _ in looks(self.store, wake, timeout, first=FIRST_LOOK + stagger(position)):
            if self.form(expected, limits) if forms else self.iterations.read_head() is not None:
                view = self._read_first(limits)
                # A member missing from the first decision joins later. A member that finds a later head was
                # paused: it belongs to the job if that head lists it.
                return view if member in view.members else None
        joins = self.iterations.joins_of(keys.BEFORE_FIRST)
        dead = self.ends.marked_deaths_of(keys.BEFORE_FIRST)
        came = {joiner.slot for joiner in joins if STOPPED_WAITING in dead.get(joiner, [STOPPED_WAITING])}
        # A member that gave up because others were missing is not itself missing. To a later joiner it is.
        missing = sorted(expected - came or expected - {joiner.slot for joiner in joins - dead.keys()})
        raise RestartTimeout(
            f"the job did not form within {timeout:g} s: ranks {missing} of {len(expected)} are missing; "
            "check that their processes started and reach the store, or raise barrier_timeout"
        )

    def _read_first(self, limits: AllLimits) -> View:
        """The current iteration, usually the first, whose decision follows from its roster."""
        head = self.iterations.read_head()
        if head is not None and head.n == keys.BEFORE_FIRST + 1:
            key = keys.roster(head.n, head.nonce)
            roster = read(self.store, key)
            if roster is not None:  # None if head has moved on by two meanwhile
                members = records.roster_from_json(roster, key)
                return View(first_decision(members, limits), head.nonce, members)
        return self._read_current()

    def _read_current(self) -> View:
        current = self.iterations.read_current()
        if current is None:
            raise StoreError("the store has lost its head key; this job cannot go on")
        return current

    # Joining a running job -----------------------------------------------------------------------------

    def await_entry(
        self, member: Member, call: int, limits: AllLimits, patience: float, asked: int | None = None
    ) -> tuple[Entry, View]:
        """Asks to join the running job until an iteration lists the joiner, or it is clear that none will.

        Args:
            member: the joiner.
            call: number of the joiner's wrapped call.
            limits: when to end the current iteration, and how long to wait for replacements.
            patience: seconds to wait for the next iteration once one has ended.
            asked: the iteration after which the member has asked to join before: `BEFORE_FIRST` if it took
                part in the first formation; None if it has not asked.

        Returns:
            How the attempt ended, and the iteration that was then current.

        Raises:
            RestartTimeout: an iteration ended, and no next one was decided in time.
        """
        observer = HeartbeatObserver(self.heartbeats, limits.heartbeat_timeout)
        attempt: _Attempt | None = None
        while True:
            view = self._read_current()
            if view.call > call:
                return Entry.DONE, view
            if member in view.members:
                return Entry.IN, view
            if self.newest_of(member.slot) != member:
                return Entry.TAKEN_OVER, view
            if asked is not None and view.n > asked + 1:
                return Entry.PASSED, view
            outcome = self.ends.outcome_of(view.n)
            if view.call == call and outcome == DONE:
                return Entry.DONE, view
            if attempt is None or attempt.view.head != view.head:
                attempt = _Attempt(self, view, member, call, limits, patience, observer)
            if call == view.call + (outcome == DONE):
                asked = view.n
                attempt.act()
            else:  # the job is in an earlier call than the joiner's
                attempt.wait(keys.wake_end(view.n) if outcome is None else keys.wake_head(view.n + 1))

    def short_iterations_before(self, n: int) -> int:
        """How many iterations in a row, just before n, ended within a few join windows."""
        settled = read(self.store, keys.SETTLED)
        last = keys.BEFORE_FIRST if settled is None else to_number(settled, keys.SETTLED)
        return max(0, n - last - 1)

    def supersede(self, view: View, member: Member) -> bool:
        """Logs the death of an older incarnation of the slot; ends the iteration unless that was a spare.

        Returns:
            Whether an older incarnation was a member of ``view`` and not logged dead.
        """
        older = [listed for listed in view.members if listed.slot == member.slot and listed < member]
        if not older or older[0] in self.ends.deaths_of(view.n):
            return False
        record, why = record_of(self.store, older[0]), "gave way to a newer process"
        fault = record.fault(older[0], None, Interruption.TERMINATED, why)
        self.ends.log_deaths(view.n, {older[0]: fault}, ends=self.entering.may_be_active(view.n, older[0]))
        return True


@dataclasses.dataclass(eq=False)
class _Attempt:
    """A joiner's attempt to get into the iteration after the current one."""

    joining: Joining
    view: View
    member: Member
    call: int
    limits: AllLimits
    patience: float
    observer: HeartbeatObserver

    def __post_init__(self) -> None:
        self._store, self._iterations = self.joining.store, self.joining.iterations
        self._pause = FIRST_LOOK
        self._asked_at: float | None = None
        self._ended_at: float | None = None
        self._has_gathered = False  # whether this joiner is marked so
        self._awaited_at = 0.0  # when a living member was last seen between two calls
        self._logged_at = 0.0  # when the awaited members were last logged

    def act(self) -> None:
        """Asks to join, ends the iteration when due, and proposes; then waits a little for the next one."""
        n = self.view.n
        if self._asked_at is None:
            self._ask()
            self._asked_at = self._store.now()
        if self.joining.ends.outcome_of(n) is None:
            again = min(max(0, self.joining.short_iterations_before(n) - 1), _LONGEST_WINDOW)
            due = self._asked_at + self.limits.join_window * 2.0**again
            if not ((self._store.now() >= due and self._should_end_iteration()) or self._is_deserted()):
                # Until the window is due; later in growing pauses, as the conditions may be met then.
                self.wait(keys.wake_end(n), due - self._store.now())
                return
            self.joining.ends.end_iteration(n, FAULT)
        self.wait(keys.wake_head(n + 1), self._propose(self._asked_at))

    def wait(self, wake: str, due: float = 0.0) -> None:
        """Waits a little for a notification key, each time longer; at most ``due`` seconds if positive."""
        pause = min(self._pause, due) if due > 0 else self._pause
        if pause == self._pause:
            self._pause = min(2 * pause, LONGEST_LOOK, max(FIRST_LOOK, self.limits.heartbeat_timeout))
        self._store.wait_for(wake, pause)

    def _ask(self) -> None:
        """Asks to join the next iteration."""
        # The older incarnation's death first: a proposal that takes this member must not keep the older one.
        counts = self.joining.supersede(self.view, self.member)
        self._iterations.ask_to_join(self.view.n, self.member, self.call)
        self._store.emit("join", iteration=self.view.n, slot=self.member.slot)
        if counts:
            self._iterations.count_deaths(self.view)

    def _should_end_iteration(self) -> bool:
        if self.limits.on_join is not OnJoin.DEGRADED:
            return self.limits.on_join is OnJoin.NOW
        return 0 < self.joining.entering.active_in(self.view.n) < self._iterations.active_target()

    def _is_deserted(self) -> bool:
        """Whether every member is dead, or silent as far as this joiner knows, so that none can end it.

        Members watch each other. So this reads the other heartbeats only if the first living member's does
        not change.
        """
        dead = self.joining.ends.deaths_of(self.view.n)
        living = [member for member in self.view.members if member not in dead]
        if living and self.observer.stillness(living[0]) < self.limits.heartbeat_timeout / 2:
            return False
        return len(self.observer.silent(living)) == len(living)

    def _propose(self, asked_at: float) -> float:
        """Proposes; this does nothing unless every member has arrived, is dead or is silent.

        Returns:
            Seconds until the join window closes: then this newcomer no longer waits for others.
        """
        view, now = self.view, self._store.now()
        if self._ended_at is None:
            self._ended_at = self._awaited_at = self._logged_at = now
        _, missing = self._iterations.arrived_and_missing(view)
        silent = self.observer.silent(missing)
        awaited = set(missing) - silent
        if view.call < self.call and awaited:
            self._awaited_at = now
            if now - self._logged_at >= self.patience:
                self._iterations.log_awaited(view, awaited)
                self._logged_at = now
        elif now - self._awaited_at >= self.patience:
            raise RestartTimeout(
                f"iteration {view.n} was not followed by another one within {self.patience:g} s: "
                f"slots {[member.slot for member in missing]} have not left it, or fewer than "
                f"min_world_size={view.decision.min_world_size} ranks are left"
            )
        hold = now - self._ended_at < self.limits.rejoin_wait
        window = max(asked_at, self._ended_at) + self.limits.join_window - now
        if window <= 0 and not self._has_gathered:
            self._iterations.ask_to_join(view.n, self.member, self.call, GATHERED)
            self._has_gathered = True
        self._iterations.advance(view, None, silent=silent, hold=hold)
        return window
