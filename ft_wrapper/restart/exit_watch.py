"""How a process ends that runs the wrapped function: a rank, or a child that the function forks.

Python waits at its end for every thread that is no daemon, and for child processes. A thread of an executor
that was interrupted in its shutdown, or that hangs in a call for ranks that are no more, keeps the process
from ever exiting; one that uploads a checkpoint needs its time. So what an interrupted function has left
running is named, and the agent sees since when the process waits: see `Ranks.waits_at_end`.
"""

import contextlib
import functools
import logging
import multiprocessing.process
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator

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
        self._before = weakref.WeakSet(_running())

    def note(self) -> None:
        """To be called when the function has been left by a fault."""
        for one in _running():
            if not one.daemon and one not in self._before:
                _watch_the_end()
                _noted.add(one)


def _running() -> list[Running]:
    return [*threading.enumerate(), *multiprocessing.active_children()]


@functools.cache
def _watch_the_end() -> None:
    # As concurrent.futures does, which waits there for its threads: atexit comes after that. What was
    # registered last is called first.
    threading._register_atexit(_say_what_is_left)  # type: ignore[attr-defined]


def _say_what_is_left() -> None:
    # Threads first.
    left = sorted((_describe(one) for one in list(_noted) if one.is_alive()), reverse=True)
    if left:
        assert _memory is not None
        _memory.end_stamp = time.monotonic()
        log.warning("the process waits at its end for what an interrupted function left: %s", ", ".join(left))


def _describe(one: Running) -> str:
    if isinstance(one, threading.Thread):
        return f"thread {one.name} {describe_thread(one.ident or 0) or ''}".strip()
    return f"process {one.name} ({one.pid})"


# Forked children --------------------------------------------------------------------------------------------
#
# Processes that the wrapped function makes by ``os.fork``: none of them is the rank.
#
# A child has copies of the rank's sockets, and stands in the wrapper's frames, too. If it left them it would
# say goodbye, publish its error, or return, all in the rank's name.


@contextlib.contextmanager
def children_end() -> Iterator[None]:
    """In a child that leaves the block, by whatever way, ends the process.

    With the exit code, and with the traceback, that Python's own end would have, but without ``atexit``: what
    is registered there is the rank's, as for a child that ``multiprocessing`` forks.
    """
    rank, error = os.getpid(), None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        if os.getpid() != rank:
            _end(error)
        del error  # its frames refer to this one


def _end(error: BaseException | None) -> None:
    code: object = None if error is None else error.code if isinstance(error, SystemExit) else 1
    try:
        if error is not None and not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))
