"""Carries out operations: asks for the next action, does it, writes the record back, waits for others."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from ..store import beat_lasts
from . import keys, operations
from .operations import Action, Announced, Context
from .register import Register, Snapshot
from .settings import Settings
from .state import (
    SPARE,
    Entry,
    Node,
    Seat,
    State,
    close,
    complete,
    differences,
    digest,
    fold,
    may_unseat,
    remove,
)

log = logging.getLogger(__name__)

REFRESH = 60.0
"""Seconds after which a waiter looks at the record itself, should its wake-up have been lost."""

Operation = Callable[[Context], Action]
OnUnseated = Callable[[tuple[Seat, ...]], None]


class Changes(Protocol):
    """Where the newest known record is, and who wakes those that wait for the next one."""

    def latest(self) -> Snapshot | None:
        """The newest one that this node knows; None if it knows none yet."""

    def learn(self, snapshot: Snapshot) -> None:
        """Takes note of one."""

    def wait(self, version: int, seconds: float) -> Snapshot | None:
        """Waits until there is a newer one than this version; None if none came in time."""


class StoreChanges:
    """Waits in the store itself, with the register's own client.

    Args:
        register: the record.
    """

    def __init__(self, register: Register) -> None:
        self._register = register
        self._latest: Snapshot | None = None

    def latest(self) -> Snapshot | None:
        """The newest one that this node knows."""
        return self._latest

    def learn(self, snapshot: Snapshot) -> None:
        """Takes note of one."""
        if self._latest is None or snapshot.state.version >= self._latest.state.version:
            self._latest = snapshot

    def wait(self, version: int, seconds: float) -> Snapshot | None:
        """Waits for the key of the next version."""
        snapshot = self._register.wait(version, seconds)
        if snapshot is not None:
            self.learn(snapshot)
        return snapshot


class Executor:
    """Carries out the operations of one node. Not for several threads at once.

    Args:
        node: whose operations.
        register: the record, through a client that no one else uses.
        changes: how to wait for others.
        settings: timeouts and options.
        on_unseated: told the seats that this node took from silent nodes: it won, no one else does.
    """

    def __init__(
        self,
        node: Node,
        register: Register,
        changes: Changes,
        settings: Settings,
        on_unseated: OnUnseated | None = None,
    ) -> None:
        self.node = node
        self._register = register
        self._changes = changes
        self._settings = settings
        self._options = settings.options()
        self._beat_lasts = beat_lasts(settings.keep_alive_timeout, settings.keep_alive_interval)
        self._on_unseated = on_unseated
        self._announced: Announced | None = None
        self._leaving: int | None = None
        self._last_beat: float | None = None
        self._reason = ""

    # Operations ------------------------------------------------------------------------------------------

    def join(self, leaving: int | None = None) -> Snapshot:
        """Takes part in the next round, or in the running one under the policy ``rank``.

        Args:
            leaving: the round that the node was in and leaves for that; None if it was in none.

        Returns:
            The record in which this node has its seat.

        Raises:
            RendezvousClosedError: all is over.
            RendezvousGracefulExitError: all is over, and this node was a spare.
            RendezvousTimeoutError: not enough nodes came; says how many of how many, and who.
            RendezvousError: the options differ from those of the others, or another agent has this node's id.
        """
        self._leaving = leaving
        try:
            return self._run(operations.join, self._settings.join_timeout)
        finally:
            self._leaving = None

    def exit(self) -> Snapshot:
        """Gives up whatever place this node has, or is about to get."""
        return self._run(operations.exit_, self._settings.close_timeout)

    def close(self, reason: str = "") -> Snapshot:
        """Ends it all, for all nodes.

        Args:
            reason: why; empty if the job has ended well.
        """
        self._reason = reason
        return self._run(operations.close, self._settings.close_timeout)

    def keep_alive(self) -> Snapshot:
        """Says that this node lives, if it is time to."""
        return self._run(operations.keep_alive, self._settings.close_timeout)

    def change(self, change: Callable[[State], State]) -> Snapshot:
        """Makes a change, asked again of each record until it is made or changes nothing.

        Args:
            change: from the record to the record as it should be.
        """
        snapshot = self.look()
        while True:
            after = change(snapshot.state)
            if after == snapshot.state:
                return snapshot
            snapshot, won = self._replace(snapshot, after)
            if won:
                return snapshot

    def expel(self, silent: Iterable[Node]) -> tuple[Seat, ...]:
        """Takes silent nodes out, if this one may: see `state.may_unseat`.

        Args:
            silent: who; those that are not in the record do not matter.

        Returns:
            The seats that they lost by it.
        """
        lost: tuple[Seat, ...] = ()
        silent = list(silent)

        def without(state: State) -> State:
            nonlocal lost
            lost = ()
            if not may_unseat(state, self.node, silent):
                return state
            after, lost = remove(state, [node for node in silent if state.place_of(node) is not None])
            return after

        self.change(without)
        if lost and self._on_unseated is not None:
            self._on_unseated(lost)
        return lost

    def touch(self) -> None:
        """Makes a new version of the record with nothing else changed: all who wait for one are woken."""
        snapshot, won = self.look(), False
        while not won:
            snapshot, won = self._replace(snapshot, snapshot.state)

    def now(self) -> float:
        """This node's clock, in seconds."""
        return self._register.store.now()

    def look(self) -> Snapshot:
        """The newest record that is known; read only if none is."""
        known = self._changes.latest()
        return self.refresh() if known is None else known

    def refresh(self) -> Snapshot:
        """Reads the record."""
        snapshot = self._register.read()
        self._changes.learn(snapshot)
        return snapshot

    def sweep(self) -> Snapshot:
        """Looks whether something was left undone by a node that died over it, and does it.

        A wake-up after a change, or taking entries of the log into the record: as long as a node is in the
        log only, no one sees whether it lives.
        """
        snapshot = self.refresh()
        self._register.pass_on(snapshot)
        if snapshot.state.closed or snapshot.state.place_of(self.node) is None:
            return snapshot
        after = fold(snapshot.state, self._register.entries(snapshot.state.epoch))
        return snapshot if after == snapshot.state else self._replace(snapshot, after)[0]

    def check(self, state: State) -> None:
        """Raises RendezvousError if this node does not belong to this record."""
        differing = differences(state.options, self._options)
        if differing:
            raise RendezvousError(
                f"node {self.node} was started with other options than the job at this endpoint: "
                f"{'; '.join(differing)}; start all nodes with the same, or use another endpoint"
            )
        other = state.find(self.node.id)
        if other is not None and other.incarnation > self.node.incarnation:
            raise RendezvousError(
                f"node id {self.node.id!r}: this agent was superseded by another one with the same id, at "
                f"{other.address or 'an unknown address'}; give each node an id of its own"
            )

    # Running ---------------------------------------------------------------------------------------------

    def _run(self, operation: Operation, timeout: float) -> Snapshot:
        now = self._register.store.now
        deadline = now() + timeout
        enough: tuple[int, float] | None = None
        was_spare = False
        snapshot = self.look()
        while True:
            state = snapshot.state
            if operation is operations.join:
                self.check(state)
            context = self._context(state, now(), deadline)
            if was_spare and context.place != SPARE:
                deadline = now() + timeout  # only now is it this node's turn
            if context.place == SPARE and not was_spare:
                log.info(
                    "%s: node %s is a spare: there is no seat for it now", self._settings.run_id, self.node
                )
            was_spare = context.place == SPARE
            if not context.has_enough:
                enough = None
            elif enough is None or enough[0] != state.round:
                enough = (state.round, now())
            context = dataclasses.replace(
                context, deadline=deadline, enough_since=None if enough is None else enough[1]
            )
            action = operation(context)
            if action is Action.FINISH:
                return snapshot
            if action is Action.ERROR_CLOSED:
                raise self._closed(state, was_spare)
            if action is Action.ERROR_TIMEOUT:
                raise self._timed_out(state, timeout)
            if action is Action.SYNC:
                snapshot = self._wait(snapshot, context)
            else:
                log.debug("%s: %s: %s", self._settings.run_id, self.node, action.value)
                snapshot = self._act(action, snapshot)

    def _context(self, state: State, now: float, deadline: float) -> Context:
        return Context(
            node=self.node,
            state=state,
            now=now,
            deadline=deadline,
            leaving=self._leaving,
            announced=self._announced,
            last_call=self._settings.last_call_timeout,
            patience=self._settings.patience,
            last_beat=self._last_beat,
            # A caller that asks once in an interval may be a little early.
            beat_interval=0.9 * self._settings.keep_alive_interval,
        )

    def _wait(self, snapshot: Snapshot, context: Context) -> Snapshot:
        seconds = context.next_timer - context.now
        newer = self._changes.wait(snapshot.state.version, min(seconds, REFRESH))
        if newer is not None:
            return newer
        return self.refresh() if seconds >= REFRESH else snapshot

    def _act(self, action: Action, snapshot: Snapshot) -> Snapshot:
        state = snapshot.state
        announced = self._announced is not None and self._announced.epoch == state.epoch
        if action in operations.ADDING:
            if not announced:
                self._announce(state)
                return self.look()
            return self._fold(snapshot, lambda state: state)
        if action is Action.MARK_RENDEZVOUS_COMPLETE:
            return self._fold(snapshot, complete)
        if action in operations.REMOVING:
            return self._leave(snapshot, announced)
        if action is Action.KEEP_ALIVE:
            self._register.store.beat(keys.alive(self.node.name), self._beat_lasts)
            self._last_beat = self._register.store.now()
            return snapshot
        if action is Action.MARK_RENDEZVOUS_CLOSED:
            return self._replace(snapshot, close(state, self._reason))[0]
        raise AssertionError(f"{action} is no action of this executor")

    def _announce(self, state: State) -> None:
        entry = Entry(self.node, self._leaving, digest(self._options))
        # Noted before: a caller that is interrupted in between, and gives up, has an entry to take back.
        self._announced = Announced(state.epoch, state.folded + 1, self._register.store.now())
        number = self._register.announce(state.epoch, entry)
        self._announced = Announced(state.epoch, number, self._register.store.now())

    def _fold(self, snapshot: Snapshot, then: Callable[[State], State]) -> Snapshot:
        """Takes the log into the record."""
        state = snapshot.state
        after = then(fold(state, self._register.entries(state.epoch)))
        if after == state:
            newest = self.refresh()
            if newest.text == snapshot.text:
                self._forget_entry(after)
            return newest
        snapshot, won = self._replace(snapshot, after)
        if won:
            self._forget_entry(snapshot.state)
        return snapshot

    def _forget_entry(self, state: State) -> None:
        """The log is in the record. A node that is not in it now was taken out, and has to come again."""
        if self._context(state, 0.0, 0.0).place is None:
            self._announced = None

    def _leave(self, snapshot: Snapshot, announced: bool) -> Snapshot:
        state = snapshot.state
        if announced:  # the entry may not be in the record yet, and would come into it later
            state = fold(state, self._register.entries(state.epoch))
        after, _ = remove(state, [self.node])
        if after == snapshot.state:
            # Somebody else may have taken the log into the record since that was read, and deleted it.
            newest = self.refresh()
            if newest.text == snapshot.text:
                self._announced = None
            return newest
        snapshot, won = self._replace(snapshot, after)
        if won:
            self._announced = None
        return snapshot

    def _replace(self, snapshot: Snapshot, after: State) -> tuple[Snapshot, bool]:
        newer, won = self._register.replace(snapshot, after)
        self._changes.learn(newer)
        return newer, won

    # Errors ----------------------------------------------------------------------------------------------

    def _closed(self, state: State, was_spare: bool) -> RendezvousError:
        why = f": {state.reason}" if state.reason else ""
        text = f"the rendezvous {self._settings.run_id!r} is closed: the job is over{why}"
        if was_spare:
            return RendezvousGracefulExitError(f"{text}, and spare node {self.node} was not needed")
        return RendezvousClosedError(f"{text}; start another one with another --rdzv-id or endpoint")

    def _timed_out(self, state: State, timeout: float) -> RendezvousError:
        if state.complete:
            names = ", ".join(map(str, state.participants))
            return RendezvousTimeoutError(
                f"node {self.node} waited {timeout:g} s for the end of round {state.round} of the rendezvous "
                f"{self._settings.run_id!r}; still in it: {names}"
            )
        # This one has left already.
        came = [self.node, *(node for node in state.participants if node.id != self.node.id)]
        return RendezvousTimeoutError(
            f"{len(came)} of {_wanted(state)} nodes came to round {state.round} of the rendezvous "
            f"{self._settings.run_id!r} within {timeout:g} s: {', '.join(map(str, came))}"
            f"{_missing(state, came)}; see whether the others run, and reach this endpoint"
        )


def _wanted(state: State) -> str:
    if state.min_nodes == state.max_nodes:
        return str(state.min_nodes)
    return f"at least {state.min_nodes}"


def _missing(state: State, came: list[Node]) -> str:
    """Says who is missing, where that can be told: nodes that are numbered."""
    if not all(node.id.isdecimal() and int(node.id) < state.max_nodes for node in came):
        return ""
    ids = {int(node.id) for node in came}
    missing = [str(number) for number in range(state.max_nodes) if number not in ids]
    return f"; missing: {', '.join(missing)}"
