"""The end of a process whose function was interrupted.

Python waits at its end for every thread that is no daemon, and for child processes. A thread of an executor
that was interrupted in its shutdown, or that hangs in a call for ranks that are no more, keeps the process
from ever exiting; one that uploads a checkpoint needs its time. So what an interrupted function has left
running is named, and the agent sees since when the process waits: see `Ranks.waits_at_end`.
"""

import functools
import logging
import multiprocessing.process
import threading
import time
import weakref

from ..monitor.frames import describe_thread
from ..monitor.shared_memory import RankMemory

log = logging.getLogger(__name__)

Running = threading.Thread | multiprocessing.process.BaseProcess

_noted: weakref.WeakSet[Running] = weakref.WeakSet()
_memory: RankMemory | None = None  # of the last call, whichever has left something: the agent reads that one


class ExitWatch:
    """Remembers what the function of one wrapped call leaves behind when it is interrupted.

    Args:
        memory: the rank's in this call, which its agent reads.
    """

    def __init__(self, memory: RankMemory) -> None:
        global _memory
        _memory = memory
        running: list[Running] = [*threading.enumerate(), *multiprocessing.active_children()]
        self._before = weakref.WeakSet(running)

    def note(self) -> None:
        """To be called when the function has been left by a fault."""
        running: list[Running] = [*threading.enumerate(), *multiprocessing.active_children()]
        for one in running:
            if not one.daemon and one not in self._before:
                _watch_the_end()
                _noted.add(one)


@functools.cache
def _watch_the_end() -> None:
    # As concurrent.futures does, which waits there for its threads: atexit comes after that. What was
    # registered last is called first.
    threading._register_atexit(_say_what_is_left)  # type: ignore[attr-defined]


def _say_what_is_left() -> None:
    if left := _left():
        assert _memory is not None
        _memory.end_stamp = time.monotonic()
        log.warning("the process waits at its end for what an interrupted function left: %s", ", ".join(left))


def _left() -> list[str]:
    """Names what still runs, threads first."""
    return sorted((_describe(one) for one in list(_noted) if one.is_alive()), reverse=True)


def _describe(one: Running) -> str:
    if isinstance(one, threading.Thread):
        return f"thread {one.name} {describe_thread(one.ident or 0) or ''}".strip()
    return f"process {one.name} ({one.pid})"
