"""The record in a store: its keys, reads, changes by compare-and-set, waits for the next version.

The record is replaced by compare_set from exactly what was read. Every version has its own `writer`. So a
node that reads its own version back knows that it has won, even if an answer was lost and the client asked
again.
"""

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from torch.distributed import DistError
from torch.distributed.elastic import rendezvous as elastic

from ..exception import StoreError
from ..protocol.operations import Append, CompareAndSet, Notify, Write, read, read_log
from ..store import StoreMixin
from .record import Admission, RendezvousRecord, Seat

log = logging.getLogger(__name__)
T = TypeVar("T")

Change = Callable[[RendezvousRecord], RendezvousRecord]

#: Number of notification keys that are kept. A wait for an older version times out, as its key is gone.
KEPT_VERSIONS = 32


# The names of all keys. No other file spells one.

_ROOT = "ft_wrapper/rendezvous/1"

#: Register: the record. Never deleted.
RECORD_KEY = f"{_ROOT}/state"


def _key(kind: str) -> Callable[[str | int], str]:
    """Keys of one kind, by what distinguishes them."""
    return lambda which: f"{_ROOT}/{kind}/{which}"


# Notification key, by version of the record: waiters wake and read `RECORD_KEY`.
version_key = _key("version")
# Log, by epoch: admissions of nodes.
log_key = _key("log")
# Counter, by epoch: the admissions of a log. A hint; the log decides.
count_key = _key("count")
# Counter, by node id: number of agents that have had this id.
incarnations_key = _key("incarnations")
# Counter or lease, by name of a node: its heartbeat.
alive_key = _key("alive")
# By node id: the process of the last agent with this id; see `executor.note_process`.
process_key = _key("process")
# By round: the address of the store that its workers use.
endpoint_key = _key("endpoint")
# Notification key of `endpoint_key`.
wake_endpoint = _key("wake/endpoint")
# By round: prefix of the store that its agents share.
agents_prefix = _key("agents")
# By name of a node: set once it has seen that the rendezvous is closed and no longer needs the store.
goodbye_key = _key("goodbye")
# On etcd, by name of a node: set once it has left the store; the last node to leave removes all keys.
gone_key = _key("gone")


def done_key(name: str) -> str:
    """In the store that the agents of a round share: set once a node is done."""
    return f"done/{name}"


def end_key(node_id: str) -> str:
    """In the same store: how a node's ranks have ended; empty if that is not known."""
    return f"end/{node_id}"


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Turns errors of the store into torch's error for them."""
    try:
        yield
    except (StoreError, DistError) as error:
        raise elastic.RendezvousConnectionError(f"the rendezvous store cannot be used: {error}") from error


class RecordRegister:
    """The record in a store, for one thread.

    Args:
        store: a client of its own.
        initial: the record until one has been written.
        board: gets each record that is read or written; a new board when None.
    """

    def __init__(self, store: StoreMixin, initial: RendezvousRecord, board: "Board | None" = None) -> None:
        self.store = store
        self.board = Board() if board is None else board
        self._initial = initial

    def read(self) -> RendezvousRecord:
        """Reads the record.

        Raises:
            RendezvousStateError: the text is not a record.
        """
        return self._learn(read(self.store, RECORD_KEY) or "")

    def latest(self) -> RendezvousRecord:
        """The newest record that this process knows; reads it if the process knows none."""
        return self.board.record or self.read()

    def change(self, change: Change, timeout: float = 30.0) -> RendezvousRecord:
        """Changes the record; repeated on each newer record, until it is written or the change does nothing.

        Raises:
            RendezvousTimeoutError: other nodes were faster each time, for ``timeout`` seconds.
        """
        record, won = self.latest(), False
        deadline = self.store.now() + timeout
        while not won and (after := change(record)) != record:
            if self.store.now() > deadline:
                raise elastic.RendezvousTimeoutError(f"others changed the record first for {timeout:g} s")
            record, won = self.replace(record, after)
        return record

    def touch(self) -> None:
        """Writes a new version of the record with nothing else changed, which wakes all waiters."""
        self.change(lambda record: dataclasses.replace(record, version=record.version + 1))

    def replace(self, before: RendezvousRecord, after: RendezvousRecord) -> tuple[RendezvousRecord, bool]:
        """Replaces the record, unless another node has done so, and wakes the waiters.

        Returns:
            The record as it is now, and whether this call replaced it.

        Raises:
            RendezvousStateError: the record is gone, or cannot be read.
        """
        version = before.version + 1
        record = dataclasses.replace(after, version=version, writer=next(self.store.nonces))
        expected = before.to_json() if before.version else ""
        desired = record.to_json()
        held = self.store.execute([CompareAndSet(RECORD_KEY, expected, desired)])[0] or ""
        if held == desired:
            # The node that wrote the last version may have died before it could wake the other nodes.
            wakes = (self.store.wake_name(version_key(number)) for number in (version - 1, version))
            self.store.execute([Write(dict.fromkeys(wakes, ""))])
            if version > KEPT_VERSIONS:
                self.store.delete_key(self.store.wake_name(version_key(version - KEPT_VERSIONS)))
            if record.epoch > max(1, before.epoch):
                self.store.delete_key(log_key(record.epoch - 2))
                self.store.delete_key(count_key(record.epoch - 2))
            return self.board.learn(record), True
        if held == expected:
            raise elastic.RendezvousStateError(
                f"store key {RECORD_KEY!r} is gone: the store has lost what the nodes agreed on"
            )
        return self._learn(held), False

    def wait(self, version: int, seconds: float) -> RendezvousRecord | None:
        """Waits for the notification of the next version, then reads the record.

        The record is current even if this node was stopped meanwhile. But if the record is already
        `KEPT_VERSIONS` ahead when the wait begins, no notification comes.

        Returns:
            The record; None if no notification came in time: then the record has to be read.
        """
        return self.read() if self.store.wait_for(version_key(version + 1), seconds) is not None else None

    def pass_on(self, version: int) -> None:
        """Wakes the waiters for a version, in case its writer died before it could."""
        key = version_key(version)
        if not self.store.check([self.store.wake_name(key)]):
            self.store.execute([Notify(key, "")])

    def announce(self, epoch: int, admission: Admission) -> int:
        """Appends an admission to a log; returns the log's count of admissions, a hint."""
        self.store.execute([Append(log_key(epoch), admission.to_json())])
        return self.store.add(count_key(epoch), 1)

    def admissions(self, epoch: int) -> list[Admission]:
        """Reads a log.

        Raises:
            RendezvousStateError: an entry cannot be read.
        """
        key = log_key(epoch)
        lines = read_log(self.store, key)
        try:
            return [Admission.from_json(line, key) for line in lines]
        except StoreError as error:
            raise elastic.RendezvousStateError(f"{error}; use one version on all nodes") from error

    def _learn(self, text: str) -> RendezvousRecord:
        try:
            return self.board.learn(RendezvousRecord.from_json(text, RECORD_KEY) if text else self._initial)
        except StoreError as error:
            raise elastic.RendezvousStateError(str(error)) from error


class Board:
    """The newest record that this process knows, for all of its threads; and the agent's callbacks.

    Signals interrupt a thread that waits here, unlike one that waits in a TCPStore.

    Args:
        on_evicted: called with the seats of silent nodes that this node has just evicted, in the thread that
            sends the heartbeat. No other node's agent is notified. Under the policy ``rank`` the eviction is
            evidence of the death of all the silent node's ranks.
        on_change: called with each new record, in the thread that waits for changes.
        on_lost: called once when the store is lost and no later change will be seen, in the thread that
            noticed it.

    Attributes:
        record: the newest record; None if none is known yet.
    """

    def __init__(
        self,
        on_evicted: Callable[[tuple[Seat, ...]], None] | None = None,
        on_change: Callable[[RendezvousRecord], None] | None = None,
        on_lost: Callable[[Exception], None] | None = None,
    ) -> None:
        self.on_evicted = _guarded("on_evicted", on_evicted)
        self.on_change = _guarded("on_change", on_change)
        self._on_lost = _guarded("on_lost", on_lost)
        self._changed = threading.Condition()
        self.record: RendezvousRecord | None = None
        self._lost: Exception | None = None

    def known(self) -> RendezvousRecord:
        """The newest record, which must be known."""
        assert self.record is not None
        return self.record

    def learn(self, record: RendezvousRecord) -> RendezvousRecord:
        """Keeps a record if it is newer; returns the same record."""
        with self._changed:
            if self.record is None or record.version > self.record.version:
                self.record = record
                self._changed.notify_all()
        return record

    def lose(self, error: Exception) -> None:
        """Notes that the store is lost, so that no later change will be seen."""
        with self._changed:
            is_first = self._lost is None
            self._lost = self._lost or error
            self._changed.notify_all()
        if is_first:
            self._on_lost(error)

    def check(self) -> None:
        """Raises RendezvousConnectionError if the store is lost."""
        if self._lost is not None:
            raise elastic.RendezvousConnectionError(
                f"the rendezvous store is lost: {self._lost}"
            ) from self._lost

    def wait(self, version: int, seconds: float | None = None) -> RendezvousRecord | None:
        """Waits for a record newer than this version; None if none came in time.

        Raises:
            RendezvousConnectionError: the store is lost.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or self._newer(version), seconds)
            if self._newer(version):
                return self.record
        self.check()
        return None

    @property
    def is_closed(self) -> bool:
        """Whether the rendezvous is known to be closed."""
        return self.record is not None and self.record.closed

    def _newer(self, version: int) -> bool:
        return self.record is not None and self.record.version > version


def _guarded(name: str, function: Callable[[T], object] | None) -> Callable[[T], None]:
    """Logs errors of an agent's callback, which must not end the thread that keeps the node in."""

    def call(argument: T) -> None:
        try:
            if function is not None:
                function(argument)
        except Exception:
            log.exception("%s of the rendezvous failed", name)

    return call
