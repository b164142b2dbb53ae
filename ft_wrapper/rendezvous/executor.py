"""Carries out operations: decides the next action, does it, writes the record, waits for other nodes."""

import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path

from torch.distributed.elastic import rendezvous as elastic

from ..protocol.operations import Heartbeat, Operations, read, read_heartbeat, write_text
from ..protocol.silence import CounterObserver, beat_lasts
from . import moves, operations
from .operations import Action, Announced, Context
from .record import Admission, Node, NodePlace, RendezvousRecord, Seat, differences, digest
from .register import RecordRegister, alive_key, process_key
from .settings import RendezvousSettings

log = logging.getLogger(__name__)

#: Seconds after which a waiter reads the record itself, in case a notification was lost.
REFRESH = 60.0

Operation = Callable[[Context], Action]


class Executor:
    """Carries out the operations of one node. Not for several threads at once.

    Args:
        node: the node.
        register: the record, through a client of its own.
        settings: timeouts and options.

    Attributes:
        was_spare: whether the node was a spare at any time during the last `join`.
    """

    def __init__(self, node: Node, register: RecordRegister, settings: RendezvousSettings) -> None:
        self.node = node
        self.store = register.store
        self.register = register
        self.settings = settings
        self._run_id = settings.run_id
        self._options = settings.options()
        self._beat_lasts = beat_lasts(settings.keep_alive_timeout, settings.keep_alive_interval)
        self.was_spare = False
        self._announced: Announced | None = None

    # Operations ------------------------------------------------------------------------------------------

    def join(self, leaving: int | None = None) -> RendezvousRecord:
        """Takes part in the next round, or in the running one under the policy ``rank``.

        Args:
            leaving: the round that the node leaves; None if it was in none.

        Returns:
            The record in which this node has its seat.

        Raises:
            RendezvousClosedError: the rendezvous is closed.
            RendezvousGracefulExitError: the rendezvous is closed, and this node was a spare.
            RendezvousTimeoutError: not enough nodes joined; names those that did.
            RendezvousError: the options differ from other nodes', or another agent has this node's id.
        """
        return self._run(operations.join, self.settings.join_timeout, leaving)

    def exit(self) -> RendezvousRecord:
        """Gives up the place that this node has, or is about to get."""
        return self._run(operations.exit_, self.settings.close_timeout)

    def keep_alive(self) -> None:
        """Sends a heartbeat."""
        self.store.execute([Heartbeat(alive_key(self.node.name), self._beat_lasts)])

    def evict(self, silent: Collection[Node]) -> None:
        """Evicts silent nodes, if this node may (`moves.may_evict`)."""
        lost: tuple[Seat, ...] = ()

        def without(record: RendezvousRecord) -> RendezvousRecord:
            nonlocal lost
            may = moves.may_evict(record, self.node, silent)
            after, lost = moves.remove_nodes(record, silent) if may else (record, ())
            return after

        self.register.change(without)
        if lost:
            self.register.board.on_evicted(lost)

    def sweep(self) -> None:
        """Does what a dead node may have left undone.

        It notifies the other nodes of a change, and takes the log into the record: while a node is only in
        the log, no node watches it.
        """
        record = self.register.read()
        self.register.pass_on(record.version)
        if record.closed or record.place_of(self.node) is None:
            return
        after = moves.fold(record, self.register.admissions(record.epoch))
        if after != record:
            self.register.replace(record, after)

    def check(self, record: RendezvousRecord) -> None:
        """Raises RendezvousError if the node's options differ, or a newer agent has its id."""
        if differing := differences(record.options, self._options):
            raise elastic.RendezvousError(
                f"node {self.node} was started with different options from the job at this endpoint: "
                f"{'; '.join(differing)}; start all nodes with the same options, or use another endpoint"
            )
        other = record.find(self.node.id)
        if other is not None and other.incarnation > self.node.incarnation:
            raise elastic.RendezvousError(
                f"node id {self.node.id!r}: this agent was superseded by another one with the same id, at "
                f"{other.address or 'an unknown address'}; give each node its own id"
            )

    # Running ---------------------------------------------------------------------------------------------

    def _run(self, operation: Operation, timeout: float, leaving: int | None = None) -> RendezvousRecord:
        began, record = self.store.now(), self.register.latest()
        last_call, patience = self.settings.last_call_timeout, self.settings.patience
        context = Context(
            self.node, record, began, began + timeout, leaving, last_call=last_call, patience=patience
        )
        self.was_spare = False
        while True:
            if operation is operations.join:
                self.check(record)
            context = self._next(context, record, timeout)
            if context.place is NodePlace.SPARE and not self.was_spare:
                self.was_spare = True
                log.info("%s: node %s is a spare: there is no seat for it now", self._run_id, self.node)
            action = operation(context)
            if action is Action.FINISH:
                return record
            if action is Action.ERROR_CLOSED:
                raise self._closed(record, context.place is NodePlace.SPARE)
            if action is Action.ERROR_TIMEOUT:
                raise self._timed_out(record, timeout)
            if action is Action.SYNC:
                record = self._wait(context)
            else:
                log.debug("%s: %s: %s", self._run_id, self.node, action.value)
                record = self._act(action, context)

    def _next(self, before: Context, record: RendezvousRecord, timeout: float) -> Context:
        """The context of the next action, with a record that may be newer."""
        now = self.store.now()
        context = dataclasses.replace(before, record=record, now=now, announced=self._announced)
        if before.place is NodePlace.SPARE and context.place is not NodePlace.SPARE:
            context = dataclasses.replace(context, deadline=now + timeout)  # a spare's time begins only now
        if not context.has_enough:
            return dataclasses.replace(context, enough_since=None)
        if before.enough_since is None or before.record.round != record.round:
            return dataclasses.replace(context, enough_since=now)
        return context

    def _wait(self, context: Context) -> RendezvousRecord:
        seconds = context.next_timer - context.now
        newer = self.register.board.wait(context.record.version, min(seconds, REFRESH))
        if newer is not None:
            return newer
        return self.register.read() if seconds >= REFRESH else context.record

    def _act(self, action: Action, context: Context) -> RendezvousRecord:
        completes, leaves = action is Action.COMPLETE, action is Action.LEAVE
        if not (completes or leaves or context.is_announced):
            self._announce(context)
            return self.register.latest()
        after = context.record
        if completes or context.is_announced:  # otherwise the admission would get into the record later
            after = moves.fold(after, self.register.admissions(after.epoch))
        if completes:
            after = moves.complete_round(after)
        if leaves:
            after, _ = moves.remove_nodes(after, [self.node])
        if after == context.record:
            # Since the record was read, another node may have taken the log into it, and deleted the log.
            newest = self.register.read()
            won = newest == context.record
        else:
            newest, won = self.register.replace(context.record, after)
        # The log is in the record. If this node is not, it was evicted and has to join again.
        if won and dataclasses.replace(context, record=newest).place is None:
            self._announced = None
        return newest

    def _announce(self, context: Context) -> None:
        record = context.record
        if record.complete and record.place_of(self.node) is None:
            # The node was evicted. Its heart thread may not have noticed yet that the store is back.
            self.keep_alive()
        admission = Admission(self.node, context.leaving, digest(self._options))
        # Set before the append: a caller interrupted meanwhile still has an admission to take back.
        self._announced = Announced(record.epoch, record.folded + 1, self.store.now())
        number = self.register.announce(record.epoch, admission)
        self._announced = Announced(record.epoch, number, self.store.now())

    # Errors ----------------------------------------------------------------------------------------------

    def _closed(self, record: RendezvousRecord, was_spare: bool) -> elastic.RendezvousError:
        why = f": {record.reason}" if record.reason else ""
        text = f"the rendezvous {self._run_id!r} is closed: the job is over{why}"
        if was_spare:
            return elastic.RendezvousGracefulExitError(f"{text}, and spare node {self.node} was not needed")
        return elastic.RendezvousClosedError(f"{text}; start another one with another --rdzv-id or endpoint")

    def _timed_out(self, record: RendezvousRecord, timeout: float) -> elastic.RendezvousError:
        if record.complete:
            names = ", ".join(map(str, record.participants))
            return elastic.RendezvousTimeoutError(
                f"node {self.node} waited {timeout:g} s for the end of round {record.round} of the "
                f"rendezvous {self._run_id!r}; still in it: {names}"
            )
        # This node has left the record already.
        came = [self.node, *(node for node in record.participants if node.id != self.node.id)]
        least = "at least " if record.min_nodes < record.max_nodes else ""
        out = ", ".join(f"node {one.node} ({one.reason})" for one in record.quarantine)
        return elastic.RendezvousTimeoutError(
            f"{len(came)} of {least}{record.min_nodes} nodes joined round {record.round} of the rendezvous "
            f"{self._run_id!r} within {timeout:g} s: {', '.join(map(str, came))}{_missing(record, came)}"
            f"{out and f'; kept out: {out}'}; check that the other nodes run and reach this endpoint"
        )


# Before a node has its id --------------------------------------------------------------------------------


def await_predecessor(register: RecordRegister, node_id: str, settings: RendezvousSettings) -> None:
    """Waits until no living agent has this id, which the caller got from a scheduler.

    A scheduler gives the same id to a pod that replaces a lost one, and to a process of a second job step.
    There is nothing to wait for if the old agent has left, was evicted, or ran here and has ended.

    Raises:
        RendezvousError: a living agent has the id; names its address and says what to do.
        StoreError: the store does not answer.
    """
    store, limit = register.store, settings.keep_alive_timeout
    watch, began = observer(store, limit), store.now()
    for look in itertools.count():
        record = register.read()
        before = record.find(node_id)
        if record.closed or before is None or _has_ended(before, read(store, process_key(node_id)) or ""):
            return
        still = watch.stillness(before)
        if still >= limit:
            return
        # The other agent may have died since the first look, unless its heartbeats still come.
        if still == 0.0 and store.now() - began >= 2 * limit:
            raise elastic.RendezvousError(
                f"node id {node_id!r}, from SLURM_PROCID or JOB_COMPLETION_INDEX, belongs to a live agent at "
                f"{before.address}: choose another --node-id; --node-id {node_id} would take its place"
            )
        if not look:
            log.info("node id %s is in use: waiting until %s is silent for %g s", node_id, before, limit)
        register.wait(record.version, settings.keep_alive_interval)  # it may leave, or be found lost


def observer(store: Operations, timeout: float) -> CounterObserver[Node]:
    """An observer of nodes' heartbeats."""
    return CounterObserver(lambda node: read_heartbeat(store, alive_key(node.name)), store.now, timeout)


def note_process(store: Operations, node: Node) -> None:
    """Publishes the process of a node's agent, for a later agent with the same id."""
    write_text(store, process_key(node.id), f"{_place(node)} {os.getpid()}")


def _place(node: Node) -> str:
    """An agent's name, and where its pid is valid: on this host since its boot, in this pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{node.name} {boot} {os.readlink('/proc/self/ns/pid')}"


def _has_ended(node: Node, process: str) -> bool:
    """Whether an agent has ended, as far as this pid namespace shows."""
    place, _, pid = process.rpartition(" ")
    return place == _place(node) and not os.path.exists(f"/proc/{pid}")


def _missing(record: RendezvousRecord, came: list[Node]) -> str:
    """Names the missing nodes, if ids are numbers."""
    known, ids = list(map(str, range(record.max_nodes))), {node.id for node in came}
    missing = ", ".join(number for number in known if number not in ids)
    return f"; missing: {missing}" if ids.issubset(known) else ""
