"""Carries out operations: asks for the next action, does it, writes the record back, waits for others."""

import contextlib
import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic import rendezvous as elastic

from ..exception import StoreError
from ..protocol.operations import Beat, Operations, beats, read, write_text
from ..protocol.silence import CounterObserver, beat_lasts
from . import kept_out, moves, operations
from .operations import Action, Announced, Context
from .record import Admission, Node, Place, Record, Seat, differences, digest
from .register import Board, Register, Snapshot, alive_key, call_back, process_key
from .settings import Settings

log = logging.getLogger(__name__)

#: Seconds after which a waiter reads the record itself, in case its wake-up was lost.
REFRESH = 60.0

Operation = Callable[[Context], Action]
OnUnseated = Callable[[tuple[Seat, ...]], None]


class Executor:
    """Carries out the operations of one node. Not for several threads at once.

    Args:
        node: whose operations.
        register: the record, through a client that no one else uses.
        board: the newest record, where it waits for changes.
        settings: timeouts and options.
        on_unseated: told the seats that this node took from silent nodes; only the node that won is told.

    Attributes:
        was_spare: whether the node was a spare at any time of the last `join`.
    """

    def __init__(
        self,
        node: Node,
        register: Register,
        board: Board,
        settings: Settings,
        on_unseated: OnUnseated | None = None,
    ) -> None:
        self.node = node
        self.store = register.store
        self._register = register
        self._board = board
        self._settings = settings
        self._options = settings.options()
        self._beat_lasts = beat_lasts(settings.keep_alive_timeout, settings.keep_alive_interval)
        self._on_unseated = on_unseated
        self.was_spare = False
        self._announced: Announced | None = None
        self._leaving: int | None = None
        self._closing = ("", "")

    # Operations ------------------------------------------------------------------------------------------

    def join(self, leaving: int | None = None) -> Snapshot:
        """Takes part in the next round, or in the running one under the policy ``rank``.

        Args:
            leaving: the round that the node was in and leaves for that; None if it was in none.

        Returns:
            The record in which this node has its seat.

        Raises:
            RendezvousClosedError: the rendezvous is closed.
            RendezvousGracefulExitError: it is closed, and this node was a spare.
            RendezvousTimeoutError: not enough nodes joined; says how many of how many, and which.
            RendezvousError: the options differ from those of the others, or another agent has this node's id.
        """
        self._leaving = leaving
        try:
            return self._run(operations.join, self._settings.join_timeout)
        finally:
            self._leaving = None

    def exit(self) -> Snapshot:
        """Gives up the place that this node has or is about to get."""
        return self._run(operations.exit_, self._settings.close_timeout)

    def close(self, reason: str = "", result: str = "") -> Snapshot:
        """Closes the rendezvous for all nodes; see `Record` for why and how."""
        self._closing = (reason, result)
        return self._run(operations.close, self._settings.close_timeout)

    def keep_alive(self) -> None:
        """Sends a heartbeat."""
        self.store.execute([Beat(alive_key(self.node.name), self._beat_lasts)])

    def change(self, change: Callable[[Record], Record]) -> Snapshot:
        """Makes a change; asks for it again with each newer record until it is written or changes nothing."""
        snapshot = self.look()
        while True:
            after = change(snapshot.record)
            if after == snapshot.record:
                return snapshot
            snapshot, won = self._replace(snapshot, after)
            if won:
                return snapshot

    def expel(self, silent: Iterable[Node]) -> tuple[Seat, ...]:
        """Takes silent nodes out, if this one may (`moves.may_unseat`); returns the seats that they lost."""
        lost: tuple[Seat, ...] = ()
        silent = list(silent)

        def without(record: Record) -> Record:
            nonlocal lost
            lost = ()
            if not moves.may_unseat(record, self.node, silent):
                return record
            after, lost = moves.remove(record, [node for node in silent if record.place_of(node) is not None])
            return after

        self.change(without)
        if lost:
            call_back("on_unseated", self._on_unseated, lost)
        return lost

    def touch(self) -> None:
        """Makes a new version of the record with nothing else changed, which wakes all that wait for one."""
        snapshot, won = self.look(), False
        while not won:
            snapshot, won = self._replace(snapshot, snapshot.record)

    def look(self) -> Snapshot:
        """The newest record that is known; read only if none is."""
        known = self._board.latest()
        return self.refresh() if known is None else known

    def refresh(self) -> Snapshot:
        """Reads the record."""
        snapshot = self._register.read()
        self._board.learn(snapshot)
        return snapshot

    def sweep(self) -> Snapshot:
        """Does what a node that died may have left undone.

        That is a wake-up after a change, or taking the log into the record: as long as a node is in the log
        only, no node watches it.
        """
        snapshot = self.refresh()
        self._register.pass_on(snapshot)
        if snapshot.record.closed or snapshot.record.place_of(self.node) is None:
            return snapshot
        after = moves.fold(snapshot.record, self._register.admissions(snapshot.record.epoch))
        return snapshot if after == snapshot.record else self._replace(snapshot, after)[0]

    def check(self, record: Record) -> None:
        """Raises RendezvousError if this node does not belong to this record."""
        differing = differences(record.options, self._options)
        if differing:
            raise elastic.RendezvousError(
                f"node {self.node} was started with other options than the job at this endpoint: "
                f"{'; '.join(differing)}; start all nodes with the same, or use another endpoint"
            )
        other = record.find(self.node.id)
        if other is not None and other.incarnation > self.node.incarnation:
            raise elastic.RendezvousError(
                f"node id {self.node.id!r}: this agent was superseded by another one with the same id, at "
                f"{other.address or 'an unknown address'}; give each node an id of its own"
            )

    # Running ---------------------------------------------------------------------------------------------

    def _run(self, operation: Operation, timeout: float) -> Snapshot:
        now = self.store.now
        deadline = now() + timeout
        enough: tuple[int, float] | None = None
        was_spare = self.was_spare = False
        snapshot = self.look()
        while True:
            record = snapshot.record
            if operation is operations.join:
                self.check(record)
            context = self._context(record, now(), deadline)
            is_spare = context.place is Place.SPARE
            if was_spare and not is_spare:
                deadline = now() + timeout  # its turn begins only now
            if is_spare and not was_spare:
                who = (self._settings.run_id, self.node)
                log.info("%s: node %s is a spare: there is no seat for it now", *who)
            was_spare = is_spare
            self.was_spare |= is_spare
            if not context.has_enough:
                enough = None
            elif enough is None or enough[0] != record.round:
                enough = (record.round, now())
            since = None if enough is None else enough[1]
            context = dataclasses.replace(context, deadline=deadline, enough_since=since)
            action = operation(context)
            if action is Action.FINISH:
                return snapshot
            if action is Action.ERROR_CLOSED:
                raise self._closed(record, was_spare)
            if action is Action.ERROR_TIMEOUT:
                raise self._timed_out(record, timeout)
            if action is Action.SYNC:
                snapshot = self._wait(snapshot, context)
            else:
                log.debug("%s: %s: %s", self._settings.run_id, self.node, action.value)
                snapshot = self._act(action, snapshot, context.is_announced)

    def _context(self, record: Record, now: float, deadline: float) -> Context:
        limits = {"last_call": self._settings.last_call_timeout, "patience": self._settings.patience}
        return Context(self.node, record, now, deadline, self._leaving, self._announced, **limits)

    def _wait(self, snapshot: Snapshot, context: Context) -> Snapshot:
        seconds = context.next_timer - context.now
        newer = self._board.wait(snapshot.record.version, min(seconds, REFRESH))
        if newer is not None:
            return newer
        return self.refresh() if seconds >= REFRESH else snapshot

    def _act(self, action: Action, snapshot: Snapshot, announced: bool) -> Snapshot:
        record = snapshot.record
        if action is Action.MARK_RENDEZVOUS_COMPLETE:
            return self._fold(snapshot, moves.complete)
        if action in operations.REMOVAL.values():
            return self._leave(snapshot, announced)
        if action is Action.MARK_RENDEZVOUS_CLOSED:
            return self._replace(snapshot, moves.close(record, *self._closing))[0]
        if announced:  # all others put this node into the record
            return self._fold(snapshot, lambda record: record)
        self._announce(record)
        return self.look()

    def _announce(self, record: Record) -> None:
        if record.complete and record.place_of(self.node) is None:
            # If it was taken out, its heart may not have noticed yet that the store is back.
            self.keep_alive()
        admission = Admission(self.node, self._leaving, digest(self._options))
        # Noted before: a caller that is interrupted in between, and gives up, has an admission to take back.
        self._announced = Announced(record.epoch, record.folded + 1, self.store.now())
        number = self._register.announce(record.epoch, admission)
        self._announced = Announced(record.epoch, number, self.store.now())

    def _fold(self, snapshot: Snapshot, then: Callable[[Record], Record]) -> Snapshot:
        """Takes the log into the record."""
        record = snapshot.record
        return self._put(snapshot, then(moves.fold(record, self._register.admissions(record.epoch))))

    def _leave(self, snapshot: Snapshot, announced: bool) -> Snapshot:
        def without(record: Record) -> Record:
            return moves.remove(record, [self.node])[0]

        if announced:  # its admission may not be in the record yet, and would get into it later
            return self._fold(snapshot, without)
        return self._put(snapshot, without(snapshot.record))

    def _put(self, snapshot: Snapshot, after: Record) -> Snapshot:
        """Writes the record, if it is another one than before; returns the newest."""
        if after == snapshot.record:
            # Another node may have taken the log into the record since that was read, and deleted it.
            newest = self.refresh()
            won = newest.text == snapshot.text
        else:
            newest, won = self._replace(snapshot, after)
        # The log is in the record. If this node is not, it was taken out and has to join again.
        if won and self._context(newest.record, 0.0, 0.0).place is None:
            self._announced = None
        return newest

    def _replace(self, snapshot: Snapshot, after: Record) -> tuple[Snapshot, bool]:
        newer, won = self._register.replace(snapshot, after)
        self._board.learn(newer)
        return newer, won

    # Errors ----------------------------------------------------------------------------------------------

    def _closed(self, record: Record, was_spare: bool) -> elastic.RendezvousError:
        why = f": {record.reason}" if record.reason else ""
        text = f"the rendezvous {self._settings.run_id!r} is closed: the job is over{why}"
        if was_spare:
            return elastic.RendezvousGracefulExitError(f"{text}, and spare node {self.node} was not needed")
        return elastic.RendezvousClosedError(f"{text}; start another one with another --rdzv-id or endpoint")

    def _timed_out(self, record: Record, timeout: float) -> elastic.RendezvousError:
        if record.complete:
            names = ", ".join(map(str, record.participants))
            return elastic.RendezvousTimeoutError(
                f"node {self.node} waited {timeout:g} s for the end of round {record.round} of the "
                f"rendezvous {self._settings.run_id!r}; still in it: {names}"
            )
        # This one has left already.
        came = [self.node, *(node for node in record.participants if node.id != self.node.id)]
        return elastic.RendezvousTimeoutError(
            f"{len(came)} of {_wanted(record)} nodes came to round {record.round} of the rendezvous "
            f"{self._settings.run_id!r} within {timeout:g} s: {', '.join(map(str, came))}"
            f"{_missing(record, came)}{self._kept_out()}; see whether the others run, and reach this endpoint"
        )

    def _kept_out(self) -> str:
        """Names the nodes that were kept out, and why."""
        with contextlib.suppress(StoreError, DistError):
            found = [f"node {one.node} ({one.reason})" for one in kept_out.read_all(self.store)]
            return f"; kept out: {', '.join(found)}" if found else ""
        return ""


# Before a node has its id --------------------------------------------------------------------------------


def await_predecessor(register: Register, node_id: str, settings: Settings) -> None:
    """Waits until no agent that lives has this id, which a scheduler gave to the caller.

    A scheduler gives it to the pod that replaces a lost one, and to a process of a second job step. There is
    nothing to wait for if the agent has left, was found lost by the others, or ran here and has ended.

    Raises:
        RendezvousError: an agent has the id and lives; names its address and the way out.
        StoreError: the store does not answer.
    """
    store, limit = register.store, settings.keep_alive_timeout
    watch, began = observer(store, limit), store.now()
    for look in itertools.count():
        record = register.read().record
        before = record.find(node_id)
        if record.closed or before is None or _has_ended(before, read(store, process_key(node_id)) or ""):
            return
        action = operations.succeed(watch.stillness(before), store.now() - began, limit)
        if action is Action.TAKE_SEAT:
            return
        if action is Action.ERROR_TIMEOUT:
            raise elastic.RendezvousError(
                f"node id {node_id!r}, from SLURM_PROCID or JOB_COMPLETION_INDEX, belongs to a live agent at "
                f"{before.address}: choose another --node-id; --node-id {node_id} would take its place"
            )
        if not look:
            log.info("node id %s is in use: waiting until %s is silent for %g s", node_id, before, limit)
        register.wait(record.version, settings.keep_alive_interval)  # it may leave, or be found lost


def observer(store: Operations, timeout: float) -> CounterObserver[Node]:
    """What watches the heartbeats of nodes."""
    return CounterObserver(lambda node: beats(store, alive_key(node.name)), store.now, timeout)


def note_process(store: Operations, node: Node) -> None:
    """Notes that this process is a node's agent, for one that comes with the same id."""
    write_text(store, process_key(node.id), f"{_place(node)} {os.getpid()}")


def _place(node: Node) -> str:
    """An agent, and where its pid is valid: on this host since its boot, in this pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{node.name} {boot} {os.readlink('/proc/self/ns/pid')}"


def _has_ended(node: Node, process: str) -> bool:
    """Whether an agent has ended, as far as this pid namespace can tell."""
    place, _, pid = process.rpartition(" ")
    return place == _place(node) and not os.path.exists(f"/proc/{pid}")


def _wanted(record: Record) -> str:
    return f"{'at least ' if record.min_nodes < record.max_nodes else ''}{record.min_nodes}"


def _missing(record: Record, came: list[Node]) -> str:
    """Names the missing nodes, where ids are numbers."""
    if not all(node.id.isdecimal() and int(node.id) < record.max_nodes for node in came):
        return ""
    ids = {int(node.id) for node in came}
    missing = [str(number) for number in range(record.max_nodes) if number not in ids]
    return f"; missing: {', '.join(missing)}"
