"""For tests of programs that use the wrapper: a store in memory, virtual time, a deterministic scheduler."""

from typing import TYPE_CHECKING, Any

from .blocking import BlockingGroup, OnAbort, blocking_backend
from .clock import Clock
from .fake_store import FakeStore
from .scheduler import Deadlock, Scheduler, SchedulerError, Task, TooLong

if TYPE_CHECKING:
    from .etcd_server import EtcdServer

__all__ = [
    "BlockingGroup",
    "Clock",
    "Deadlock",
    "EtcdServer",
    "FakeStore",
    "OnAbort",
    "Scheduler",
    "SchedulerError",
    "Task",
    "TooLong",
    "blocking_backend",
]


def __getattr__(name: str) -> Any:
    # It needs a library that only comes with an extra.
    if name == "EtcdServer":
        from .etcd_server import EtcdServer

        return EtcdServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
