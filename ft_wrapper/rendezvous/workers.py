"""The store in which the workers of a round agree, where a node hosts it.

It is fresh in each round, so that nothing of an earlier one is in it. The node of group rank 0 hosts it; the
others learn its address from the rendezvous store.
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
    """Publishes where the store of a round's workers is."""
    key = endpoint_key(round_number)
    store.execute([Write({key: address}), Notify(wake_endpoint(round_number), "")])


def host_workers_store(address: str, port: int = 0) -> TorchTCPStore:
    """Hosts the store of the workers in this process, until the result is dropped.

    Args:
        address: this node, as the others reach it.
        port: where it listens; 0 for a free port.

    Raises:
        RendezvousConnectionError: it cannot be opened.
    """
    try:
        return serve(address, port, _TIMEOUT)
    except OSError as error:
        raise elastic.RendezvousConnectionError(
            f"the store of the workers cannot be opened at {address}: {error}; give an address of this node "
            "that the others reach with --local-addr"
        ) from error


class WorkerStores:
    """The workers' stores of one round after the other, as one node sees them.

    Args:
        backend: where the record is kept.
        board: the newest record.
        settings: of the rendezvous.
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
            number: of the round.
            address: this node's.
        """
        self._hosted = hosted = host_workers_store(address)  # which ends the last round's
        announce_endpoint(store, number, host_port(address, hosted.port))
        if number >= 2:
            self._forget(store, number - 2)
        return elastic.RendezvousStoreInfo(address, hosted.port)

    def find(self, store: Operations, record: RendezvousRecord) -> elastic.RendezvousStoreInfo | None:
        """Waits for the address of the store that another node opens; None if the round is lost before.

        Args:
            store: a client of the rendezvous store.
            record: in which the round is complete.

        Raises:
            RendezvousTimeoutError: that node has not opened it in time.
            RendezvousStateError: what it has written is no address.
        """
        key, wake = endpoint_key(record.round), wake_endpoint(record.round)
        if record.policy is RoundPolicy.GROUP:
            self.close()
        deadline, limit = store.now() + self._settings.join_timeout, self._settings.keep_alive_timeout
        # A caller that is interrupted leaves this client waiting, and needs the other to give up its place.
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
        """Ends the store that this node hosts, if any."""
        self._hosted = None

    def _is_lost(self, number: int) -> bool:
        record = self._board.known()
        no_host = any(seat.group_rank == 0 and seat.occupant is None for seat in record.seats)
        return record.round != number or record.closed or no_host

    def _forget(self, store: Operations, number: int) -> None:
        """Deletes what the agents and workers of an old round have left."""
        store.delete_key(endpoint_key(number))
        store.delete_key(store.wake_name(wake_endpoint(number)))
        prefix = f"{agents_prefix(number)}/"
        for key in store.list_keys():
            if key.startswith(prefix):
                store.delete_key(key)
        self._backend.forget_workers_store(number)
