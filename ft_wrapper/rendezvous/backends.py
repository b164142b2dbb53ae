"""Where the record is kept: on a TCPStore that a node hosts, or in etcd.

Etcd outlives all nodes, so the workers' stores are there, too. Otherwise a node hosts them: see `workers`.
"""

import abc
import logging
import socket
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.elastic import rendezvous as elastic
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ..exception import StoreError, StoreUnavailable
from ..store import StoreMixin, TCPStore, TCPStoreServer
from ..store import address as addresses
from ..store.address import EtcdAddress, host_port
from ..store.plan import connect_etcd
from .keys import gone_key
from .settings import ETCD_NAMES, etcd_address, read_timeout

log = logging.getLogger(__name__)

DEFAULT_PORT = 29400
#: On etcd: namespace of the record, below the job's prefix.
RENDEZVOUS = "rendezvous/"
_TAKEN = 5.0  # seconds to find out whether another node on this machine has the port
_FIRST = 10.0  # seconds within which etcd has to answer the first request


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
        RendezvousConnectionError: nobody answers, or this node must host the store and the port is taken.
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
                f"--rdzv-endpoint {self._where}: {error}; is the node that it names up?"
            ) from error
        except BaseException:
            self.close()
            raise

    def _host(self, *, required: bool) -> None:
        try:
            self._server = TCPStoreServer(self.port, self.host_name)
        except StoreError as error:
            if isinstance(error.__cause__, socket.gaierror):
                raise elastic.RendezvousConnectionError(f"--rdzv-endpoint {self._where}: {error}") from error
            if required or self.port == 0:
                raise elastic.RendezvousConnectionError(
                    f"--rdzv-endpoint {self._where}: this node must host the store, "
                    f"and cannot: {error.__cause__}; choose another port, or let another node host it"
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
    """Keeps the record in etcd, under a prefix of the job's own, with one lease on all keys.

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
        # torch's C++ part of a store calls the Python part, which must stay alive for that.
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
        RendezvousConnectionError: nobody answers at the endpoint, or the port is taken.
    """
    name, seconds = parameters.backend, read_timeout(parameters)
    if name in ETCD_NAMES:
        return EtcdBackend(etcd_address(parameters), seconds, name)
    return TcpBackend(parameters.endpoint, parameters.get_as_bool("is_host"), seconds, name)
