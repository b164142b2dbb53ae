"""The stores of the job's keys. They start no processes; only etcd's client keeps threads."""

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
    # Imported late, since it needs a library that only an extra installs.
    if name == "EtcdStore":
        from .etcd import EtcdStore

        return EtcdStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
