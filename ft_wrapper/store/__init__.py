"""What the ranks agree on: plain calls on a store. No process, no group; only etcd's client has threads."""

from typing import TYPE_CHECKING, Any

from .address import connect, connector, is_etcd
from .barrier import BarrierError, BarrierOverflow, BarrierTimeout
from .file import FileStore
from .heartbeat import CounterObserver, HeartbeatObserver, beat_lasts
from .holding import HoldingStore
from .joining import Entry, JoinTerms
from .mixin import StoreMixin
from .operations import StoreOperations
from .plan import StorePlan, announced_plan, plan_store, without_secrets
from .prefix import PrefixStore
from .records import Decision, Fault, Head, Member, Outcome, View
from .tcp import TCPStore, TCPStoreServer, serve

if TYPE_CHECKING:
    from .etcd import EtcdStore

__all__ = [
    "BarrierError",
    "BarrierOverflow",
    "BarrierTimeout",
    "CounterObserver",
    "Decision",
    "Entry",
    "EtcdStore",
    "Fault",
    "FileStore",
    "Head",
    "HeartbeatObserver",
    "HoldingStore",
    "JoinTerms",
    "Member",
    "Outcome",
    "PrefixStore",
    "StoreMixin",
    "StoreOperations",
    "StorePlan",
    "TCPStore",
    "TCPStoreServer",
    "View",
    "announced_plan",
    "beat_lasts",
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
