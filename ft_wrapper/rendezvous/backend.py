"""Where the record is kept, and what else a handler needs of the outside."""

from __future__ import annotations

import abc
import logging
import socket
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from .._addresses import address_of_this_node, host_port, is_this_host
from ..exception import StoreError
from ..store import StoreMixin, TCPStore, TCPStoreServer, serve
from .settings import TcpOptions

log = logging.getLogger(__name__)

DEFAULT_PORT = 29400
_TAKEN = 5.0  # seconds to find out whether it is another node of this machine that has the port


class Backend(abc.ABC):
    """Where the record is kept.

    Attributes:
        name: what ``--rdzv-backend`` calls it.
        is_host: whether the others lose the store when this node closes it.
        hosts_workers: whether a node has to host the store of the workers: that of group rank 0.
    """

    name: str
    is_host: bool = False
    hosts_workers: bool = True

    @abc.abstractmethod
    def connect(self) -> StoreMixin:
        """Another client: each thread needs one of its own."""

    @abc.abstractmethod
    def agents_store(self, prefix: str) -> Store:
        """A store for what the agents of a round tell each other, through a client of its own.

        Args:
            prefix: in front of all keys.
        """

    def workers_store(self, round_number: int) -> str:
        """Address of the store in which the workers of a round agree; empty where a node hosts it."""
        return ""

    def forget_workers_store(self, round_number: int) -> None:
        """Deletes what the workers of a round that is over have left there, if it is not gone with a node."""
        return

    def leave(self, name: str, others: list[str]) -> None:
        """All is over, and this node uses the store no more; the last one tidies up.

        Args:
            name: of this node.
            others: names of all others that are in the record.
        """
        return

    @abc.abstractmethod
    def local_address(self) -> str:
        """How the other nodes reach this one."""

    @abc.abstractmethod
    def close(self) -> None:
        """Lets go of the store; ends it, if this node hosts it."""


class TcpBackend(Backend):
    """Keeps the record on a TCPStore, which one of the nodes hosts.

    As with torch's ``c10d``: a node whose name or address the endpoint names hosts the store, unless another
    one on the same machine was first; ``is_host`` says otherwise.

    Args:
        endpoint: ``host:port``; without a port, 29400; without anything, localhost.
        options: how to reach it.
        name: what ``--rdzv-backend`` calls it.

    Raises:
        RendezvousConnectionError: no one answers, or this node must host the store and the port is taken.
        ValueError: the endpoint is none.
    """

    def __init__(self, endpoint: str, options: TcpOptions | None = None, name: str = "ft") -> None:
        options = options or TcpOptions()
        self.name = name
        self.host_name, self.port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
        self._store: TCPStore | None = None
        self._server: TCPStoreServer | None = None
        is_named = self.host_name == socket.gethostname() or is_this_host(self.host_name)
        host = is_named if options.is_host is None else options.is_host
        if host:
            self._host(required=options.is_host is not None)
        if self.port == 0:
            raise ValueError(
                f"--rdzv-endpoint {endpoint}: port 0 lets the host of the store take a free port, and this "
                "node is not the host; name the host's port"
            )
        # Somebody listens here already: if that is another node, it answers at once.
        taken = host and self._server is None
        seconds = min(options.read_timeout, _TAKEN) if taken else options.read_timeout
        try:
            self._store = TCPStore(self.host_name, self.port, timeout=timedelta(seconds=seconds))
            self._store.set_patience(options.read_timeout)
            self._store.set_timeout(timedelta(seconds=options.read_timeout))
        except StoreError as error:
            self.close()
            raise RendezvousConnectionError(
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
                raise RendezvousConnectionError(f"--rdzv-endpoint {self._where}: {error}") from error
            if required or self.port == 0:
                raise RendezvousConnectionError(
                    f"--rdzv-endpoint {self._where}: this node must host the store, "
                    f"and cannot: {error.__cause__}; choose another port, or let another node host it"
                ) from error
            log.debug("%s is taken: another node of this machine hosts the store", self._where)
            return
        self.port = self._server.port
        log.info("hosting the rendezvous store at %s", self._where)

    @property
    def _where(self) -> str:
        return host_port(self.host_name, self.port)

    @property
    def is_host(self) -> bool:  # type: ignore[override]
        """Whether this node hosts the store."""
        return self._server is not None

    def connect(self) -> StoreMixin:
        return self._connected().clone()

    def _connected(self) -> TCPStore:
        if self._store is None:
            raise RendezvousConnectionError(f"{self._where}: this backend was closed")
        return self._store

    def agents_store(self, prefix: str) -> Store:
        return PrefixStore(prefix, self._connected().torch_store.clone())  # type: ignore[attr-defined]

    def local_address(self) -> str:
        return address_of_this_node(self.host_name)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._server is not None:
            self._server.close()
            self._server = None


class WorkerStore:
    """The store that the workers of one round use: fresh, so that nothing of an earlier round is found in it.

    Args:
        address: this node, as the others reach it.
        timeout: seconds, of operations on it.
        port: where it listens; 0 for a free port.

    Raises:
        RendezvousConnectionError: it cannot be opened.
    """

    def __init__(self, address: str, timeout: float = 30.0, port: int = 0) -> None:
        try:
            store = serve(address, port, timedelta(seconds=timeout))
        except OSError as error:
            raise RendezvousConnectionError(
                f"the store of the workers cannot be opened at {address}: {error}; tell an address of "
                "this node that the others reach with --local-addr"
            ) from error
        self.address = address
        self.port: int = store.port
        self._store: Store | None = store

    def close(self) -> None:
        """Ends it."""
        self._store = None
