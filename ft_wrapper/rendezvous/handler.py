"""The handler that agents use, ours and torch's: `FtRendezvousHandler`."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistError, DistStoreError
from torch.distributed.elastic import rendezvous as elastic

from ..exception import StoreError
from ..store.bounded import in_background
from . import moves, operations
from .backends import Backend, WorkerStores, make_backend
from .executor import Executor, await_predecessor
from .node_ids import new_node_id
from .presence import Presence
from .record import Node, RendezvousRecord, RoundPolicy
from .register import (
    Board,
    Change,
    RecordRegister,
    agents_prefix,
    goodbye_key,
    incarnations_key,
    store_errors,
)
from .settings import (
    ETCD_NAMES,
    Identity,
    RendezvousSettings,
    parameters_from_url,
    read_parameters,
)

log = logging.getLogger(__name__)

# Seconds for which the host of the store waits until the other nodes have seen that the rendezvous is closed.
_GOODBYE = 5.0
_JOIN_THREAD = 5.0


class FtRendezvousHandler(elastic.RendezvousHandler):
    """One node's part in the rendezvous.

    It has two threads from the first `next_rendezvous` until `shutdown` or `leave`. One waits for changes of
    the record, so that `num_nodes_waiting` and `is_closed` cost no request; one sends the node's heartbeat.

    Args:
        settings: timeouts and options.
        identity: this node, as configured.
        backend: where the record is kept; the handler closes it.
        board: holds the newest record and the agent's callbacks; a new board when None.

    Attributes:
        backend: where the record is kept.
        board: holds the newest record; may be waited on for a change.
        node: this node; None before `begin` or the first `next_rendezvous`.
        joined: the record in which the node last got its seat; None before that.
    """

    def __init__(
        self, settings: RendezvousSettings, identity: Identity, backend: Backend, board: Board | None = None
    ) -> None:
        self.settings = settings
        self.identity = identity
        self.backend = backend
        self.board = board or Board()
        self._initial = RendezvousRecord(
            settings.min_nodes, settings.max_nodes, settings.options(), hosted=backend.hosts_workers
        )
        self.node: Node | None = None
        self.joined: RendezvousRecord | None = None
        self._presence: Presence | None = None
        self._workers = WorkerStores(backend, self.board, settings)
        self._side: RecordRegister | None = None
        self._side_lock = threading.Lock()
        self._opened = contextlib.ExitStack()
        self._opened.callback(backend.close)
        self._opened.callback(self._workers.close)
        self._ended = False

    # What torch asks for ---------------------------------------------------------------------------------

    def get_backend(self) -> str:
        """The backend's name for ``--rdzv-backend``."""
        return self.backend.name

    def get_run_id(self) -> str:
        """The job's id."""
        return self.settings.run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether the store at MASTER_ADDR and MASTER_PORT is up before the workers start. It always is."""
        return True

    @property
    def was_spare(self) -> bool:
        """Whether this node waited as a spare before it got its seat in the last round."""
        return self._presence is not None and self._presence.executor.was_spare

    def next_rendezvous(self) -> elastic.RendezvousInfo:
        """Takes part in the next round, or in the running one under the policy ``rank``.

        Returns:
            Group rank and size, a store for the agents of the round, and the address of a fresh store for its
            workers.

        Raises:
            RendezvousClosedError: the rendezvous is closed.
            RendezvousGracefulExitError: the rendezvous is closed, and this node was a spare.
            RendezvousTimeoutError: not enough nodes joined; names those that did.
            RendezvousConnectionError: the store is lost.
            RendezvousStateError: the record cannot be read.
            RendezvousError: the options differ from other nodes', or another agent has this node's id.
        """
        with store_errors():
            presence = self.begin()
            presence.release()
            while True:
                leaving = None if self.joined is None else self.joined.round
                record = self.joined = presence.executor.join(leaving)
                presence.forget_predecessors()
                seat, size = record.seat_of(presence.node), len(record.seats)
                assert seat is not None and seat.group_rank is not None
                if seat.group_rank == 0 and record.policy is RoundPolicy.GROUP:
                    workers = self._workers.open(presence.store, record.round, presence.node.address)
                elif (found := self._workers.find(presence.store, record)) is not None:
                    workers = found
                else:
                    continue  # the round was lost before it began
                what = (self.settings.run_id, self.node, seat.group_rank, size, record.round)
                log.info("job %s: node %s has group rank %d of %d in round %d", *what)
                return elastic.RendezvousInfo(self.agents_store(), seat.group_rank, size, workers)

    def is_closed(self) -> bool:
        """Whether the rendezvous is closed. Answers from memory once this node has taken part."""
        record = self.record
        if record is None:
            return self.refresh().closed
        if not record.closed:
            self.board.check()
        return record.closed

    def set_closed(self, reason: str = "", result: str = "") -> None:
        """Closes the rendezvous for all nodes. The first reason and result are kept.

        Args:
            reason: why it is closed, for the agents; empty if the ranks ended on their own.
            result: how the job has ended, for the agents.
        """

        def close() -> None:
            try:
                self.change(lambda record: moves.close(record, reason, result))
            except Exception as error:
                self.board.lose(error)

        if not self.board.is_closed:
            # Not in this thread: if another node closes the rendezvous too, and hosts the store, the store
            # may be gone before this client gets its answer.
            in_background("closing the rendezvous", close)
        while not self.board.is_closed:
            self.board.wait(-1 if self.record is None else self.record.version)

    def num_nodes_waiting(self) -> int:
        """How many nodes wait for the next round. Answers from memory.

        A node that was evicted from its round counts itself, since it has to join again.

        Raises:
            RendezvousConnectionError: the store is lost.
        """
        self.board.check()
        record, node = self.record, self.node
        if record is None or node is None or self.joined is None:
            return 0
        return operations.nodes_waiting(record, node, self.joined.round)

    def shutdown(self, result: str = "") -> bool:
        """Ends this node's part, and closes the rendezvous if the node takes part at this time.

        A node that was never in a round, or was evicted, only leaves: it must not end the other nodes' job.

        Args:
            result: how the job has ended, for late agents.

        Returns:
            Whether the other nodes were notified.
        """
        record, node = self.record, self.node
        takes_part = record is not None and node is not None and record.place_of(node) is not None
        try:
            if self.joined is not None and takes_part:
                self.set_closed(result=result)
            if self.board.is_closed:
                if self.backend.is_host:  # the store stays until the other nodes have seen the end
                    self._await_goodbyes()
            else:
                self.leave()
            return True
        except elastic.RendezvousError as error:
            log.warning("job %s: the rendezvous could not be shut down: %s", self.settings.run_id, error)
            return False
        finally:
            self._end()

    # What only our agent asks for --------------------------------------------------------------------------

    @store_errors()
    def begin(self) -> Presence:
        """Connects without asking for a place; `next_rendezvous` does both. A second call does nothing.

        Returns:
            The node's presence: its heartbeat, its place, its quarantine.

        Raises:
            RendezvousConnectionError: the store is lost.
            RendezvousError: the options differ from other nodes', or another agent has this node's id.
        """
        self._check()
        if self._presence is None:
            register = self._connect()
            self.node = self._make_node(register)
            executor = Executor(self.node, register, self.settings)
            self._presence = Presence(executor, self._new_register)
        return self._presence

    @property
    def record(self) -> RendezvousRecord | None:
        """The newest known record; None before the first `next_rendezvous`."""
        return self.board.record

    def agents_store(self) -> Store:
        """Another client of the store that the agents of this node's round share."""
        assert self.joined is not None
        return self.backend.agents_store(agents_prefix(self.joined.round))

    def refresh(self) -> RendezvousRecord:
        """Reads the record from the store.

        Raises:
            RendezvousConnectionError: the store is lost.
        """
        with self._side_register() as register:
            return register.read()

    def change(self, change: Change) -> RendezvousRecord:
        """Changes the record, for what is not this node's own part.

        Args:
            change: makes the new record from the old one; called again if another node was faster.

        Raises:
            RendezvousConnectionError: the store is lost.
        """
        with self._side_register() as register:
            return register.change(change, self.settings.close_timeout)

    def adopt_rank_policy(self) -> bool:
        """Changes the policy to ``rank``, once the job has formed and ranks can be replaced one by one.

        Returns:
            Whether the policy is ``rank`` now. It is not while nodes leave the round for the next one.
        """
        return self.change(moves.adopt_rank_policy).policy is RoundPolicy.RANK

    def leave(self) -> None:
        """Gives up this node's place, if it has one, and ends its part. The other nodes go on.

        Raises:
            RendezvousConnectionError: the store is lost; the node's part has ended nevertheless.
        """
        try:
            if self._presence is not None and not self.board.is_closed:
                with store_errors():
                    self.board.check()
                    self._presence.give_up()
                    self._presence.release()  # a node that has left is not in quarantine
        finally:
            self._end()

    def abandon(self) -> None:
        """Ends this node's part without notifying the other nodes, since the store does not answer."""
        self._end(patience=0.0)  # the threads may still wait for an answer

    # Parts -------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._ended:
            raise elastic.RendezvousStateError(
                f"this handler of {self.settings.run_id!r} was shut down; make another one"
            )
        self.board.check()

    def _make_node(self, register: RecordRegister) -> Node:
        identity = self.identity
        node_id = identity.node_id or new_node_id()
        if identity.is_index:
            await_predecessor(register, node_id, self.settings)
        incarnation = register.store.add(incarnations_key(node_id), 1) - 1
        address = identity.address or self.backend.local_address()
        return Node(node_id, incarnation, address, identity.nproc, identity.role)

    def _new_register(self) -> RecordRegister:
        return RecordRegister(self.backend.connect(), self._initial, self.board)

    def _connect(self) -> RecordRegister:
        """Opens a client that `_end` closes."""
        register = self._new_register()
        self._opened.callback(register.store.close)
        return register

    @contextlib.contextmanager
    def _side_register(self) -> Iterator[RecordRegister]:
        """The record, through a second client, since `next_rendezvous` may run in another thread."""
        with store_errors(), self._side_lock:
            self._check()
            if self._side is None:
                self._side = self._connect()
            yield self._side

    # The end -----------------------------------------------------------------------------------------------

    def _await_goodbyes(self) -> None:
        with self._side_register() as register:
            others = self._others(register.latest())
            try:
                register.store.wait(list(map(goodbye_key, others)), timedelta(seconds=_GOODBYE))
            except DistStoreError:
                log.info("job %s: not all nodes have seen the end of the rendezvous", self.settings.run_id)

    def _end(self, patience: float = _JOIN_THREAD) -> None:
        """Ends the threads, waits for them, and closes all clients. A second call does nothing."""
        self._ended = True
        presence, self._presence = self._presence, None
        self._side = None
        with self._opened:
            if presence is not None:
                presence.end(patience)
                if patience:
                    self._tidy_up(presence)

    def _others(self, record: RendezvousRecord) -> list[str]:
        """Names of all other nodes that use the store: in the record, or in quarantine."""
        names = {node.name for node in record.nodes} | {one.node.name for one in record.quarantine}
        return sorted(names - {self.node.name} if self.node is not None else names)

    def _tidy_up(self, presence: Presence) -> None:
        """Once the rendezvous is closed, the last node removes the store's contents, unless a node hosts it.

        Not if a node was lost: if it comes back, it must not find an empty store and start over, unless the
        job is to be tried again.
        """
        record = self.record
        if self.backend.hosts_workers or record is None or not record.closed:
            return
        if not record.may_start_over and any(seat.occupant is None for seat in record.seats):
            return
        try:
            self.backend.leave(presence.node.name, self._others(record))
        except (StoreError, DistError) as error:
            log.debug("%s: nothing was tidied up: %s", self.settings.run_id, error)


def create_handler(parameters: elastic.RendezvousParameters) -> FtRendezvousHandler:
    """Makes a handler from torch's parameters.

    Args:
        parameters: as torchrun makes them; see `settings.read_parameters`.

    Raises:
        ValueError: a parameter is unknown or wrong; names it and says what to do.
        RendezvousConnectionError: no store answers at the endpoint, or the port is taken.
    """
    return FtRendezvousHandler(*read_parameters(parameters), make_backend(parameters))


class EtcdRendezvousHandler(FtRendezvousHandler):
    """The handler on etcd, from a URL: ``etcd://HOST:PORT,HOST:PORT/JOB_ID?min_workers=1&max_workers=2``.

    Further options: ``timeout`` (seconds within which enough nodes have to join, 600), ``last_call_timeout``
    (seconds to wait for more nodes once there are enough, 30), ``etcd_prefix`` (prefix of all keys,
    ``ft_wrapper``), and those of ``--rdzv-conf``.

    Args:
        url: members of etcd, the job's id, and how many nodes take part.

    Raises:
        ValueError: the URL is malformed; with the reason.
        RendezvousConnectionError: etcd cannot be reached, or refuses; with the reason.
    """

    def __init__(self, url: str) -> None:
        parameters = parameters_from_url(url)
        if parameters.backend not in ETCD_NAMES:
            raise ValueError(f"rendezvous URL {url!r}: must begin with etcd://")
        super().__init__(*read_parameters(parameters), make_backend(parameters))
