"""What the ranks agree on: plain calls on a store. No process, no group; only etcd's client has threads."""

from typing import TYPE_CHECKING, Any

from ..protocol.entering import BarrierError, BarrierOverflow, BarrierTimeout
from ..protocol.records import Decision, Fault, Head, Member, View
from .held import FileStore, PrefixStore, StoreMixin
from .plan import StorePlan, connect, without_password
from .tcp import TCPStore
from .tcp_server import TCPStoreServer, serve

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
    "Member",
    "PrefixStore",
    "StoreMixin",
    "StorePlan",
    "TCPStore",
    "TCPStoreServer",
    "View",
    "connect",
    "serve",
    "without_password",
]


def __getattr__(name: str) -> Any:
    # It needs a library that only comes with an extra.
    if name == "EtcdStore":
        from .etcd import EtcdStore

        return EtcdStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
