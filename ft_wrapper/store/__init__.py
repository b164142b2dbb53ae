"""What the ranks agree on: plain calls on a store. No thread, no process, no process group."""

from .barrier import BarrierError, BarrierOverflow, BarrierTimeout
from .file import FileStore
from .heartbeat import HeartbeatObserver
from .holding import HoldingStore
from .joining import Entry, JoinTerms
from .mixin import StoreMixin
from .operations import StoreOperations
from .plan import StorePlan, plan_store
from .prefix import PrefixStore
from .records import Decision, Fault, Head, Member, Outcome, View
from .tcp import TCPStore, TCPStoreServer, serve

__all__ = [
    "BarrierError",
    "BarrierOverflow",
    "BarrierTimeout",
    "Decision",
    "Entry",
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
    "plan_store",
    "serve",
]
