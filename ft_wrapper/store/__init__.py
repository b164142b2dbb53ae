"""What the ranks agree on: plain calls on a store. No process, no group; only etcd's client has threads."""

from typing import TYPE_CHECKING, Any

from ..protocol.entering import BarrierError, BarrierOverflow, BarrierTimeout
from ..protocol.operations import Operations as StoreOperations
from ..protocol.records import Decision, Fault, Head, Member, View
from .address import is_etcd
from .mixin import FileStore, HoldingStore, PrefixStore, StoreMixin
from .plan import StorePlan, announced_plan, connect, connector, plan_store, without_secrets
from .tcp import TCPStore, TCPStoreServer, serve

if TYPE_CHECKING:
    from .etcd import EtcdStore

__all__ = [
    "BarrierError",
    "BarrierOverflow",
    "BarrierTimeout",
    "Decision",
    "EtcdStore",
    "Fault",
    "FileStore",
    "Head",
    "HoldingStore",
    "Member",
    "PrefixStore",
    "StoreMixin",
    "StoreOperations",
    "StorePlan",
    "TCPStore",
    "TCPStoreServer",
    "View",
    "announced_plan",
    "connect",
    "connector",
    "is_etcd",
    "plan_store",
    "serve",
    "without_secrets",
]


def __getattr__(name: str) -> Any:
    # It needs a library that only comes with an extra.
    if name == "EtcdStore":
        from .etcd import EtcdStore

        return EtcdStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
