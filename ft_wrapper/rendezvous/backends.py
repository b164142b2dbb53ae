"""Where the record is kept: on a TCPStore that a node hosts, or in etcd; below it, the workers' stores.

Etcd outlives all nodes, so wrapped ranks keep their stores there, too. Otherwise a node hosts them.
"""

import abc
import logging
import socket
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch._C._distributed_c10d import TCPStore as TorchTCPStore
from torch.distributed.elastic import rendezvous as elastic
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ..exception import StoreError, StoreUnavailable
from ..protocol.operations import Notify, Write, read
from ..store import StoreMixin, TCPStore, TCPStoreServer, serve
from ..store import address as addresses
from ..store.address import EtcdAddress, host_port, split_host_port
from ..store.bounded import call_in_thread
from ..store.plan import connect_etcd
from .record import RendezvousRecord, RoundPolicy
from .register import Board, agents_prefix, endpoint_key, gone_key, wake_endpoint
from .settings import ETCD_NAMES, RendezvousSettings, etcd_address, read_timeout

log = logging.getLogger(__name__)

DEFAULT_PORT = 29400
#: On etcd: namespace of the record, below the job's prefix.
RENDEZVOUS = "rendezvous/"
_TAKEN = 5.0  # seconds to find out whether another node on this machine has the port
_FIRST = 10.0  # seconds within which etcd has to answer the first request
_WORKERS_TIMEOUT = timedelta(seconds=30)  # of operations on the workers' store


def workers_namespace(round_number: int) -> str:
    """On etcd: namespace of the store that the workers of a round use, below the job's prefix."""
    return f"workers/{round_number}/"


class Backend(abc.ABC):
    """Where the record is kept.

    Attributes:
        name: its name for ``--rdzv-backend``.
        is_host: whether the other nodes lose the store when this node closes it.
        hosts_workers: whether the node of group rank 0 has to host the workers' store.
    """

    name: str
    is_host: bool = False
    hosts_workers: bool = True

    @abc.abstractmethod
    def connect(self) -> StoreMixin:
        """Another client; each thread needs its own."""

    @abc.abstractmethod
    def agents_store(self, prefix: str) -> Store:
        """A new client of the store that the agents of a round share.

        Args:
            prefix: prefix of all keys.
        """

    def workers_store(self, round_number: int) -> str:
        """Address of the store that a round's workers use; empty if a node hosts it."""
        return ""

    def forget_workers_store(self, round_number: int) -> None:
        """Deletes the keys of an old round's workers, unless they ended with the node that hosted them."""
        return

    def leave(self, name: str, others: list[str]) -> None:
        """Marks that this node no longer needs the store of a closed rendezvous; the last node cleans up.

        Args:
            name: name of this node.
            others: names of all other nodes that use the store.
        """
        return

    @abc.abstractmethod
    def local_address(self) -> str:
        """The address at which other nodes reach this node."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the connection; ends the store if this node hosts it."""


class TcpBackend(Backend):
    """Keeps the record on a TCPStore, which one of the nodes hosts.

    As with torch's ``c10d``, the node that the endpoint names hosts the store, unless another node on the
    same machine was first. ``is_host`` overrules that.

    Args:
        endpoint: ``host:port``; the port defaults to 29400, the host to localhost.
        is_host: whether this node hosts the store; derived from the endpoint when None.
        read_timeout: seconds for which an operation is retried while the store does not answer.
        name: its name for ``--rdzv-backend``.

    Raises:
        RendezvousConnectionError: no store answers, or this node must host the store and the port is taken.
        ValueError: the endpoint is malformed.
    """

    def __init__(
        self, endpoint: str, is_host: bool | None = None, read_timeout: float = 60.0, name: str = "ft"
    ) -> None:
        self.name = name
        self.host_name, self.port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
        self._store: TCPStore | None = None
        self._server: TCPStoreServer | None = None
        is_named = self.host_name == socket.gethostname() or addresses.is_this_host(self.host_name)
        may_host = is_named if is_host is None else is_host
        if may_host:
            self._host(required=is_host is not None)
        if self.port == 0:
            raise ValueError(
                f"--rdzv-endpoint {endpoint}: port 0 lets the host of the store take a free port, and this "
                "node is not the host; name the host's port"
            )
        # Another process has the port. If that process is a node's, it answers at once.
        seconds = min(read_timeout, _TAKEN) if may_host and not self.is_host else read_timeout
        try:
            self._store = TCPStore(self.host_name, self.port, timeout=timedelta(seconds=seconds))
            self._store.patience, self._store.hears_signals = read_timeout, True
            self._store.set_timeout(timedelta(seconds=read_timeout))
        except StoreError as error:
            self.close()
            raise elastic.RendezvousConnectionError(
                f"--rdzv-endpoint {self._where}: {error}; is the node it names up?"
            ) from error
        except BaseException:
            self.close()
            raise

    def _host(self, *, required: bool) -> None:
        try:
            self._server = TCPStoreServer(self.port, self.host_name)
        except StoreError as error:
            if required or self.port == 0 or isinstance(error.__cause__, socket.gaierror):
                raise elastic.RendezvousConnectionError(
                    f"--rdzv-endpoint {self._where}: this node must host the store but cannot: "
                    f"{error.__cause__}; choose another address or port, or let another node host it"
                ) from error
            log.debug("%s is taken: another node of this machine hosts the store", self._where)
            return
        self.is_host, self.port = True, self._server.port
        log.info("hosting the rendezvous store at %s", self._where)

    @property
    def _where(self) -> str:
        return host_port(self.host_name, self.port)

    def connect(self) -> StoreMixin:
        return self._connected().clone()

    def _connected(self) -> TCPStore:
        if self._store is None:
            raise elastic.RendezvousConnectionError(f"{self._where}: this backend was closed")
        return self._store

    def agents_store(self, prefix: str) -> Store:
        return PrefixStore(prefix, self._connected().clone().torch_store)

    def local_address(self) -> str:
        return addresses.address_of_this_node(self.host_name)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._server is not None:
            self._server.close()
            self.is_host, self._server = False, None


class EtcdBackend(Backend):
    """Keeps the record in etcd, under the job's own prefix, with one lease for all keys.

    Args:
        address: address of the job's keys.
        read_timeout: seconds for which an operation is retried while etcd does not answer.
        name: its name for ``--rdzv-backend``.

    Raises:
        RendezvousConnectionError: etcd cannot be reached; with the reason.
        RendezvousStateError: etcd refuses, or a library is missing, so a retry is useless; with the reason.
        ValueError: the address is malformed.
    """

    hosts_workers = False

    def __init__(self, address: EtcdAddress, read_timeout: float = 60.0, name: str = ETCD_NAMES[0]) -> None:
        self.name = name
        self._address = address
        try:
            store = connect_etcd(address, timedelta(seconds=min(_FIRST, read_timeout)), begins=True)
        except (StoreError, ImportError) as error:
            passes = isinstance(error, StoreUnavailable)
            kind = elastic.RendezvousConnectionError if passes else elastic.RendezvousStateError
            raise kind(f"--rdzv-endpoint {address.endpoints}: {error}") from error
        store.patience = read_timeout
        store.set_timeout(timedelta(seconds=read_timeout))
        self._store = store
        # The C++ part of a store calls its Python part, which must stay alive for that.
        self._agents_stores: list[Store] = []

    def connect(self) -> StoreMixin:
        return self._store.within(RENDEZVOUS)

    def agents_store(self, prefix: str) -> Store:
        inner = self._store.within(RENDEZVOUS)
        self._agents_stores.append(inner)
        return PrefixStore(prefix, inner)

    def workers_store(self, round_number: int) -> str:
        return str(self._address.within(workers_namespace(round_number)))

    def forget_workers_store(self, round_number: int) -> None:
        self._store.within(workers_namespace(round_number)).clear()

    def local_address(self) -> str:
        hosts = [endpoint.host for endpoint in addresses.parse_endpoints(self._address.endpoints)]
        # Each node may name a member on localhost first; the other members show that there are several nodes.
        others = [host for host in hosts if not addresses.is_loopback(host)]
        return addresses.address_of_this_node([*others, *hosts][0])

    def leave(self, name: str, others: list[str]) -> None:
        """Marks that this node has left; the last node removes all keys."""
        store = self.connect()
        store.set(gone_key(name), "")
        if store.check([gone_key(other) for other in [name, *others]]):
            self._store.remove()

    def close(self) -> None:
        self._agents_stores.clear()
        self._store.close()


def make_backend(parameters: elastic.RendezvousParameters) -> Backend:
    """Connects to the store of the record.

    Raises:
        ValueError: a parameter is wrong; names it and says what to do.
        RendezvousConnectionError: no store answers at the endpoint, or the port is taken.
    """
    name, seconds = parameters.backend, read_timeout(parameters)
    if name in ETCD_NAMES:
        return EtcdBackend(etcd_address(parameters), seconds, name)
    return TcpBackend(parameters.endpoint, parameters.get_as_bool("is_host"), seconds, name)


# The store of the workers -----------------------------------------------------------------------------
#
# Each round gets a new store, without keys of earlier rounds. The node of group rank 0 hosts it,
# and the other nodes read its address from the rendezvous store.


def announce_endpoint(store: StoreMixin, round_number: int, address: str) -> None:
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
        return serve(address, port, _WORKERS_TIMEOUT)
    except OSError as error:
        raise elastic.RendezvousConnectionError(
            f"the store of the workers cannot be opened at {address}: {error}; set --local-addr to an "
            "address of this node that the other nodes can reach"
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

    def open(self, store: StoreMixin, number: int, address: str) -> elastic.RendezvousStoreInfo:
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

    def find(self, store: StoreMixin, record: RendezvousRecord) -> elastic.RendezvousStoreInfo | None:
        """Waits for the address of the store that another node opens; None if the round is lost first.

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
        # An interrupted caller leaves this client waiting, and needs another client to give up its place.
        own = self._backend.connect()
        try:
            while call_in_thread(lambda: own.wait_for(wake, limit), "waiting for the workers' store") is None:
                if self._is_lost(record.round):
                    return None
                if store.now() >= deadline:
                    raise elastic.RendezvousTimeoutError(
                        f"node {record.seats[0].occupant}, which has group rank 0 in round {record.round} of "
                        f"the rendezvous {self._settings.run_id!r}, did not open the workers' store "
                        f"within {self._settings.join_timeout:g} s"
                    )
        finally:
            own.close()
        text = read(store, key) or ""
        address, port = split_host_port(text)
        if not address or not port.isdecimal():
            raise elastic.RendezvousStateError(f"store key {key!r} holds {text!r}, which is not an address")
        return elastic.RendezvousStoreInfo(address, int(port))

    def close(self) -> None:
        """Ends the store that this node hosts, if there is one."""
        self._hosted = None

    def _is_lost(self, number: int) -> bool:
        record = self._board.known()
        no_host = any(seat.group_rank == 0 and seat.occupant is None for seat in record.seats)
        return record.round != number or record.closed or no_host

    def _forget(self, store: StoreMixin, number: int) -> None:
        """Deletes the keys of an old round's agents and workers."""
        store.delete_key(endpoint_key(number))
        store.delete_key(store.wake_name(wake_endpoint(number)))
        prefix = f"{agents_prefix(number)}/"
        for key in store.list_keys():
            if key.startswith(prefix):
                store.delete_key(key)
        self._backend.forget_workers_store(number)
