"""The store that the workers of a round use, if a node hosts it.

The store is new in each round, so that it has no keys of earlier rounds. The node of group rank 0 hosts it,
and the other nodes read its address from the rendezvous store.
"""

from datetime import timedelta

from torch._C._distributed_c10d import TCPStore as TorchTCPStore
from torch.distributed.elastic import rendezvous as elastic

from ..protocol.operations import Notify, Operations, Write, read
from ..store import serve
from ..store.address import host_port, split_host_port
from ..store.bounded import call_in_thread
from .backends import Backend
from .keys import agents_prefix, endpoint_key, wake_endpoint
from .record import RendezvousRecord, RoundPolicy
from .register import Board
from .settings import RendezvousSettings

_TIMEOUT = timedelta(seconds=30)  # of operations on the workers' store


def announce_endpoint(store: Operations, round_number: int, address: str) -> None:
    """Publishes the address of the store that a round's workers use."""
    key = endpoint_key(round_number)
    store.execute([Write({key: address}), Notify(wake_endpoint(round_number), "")])


def host_workers_store(address: str, port: int = 0) -> TorchTCPStore:
    """Hosts the workers' store in this process, until the returned store is dropped.

    Args:
        address: address at which other nodes reach this node.
        port: port to listen on; 0 for a free port.

    Raises:
        RendezvousConnectionError: the store cannot be opened.
    """
    try:
        return serve(address, port, _TIMEOUT)
    except OSError as error:
        raise elastic.RendezvousConnectionError(
            f"the store of the workers cannot be opened at {address}: {error}; give an address of this node "
            "that the others reach with --local-addr"
        ) from error


class WorkerStores:
    """The workers' stores, round by round, as one node sees them.

    Args:
        backend: where the record is kept.
        board: holds the newest record.
        settings: timeouts and options of the rendezvous.
    """

    def __init__(self, backend: Backend, board: Board, settings: RendezvousSettings) -> None:
        self._backend = backend
        self._board = board
        self._settings = settings
        self._hosted: TorchTCPStore | None = None

    def open(self, store: Operations, number: int, address: str) -> elastic.RendezvousStoreInfo:
        """Opens the store of a round on this node, and publishes its address.

        Args:
            store: a client of the rendezvous store.
            number: number of the round.
            address: address of this node.
        """
        self._hosted = hosted = host_workers_store(address)  # this ends the last round's store
        announce_endpoint(store, number, host_port(address, hosted.port))
        if number >= 2:
            self._forget(store, number - 2)
        return elastic.RendezvousStoreInfo(address, hosted.port)

    def find(self, store: Operations, record: RendezvousRecord) -> elastic.RendezvousStoreInfo | None:
        """Waits for the address of the store that another node opens; None if the round is lost before.

        Args:
            store: a client of the rendezvous store.
            record: a record with a complete round.

        Raises:
            RendezvousTimeoutError: the other node has not opened the store in time.
            RendezvousStateError: the published text is no address.
        """
        key, wake = endpoint_key(record.round), wake_endpoint(record.round)
        if record.policy is RoundPolicy.GROUP:
            self.close()
        deadline, limit = store.now() + self._settings.join_timeout, self._settings.keep_alive_timeout
        # A caller that is interrupted leaves this client waiting, and needs another one to give up its place.
        own = self._backend.connect()
        try:
            while call_in_thread(lambda: own.wait_for(wake, limit), "waiting for the workers' store") is None:
                if self._is_lost(record.round):
                    return None
                if store.now() >= deadline:
                    raise elastic.RendezvousTimeoutError(
                        f"node {record.seats[0].occupant}, which has group rank 0 in round {record.round} of "
                        f"the rendezvous {self._settings.run_id!r}, has not opened the store of the workers "
                        f"within {self._settings.join_timeout:g} s"
                    )
        finally:
            own.close()
        text = read(store, key) or ""
        address, port = split_host_port(text)
        if not address or not port.isdecimal():
            raise elastic.RendezvousStateError(f"store key {key!r} holds {text!r}, which is no address")
        return elastic.RendezvousStoreInfo(address, int(port))

    def close(self) -> None:
        """Ends the store that this node hosts, if there is one."""
        self._hosted = None

    def _is_lost(self, number: int) -> bool:
        record = self._board.known()
        no_host = any(seat.group_rank == 0 and seat.occupant is None for seat in record.seats)
        return record.round != number or record.closed or no_host

    def _forget(self, store: Operations, number: int) -> None:
        """Deletes the keys of an old round's agents and workers."""
        store.delete_key(endpoint_key(number))
        store.delete_key(store.wake_name(wake_endpoint(number)))
        prefix = f"{agents_prefix(number)}/"
        for key in store.list_keys():
            if key.startswith(prefix):
                store.delete_key(key)
        self._backend.forget_workers_store(number)
