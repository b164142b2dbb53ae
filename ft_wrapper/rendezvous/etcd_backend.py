"""The record in etcd: no node has to live for it, nor for the store of the workers."""

from __future__ import annotations

import logging
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from .._addresses import address_of_this_node, is_loopback
from ..exception import StoreError
from ..store import StoreMixin
from ..store.etcd_address import EtcdAddress
from ..store.etcd_endpoints import parse_endpoints
from . import keys
from .backend import Backend
from .settings import ETCD_NAMES

log = logging.getLogger(__name__)

_FIRST = 10.0  # seconds within which etcd has to answer at first
RENDEZVOUS = "rendezvous/"
"""Namespace of the record, below the job's prefix."""


def workers(round_number: int) -> str:
    """Namespace of the store in which the workers of a round agree, below the job's prefix."""
    return f"workers/{round_number}/"


class EtcdBackend(Backend):
    """Keeps the record in etcd, under a prefix of the job's own, with a lease on all of it.

    Args:
        address: where.
        read_timeout: seconds for which an etcd that does not answer is tried again.
        name: what ``--rdzv-backend`` calls it.

    Raises:
        RendezvousConnectionError: etcd cannot be reached, or refuses, or a library is missing; says why.
        ValueError: the address cannot be right.
    """

    hosts_workers = False

    def __init__(self, address: EtcdAddress, read_timeout: float = 60.0, name: str = ETCD_NAMES[0]) -> None:
        self.name = name
        self._address = address
        try:
            store = address.connect(timedelta(seconds=min(_FIRST, read_timeout)), begins=True)
        except (StoreError, ImportError) as error:
            raise RendezvousConnectionError(f"--rdzv-endpoint {address.endpoints}: {error}") from error
        store.set_patience(read_timeout)
        store.set_timeout(timedelta(seconds=read_timeout))
        self._store = store
        # torch's side of a store finds the methods of its Python side only as long as that is alive.
        self._agents_stores: list[Store] = []

    def connect(self) -> StoreMixin:
        return self._store.within(RENDEZVOUS)

    def agents_store(self, prefix: str) -> Store:
        inner = self._store.within(RENDEZVOUS)
        self._agents_stores.append(inner)
        return PrefixStore(prefix, inner)

    def workers_store(self, round_number: int) -> str:
        return str(self._address.within(workers(round_number)))

    def forget_workers_store(self, round_number: int) -> None:
        self._store.within(workers(round_number)).clear()

    def local_address(self) -> str:
        hosts = [endpoint.host for endpoint in parse_endpoints(self._address.endpoints)]
        # Where each node has a member, and names its own first, the others tell that there are several.
        return address_of_this_node(next((host for host in hosts if not is_loopback(host)), hosts[0]))

    def leave(self, name: str, others: list[str]) -> None:
        """The last one removes everything."""
        store = self.connect()
        store.set(keys.gone(name), "")
        if store.check([keys.gone(other) for other in [name, *others]]):
            self._store.remove()

    def close(self) -> None:
        self._agents_stores.clear()
        self._store.close()
