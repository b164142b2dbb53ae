"""Where the keys live on which the ranks agree. No process; only etcd's client has threads."""

from typing import TYPE_CHECKING, Any

from ..protocol.entering import BarrierError, BarrierOverflow, BarrierTimeout
from .base import FileStore, PrefixStore, StoreMixin
from .plan import StorePlan, connect, without_password
from .tcp import TCPStore
from .tcp_server import TCPStoreServer, serve

if TYPE_CHECKING:
    from .etcd import EtcdStore

__all__ = [
    "BarrierError",
    "BarrierOverflow",
    "BarrierTimeout",
    "EtcdStore",
    "FileStore",
    "PrefixStore",
    "StoreMixin",
    "StorePlan",
    "TCPStore",
    "TCPStoreServer",
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
