"""For tests of programs that use the wrapper: a store in memory, virtual time, a deterministic scheduler."""

from .clock import Clock
from .fake_store import FakeStore
from .scheduler import Deadlock, Scheduler, SchedulerError, Task, TooLong

__all__ = ["Clock", "Deadlock", "FakeStore", "Scheduler", "SchedulerError", "Task", "TooLong"]
