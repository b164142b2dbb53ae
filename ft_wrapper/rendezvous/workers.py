"""The store that the workers of a round use: fresh in each round, so that nothing of an earlier one is in it.

Where no store outlives all nodes, the node of group rank 0 hosts it; the others learn its address from the
rendezvous store.
"""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from ..protocol.operations import read
from ..store import StoreOperations, serve
from ..store.address import host_port, split_host_port
from ..store.bounded import call_in_thread
from .backends import Backend
from .record import Record, RoundPolicy
from .register import Board, agents_prefix, endpoint_key
from .settings import Settings

_TIMEOUT = timedelta(seconds=30)  # of operations on it


class WorkerStore:
    """The store of one round, hosted by this process.

    Args:
        address: this node, as the others reach it.
        port: where it listens; 0 for a free port.

    Raises:
        RendezvousConnectionError: it cannot be opened.
    """

    def __init__(self, address: str, port: int = 0) -> None:
        try:
            store = serve(address, port, _TIMEOUT)
        except OSError as error:
            raise RendezvousConnectionError(
                f"the store of the workers cannot be opened at {address}: {error}; give an address of "
                "this node that the others reach with --local-addr"
            ) from error
        self.address = address
        self.port: int = store.port
        self._store: Store | None = store

    def close(self) -> None:
        """Ends it."""
        self._store = None


class WorkerStores:
    """The workers' stores of one round after the other, as one node sees them.

    Args:
        backend: where the record is kept.
        board: the newest record.
        settings: of the rendezvous.
    """

    def __init__(self, backend: Backend, board: Board, settings: Settings) -> None:
        self._backend = backend
        self._board = board
        self._settings = settings
        self._hosted: WorkerStore | None = None

    def open(self, store: StoreOperations, number: int, address: str) -> RendezvousStoreInfo:
        """Opens the store of a round on this node, and tells the others.

        Args:
            store: a client of the rendezvous store.
            number: of the round.
            address: this node's.
        """
        hosted = WorkerStore(address)
        self.close()
        self._hosted = hosted
        store.set(endpoint_key(number), host_port(hosted.address, hosted.port))
        if number >= 2:
            self._forget(store, number - 2)
        return RendezvousStoreInfo(hosted.address, hosted.port)

    def find(self, store: StoreOperations, record: Record) -> RendezvousStoreInfo | None:
        """Waits for the address of the store that another node opens; None if the round is lost before.

        Args:
            store: a client of the rendezvous store.
            record: in which the round is complete.

        Raises:
            RendezvousTimeoutError: that node has not opened it in time.
            RendezvousStateError: what it has written is no address.
        """
        key = endpoint_key(record.round)
        if record.policy is RoundPolicy.GROUP:
            self.close()
        deadline, limit = store.now() + self._settings.join_timeout, self._settings.keep_alive_timeout
        # A caller that is interrupted leaves this client waiting, and needs the other to give up its place.
        waiting = self._backend.connect()
        try:
            while call_in_thread(lambda: waiting.hear(key, limit), "waiting for the workers' store") is None:
                if self._is_lost(record.round):
                    return None
                if store.now() >= deadline:
                    raise RendezvousTimeoutError(
                        f"node {record.seats[0].occupant}, which has group rank 0 in round {record.round} of "
                        f"the rendezvous {self._settings.run_id!r}, has not opened the store of the workers "
                        f"within {self._settings.join_timeout:g} s"
                    )
        finally:
            waiting.close()
        text = read(store, key) or ""
        address, port = split_host_port(text)
        if not address or not port.isdecimal():
            raise RendezvousStateError(f"store key {key!r} holds {text!r}, which is no address")
        return RendezvousStoreInfo(address, int(port))

    def close(self) -> None:
        """Ends the store that this node hosts, if any."""
        if self._hosted is not None:
            self._hosted.close()
            self._hosted = None

    def _is_lost(self, number: int) -> bool:
        newest = self._board.latest()
        assert newest is not None
        record = newest.record
        no_host = any(seat.group_rank == 0 and seat.occupant is None for seat in record.seats)
        return record.round != number or record.closed or no_host

    def _forget(self, store: StoreOperations, number: int) -> None:
        """Deletes what the agents and workers of an old round have left."""
        store.delete_key(endpoint_key(number))
        prefix = f"{agents_prefix(number)}/"
        for key in store.list_keys():
            if key.startswith(prefix):
                store.delete_key(key)
        self._backend.forget_workers_store(number)
