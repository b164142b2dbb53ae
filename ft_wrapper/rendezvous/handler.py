"""The handler that an agent uses, torch's own agents too: `FtRendezvousHandler`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistError, DistStoreError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from .._addresses import host_port, split_host_port
from ..exception import StoreError
from ..store import StoreMixin
from . import keys, operations
from .backend import Backend, TcpBackend, WorkerStore
from .etcd_backend import EtcdBackend
from .executor import Executor, OnUnseated
from .interruptible import interruptible
from .keep_alive import NeighbourWatch
from .register import Register, Snapshot
from .settings import (
    ETCD_NAMES,
    EtcdOptions,
    Identity,
    Settings,
    TcpOptions,
    new_node_id,
    parameters_from_url,
    read_parameters,
)
from .state import GROUP, RANK, Node, Seat, State, adopt_rank_policy
from .watch import Board, Heart, OnChange, OnLost, Watcher

log = logging.getLogger(__name__)

_GOODBYE = 5.0
"""Seconds for which the node that hosts the store waits for the others to see that all is over."""
_JOIN_THREAD = 5.0


class FtRendezvousHandler(RendezvousHandler):
    """One node's part in the rendezvous.

    It has two threads from the first `next_rendezvous` on until `shutdown` or `leave`: one waits for changes
    of the record, so that `num_nodes_waiting` and `is_closed` cost nothing; one keeps the node alive.

    Args:
        settings: timeouts and options.
        identity: who this node is.
        backend: where the record is kept; the handler closes it.
        on_unseated: told which seats this node has taken from silent nodes, right after it has: it is the
            only one that is told, and under the policy ``rank`` that is evidence of the death of all the
            node's ranks. Called in the thread that keeps the node alive.
        on_change: told each new record. Called in the thread that waits for them.
        on_lost: told, once, that the store cannot be reached any more: nothing new will come. Called in the
            thread that noticed.
    """

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        backend: Backend,
        on_unseated: OnUnseated | None = None,
        on_change: OnChange | None = None,
        on_lost: OnLost | None = None,
    ) -> None:
        self.settings = settings
        self.identity = identity
        self.on_unseated = on_unseated
        self.on_change = on_change
        self._backend = backend
        self._board = Board(on_lost)
        self._initial = State(
            settings.min_nodes, settings.max_nodes, settings.options(), hosted=backend.hosts_workers
        )
        self._node: Node | None = None
        self._round: int | None = None
        self._joined: State | None = None
        self._executor: Executor | None = None
        self._register: Register | None = None
        self._side: Executor | None = None
        self._side_lock = threading.Lock()
        self._watcher: Watcher | None = None
        self._heart: Heart | None = None
        self._clients: list[StoreMixin] = []
        self._worker_store: WorkerStore | None = None
        self._ended = False

    # What torch asks for ---------------------------------------------------------------------------------

    def get_backend(self) -> str:
        """What ``--rdzv-backend`` calls it."""
        return self._backend.name

    def get_run_id(self) -> str:
        """The job's id."""
        return self.settings.run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether the store at MASTER_ADDR and MASTER_PORT is there before the workers are. It always is."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Takes part in the next round; in the running one under the policy ``rank``.

        Returns:
            Group rank and size, a store for the agents of the round, and the address of a fresh one for its
            workers.

        Raises:
            RendezvousClosedError: all is over.
            RendezvousGracefulExitError: all is over, and this node was a spare.
            RendezvousTimeoutError: not enough nodes came; says how many of how many, and who.
            RendezvousConnectionError: the store cannot be reached any more.
            RendezvousStateError: the record cannot be read.
            RendezvousError: the options differ from those of the others, or another agent has this node's id.
        """
        with _store_errors():
            self._start()
            assert self._executor is not None
            while True:
                leaving = self._round
                snapshot = self._executor.join(leaving)
                self._round, self._joined = snapshot.state.round, snapshot.state
                self._forget_predecessors()
                info = self._info(snapshot.state)
                if info is not None:
                    log.info(
                        "job %s: node %s has group rank %d of %d in round %d",
                        self.settings.run_id,
                        self._node,
                        info.rank,
                        info.world_size,
                        snapshot.state.round,
                    )
                    return info

    def is_closed(self) -> bool:
        """Whether all is over. From memory once this node has taken part."""
        known = self._board.latest()
        if known is None:
            with _store_errors():
                return self._with_side(lambda side: side.refresh()).state.closed
        if not known.state.closed:
            self._board.check()
        return known.state.closed

    def set_closed(self, reason: str = "") -> None:
        """Ends it all, for all nodes.

        Args:
            reason: why, for their agents; empty if the job has ended well. The first one stands.
        """
        known = self._board.latest()
        if known is not None and known.state.closed:
            return
        with _store_errors():
            self._with_side(lambda side: side.close(reason))

    def num_nodes_waiting(self) -> int:
        """How many nodes wait for the next round. From memory.

        A node that was taken out of the round that it believes to be in counts itself: it has to come again.

        Raises:
            RendezvousConnectionError: the store cannot be reached any more.
        """
        self._board.check()
        state, node = self.state, self._node
        if state is None or node is None or self._round is None:
            return 0
        return operations.nodes_waiting(state, node, self._round)

    def shutdown(self) -> bool:
        """Ends this node's part; and that of all others, if it takes part at this time.

        A node that was never given a round, or was taken out, only leaves: it must not end the others' job.

        Returns:
            Whether the others could be told.
        """
        state, node = self.state, self._node
        takes_part = state is not None and node is not None and state.place_of(node) is not None
        try:
            if self._round is not None and takes_part:
                self.set_closed()
                self._wait_for_goodbyes()
                self._end()
            else:
                self.leave()
            return True
        except RendezvousError as error:
            log.warning("job %s: the rendezvous could not be shut down: %s", self.settings.run_id, error)
            return False
        finally:
            self._end()

    # What our agent asks for beside ------------------------------------------------------------------------

    @property
    def node(self) -> Node | None:
        """This node; None before the first `next_rendezvous`."""
        return self._node

    @property
    def state(self) -> State | None:
        """The newest record that is known; None before the first `next_rendezvous`."""
        known = self._board.latest()
        return None if known is None else known.state

    @property
    def seat(self) -> Seat | None:
        """This node's seat; None if it has none."""
        state, node = self.state, self._node
        return None if state is None or node is None else state.seat_of(node)

    @property
    def joined(self) -> State | None:
        """The record in which this node was given its seat at last; None before that."""
        return self._joined

    @property
    def is_host(self) -> bool:
        """Whether the others lose the rendezvous store when this node ends."""
        return self._backend.is_host

    def agents_store(self) -> Store:
        """Another client of the store that the agents of this node's round share."""
        assert self._round is not None
        return self._backend.agents_store(keys.agents(self._round))

    def workers_store(self, round_number: int) -> str:
        """Address of the store in which the workers of a round agree, if it outlives all nodes; else empty.

        Args:
            round_number: the round.
        """
        return self._backend.workers_store(round_number)

    def refresh(self) -> State:
        """Reads the record, as it is now.

        Raises:
            RendezvousConnectionError: the store cannot be reached any more.
        """
        with _store_errors():
            return self._with_side(lambda side: side.refresh()).state

    def wait_for_change(self, version: int, timeout: float) -> State | None:
        """Waits until the record is newer than a version.

        Args:
            version: ``state.version`` of a record that is known.
            timeout: seconds.

        Returns:
            The newest record; None if there is no newer one in time.

        Raises:
            RendezvousConnectionError: the store cannot be reached any more.
        """
        snapshot = self._board.wait(version, timeout)
        return None if snapshot is None else snapshot.state

    def adopt_rank_policy(self) -> bool:
        """Goes over to the policy ``rank``: the job has a head, so its ranks can be replaced one by one.

        Returns:
            Whether the policy is ``rank`` now. It is not while the nodes are on their way to the next round.
        """
        with _store_errors():
            state = self._with_side(lambda side: side.change(adopt_rank_policy)).state
        return state.policy == RANK

    def leave(self) -> None:
        """Gives up this node's place, if it has any, and ends its part. The others go on.

        Raises:
            RendezvousConnectionError: the store cannot be reached any more; the part is ended nevertheless.
        """
        try:
            state, node = self.state, self._node
            if self._executor is not None and node is not None and state is not None and not state.closed:
                with _store_errors():
                    self._board.check()
                    self._give_up(node)
        finally:
            self._end()

    def abandon(self) -> None:
        """Ends this node's part without a word to the others, since the store does not answer."""
        self._ended = True
        for thread in (self._heart, self._watcher):
            if thread is not None:
                thread.stop()
        self._heart = self._watcher = None  # they may wait for an answer yet; no one waits for them
        self._executor = None
        self._end()

    # Parts -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._ended:
            raise RendezvousStateError(
                f"this handler of {self.settings.run_id!r} was shut down; make another one"
            )
        self._board.check()
        if self._executor is not None:
            return
        store = self._connect()
        register = Register(store, self._initial)
        node = self._node = self._make_node(store)
        executor = self._make_executor(register)
        executor.check(executor.refresh().state)
        heart_store = self._backend.connect()
        heart_executor = self._make_executor(Register(heart_store, self._initial))
        self._watcher = Watcher(
            node, Register(self._backend.connect(), self._initial), self._board, self.on_change
        )
        self._heart = Heart(
            node,
            heart_executor,
            NeighbourWatch(
                heart_store, node, self.settings.keep_alive_timeout, self.settings.keep_alive_interval
            ),
            self._board,
            self.settings.keep_alive_interval,
            heart_store.close,
        )
        self._executor, self._register = executor, register
        self._watcher.start()
        self._heart.start()

    def _make_node(self, store: StoreMixin) -> Node:
        identity = self.identity
        address = identity.address or self._backend.local_address()
        if identity.node_id is None:
            return Node(new_node_id(), 0, address, identity.nproc, identity.role)
        incarnation = store.add(keys.incarnations(identity.node_id), 1) - 1
        return Node(identity.node_id, incarnation, address, identity.nproc, identity.role)

    def _make_executor(self, register: Register) -> Executor:
        assert self._node is not None
        return Executor(self._node, register, self._board, self.settings, self._unseated)

    def _unseated(self, seats: tuple[Seat, ...]) -> None:
        if self.on_unseated is None:
            return
        try:
            self.on_unseated(seats)
        except Exception:
            log.exception("on_unseated of the rendezvous failed")

    def _connect(self) -> StoreMixin:
        client = self._backend.connect()
        self._clients.append(client)
        return client

    def _with_side(self, act: Callable[[Executor], Snapshot]) -> Snapshot:
        """Uses a client of its own, since `next_rendezvous` may be under way in another thread."""
        with self._side_lock:
            if self._ended:
                raise RendezvousStateError(f"this handler of {self.settings.run_id!r} was shut down")
            self._board.check()
            if self._side is None:
                register = Register(self._connect(), self._initial)
                node = self._node or Node(new_node_id())
                self._side = Executor(node, register, self._board, self.settings)
            return act(self._side)

    def _info(self, state: State) -> RendezvousInfo | None:
        """What the agent needs to know of the round; None if the round is lost before it has begun."""
        assert self._node is not None
        seat = state.seat_of(self._node)
        assert seat is not None
        assert seat.group_rank is not None
        if seat.group_rank == 0 and state.policy == GROUP:
            info = self._open_worker_store(state.round)
        else:
            found = self._find_worker_store(state)
            if found is None:
                return None
            info = found
        return RendezvousInfo(
            self._backend.agents_store(keys.agents(state.round)), seat.group_rank, len(state.seats), info
        )

    def _open_worker_store(self, number: int) -> RendezvousStoreInfo:
        assert self._register is not None
        assert self._node is not None
        store = self._register.store
        worker_store = WorkerStore(self._node.address)
        before, self._worker_store = self._worker_store, worker_store
        if before is not None:
            before.close()
        store.set(keys.endpoint(number), host_port(worker_store.address, worker_store.port))
        self._forget_round(number - 2)
        return RendezvousStoreInfo(worker_store.address, worker_store.port)

    def _forget_predecessors(self) -> None:
        """Deletes the signs of life of agents that had this id: no one watches them once this one is in.

        Of two, since the last one may never have got as far as this.
        """
        assert self._node is not None
        assert self._register is not None
        for incarnation in range(max(0, self._node.incarnation - 2), self._node.incarnation):
            before = dataclasses.replace(self._node, incarnation=incarnation)
            self._register.store.delete_key(keys.alive(before.name))

    def _find_worker_store(self, state: State) -> RendezvousStoreInfo | None:
        assert self._register is not None
        store, key = self._register.store, keys.endpoint(state.round)
        if self._worker_store is not None and state.policy == GROUP:
            self._worker_store.close()
            self._worker_store = None
        deadline = store.now() + self.settings.join_timeout
        # A caller that is interrupted leaves this client waiting, and needs the other to give up its place.
        waiting = self._backend.connect()
        try:
            while not interruptible(lambda: waiting.wait_for(key, self.settings.keep_alive_timeout)):
                newest = self._board.latest()
                assert newest is not None
                if newest.state.round != state.round or newest.state.closed or _is_empty(newest.state, 0):
                    return None
                if store.now() >= deadline:
                    raise RendezvousTimeoutError(
                        f"node {state.seats[0].occupant}, which has group rank 0 in round {state.round} of "
                        f"the rendezvous {self.settings.run_id!r}, has not opened the store of the workers "
                        f"within {self.settings.join_timeout:g} s"
                    )
        finally:
            waiting.close()
        text = store.try_get(key) or ""
        address, port = split_host_port(text)
        if not address or not port.isdecimal():
            raise RendezvousStateError(f"store key {key!r} holds {text!r}, which is no address")
        return RendezvousStoreInfo(address, int(port))

    def _forget_round(self, number: int) -> None:
        """Deletes what the agents of an old round told each other."""
        assert self._register is not None
        if number < 0:
            return
        store = self._register.store
        store.delete_key(keys.endpoint(number))
        prefix = f"{keys.agents(number)}/"
        for key in store.list_keys():
            if key.startswith(prefix):
                store.delete_key(key)
        self._backend.forget_workers_store(number)

    # The end -----------------------------------------------------------------------------------------------

    def _give_up(self, node: Node) -> None:
        # Also where it was joining, in a thread that was interrupted there.
        assert self._executor is not None
        self._executor.exit()
        assert self._watcher is not None
        self._watcher.stop()
        known = self._board.latest()
        assert known is not None
        if self._watcher.is_alive() and not known.state.closed:
            # Nothing may have changed; one change, and the thread is woken.
            self._executor.touch()

    def _wait_for_goodbyes(self) -> None:
        """The node that hosts the store stays until the others have seen that all is over."""
        state = self.state
        if not self._backend.is_host or state is None or self._register is None:
            return
        others = [node for node in state.nodes if self._node is None or node.name != self._node.name]
        with _store_errors(), self._side_lock:
            try:
                self._register.store.wait(
                    [keys.goodbye(node.name) for node in others], timedelta(seconds=_GOODBYE)
                )
            except DistStoreError:
                log.info("job %s: not all nodes have seen the end of the rendezvous", self.settings.run_id)

    def _end(self) -> None:
        """Ends the threads and lets go of everything. Again without harm."""
        self._ended = True
        if self._heart is not None:
            self._heart.stop()
        if self._watcher is not None:
            self._watcher.stop()
        for thread in (self._heart, self._watcher):
            if thread is not None and thread is not threading.current_thread():
                thread.join(_JOIN_THREAD)
        self._heart = self._watcher = None
        self._tidy_up()
        self._executor = self._register = self._side = None
        for client in self._clients:
            client.close()
        self._clients.clear()
        if self._worker_store is not None:
            self._worker_store.close()
            self._worker_store = None
        self._backend.close()

    def _tidy_up(self) -> None:
        """If all is over, the last one that lets go of the store removes it, where no node hosts it.

        Not if a node was lost: it may come back, and must not find an empty store, and begin again.
        """
        state, node = self.state, self._node
        if self._backend.hosts_workers or self._executor is None or state is None or node is None:
            return
        if not state.closed or any(seat.occupant is None for seat in state.seats):
            return
        try:
            self._backend.leave(node.name, [other.name for other in state.nodes if other.name != node.name])
        except (StoreError, DistError) as error:
            log.debug("%s: nothing was tidied up: %s", self.settings.run_id, error)


def create_handler(parameters: RendezvousParameters) -> FtRendezvousHandler:
    """Makes a handler, from torch's parameters.

    Args:
        parameters: as torchrun makes them; see `settings.read_parameters`.

    Raises:
        ValueError: a parameter is unknown or wrong; names it and the way out.
        RendezvousConnectionError: no one answers at the endpoint, or the port is taken.
    """
    settings, identity, options = read_parameters(parameters)
    return FtRendezvousHandler(settings, identity, make_backend(parameters, options))


def create_handler_from_url(url: str) -> FtRendezvousHandler:
    """The same from a URL: ``ft://HOST:PORT/RUN_ID?min_nodes=1&max_nodes=2``, or ``etcd://…``."""
    return create_handler(parameters_from_url(url))


class EtcdRendezvousHandler(FtRendezvousHandler):
    """The handler on etcd, from a URL: ``etcd://HOST:PORT,HOST:PORT/JOB_ID?min_workers=1&max_workers=2``.

    Further options: ``timeout`` (seconds within which enough nodes have to come, 600), ``last_call_timeout``
    (seconds for which those who are enough wait for more, 30), ``etcd_prefix`` (in front of all keys,
    ``ft_wrapper``), and those of ``--rdzv-conf``.

    Args:
        url: where, which job, and how many nodes.

    Raises:
        ValueError: the URL cannot be right; says why.
        RendezvousConnectionError: etcd cannot be reached, or refuses; says why.
    """

    def __init__(self, url: str) -> None:
        parameters = parameters_from_url(url)
        if parameters.backend not in ETCD_NAMES:
            raise ValueError(f"rendezvous URL {url!r}: must begin with etcd://")
        settings, identity, options = read_parameters(parameters)
        super().__init__(settings, identity, make_backend(parameters, options))


def make_backend(parameters: RendezvousParameters, options: TcpOptions | EtcdOptions) -> Backend:
    """Connects to where the record is kept.

    Args:
        parameters: torch's.
        options: what `settings.read_parameters` has made of them.

    Raises:
        ValueError: a parameter is wrong; names it and the way out.
        RendezvousConnectionError: no one answers at the endpoint, or the port is taken.
    """
    if isinstance(options, EtcdOptions):
        return EtcdBackend(options.address, options.read_timeout, parameters.backend)
    return TcpBackend(parameters.endpoint, options, parameters.backend)


def _is_empty(state: State, group_rank: int) -> bool:
    return any(seat.group_rank == group_rank and seat.occupant is None for seat in state.seats)


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    """Errors of the store become torch's error for that."""
    try:
        yield
    except (StoreError, DistError) as error:
        raise RendezvousConnectionError(f"the rendezvous store cannot be used: {error}") from error
