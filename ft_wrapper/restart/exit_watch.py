"""The exit of a process that runs the wrapped function: a rank, or a child that the function forks.

Python waits at exit for every non-daemon thread and for child processes. An executor's thread that was
interrupted in its shutdown, or that hangs in a call to lost ranks, keeps the process from ever exiting; one
that uploads a checkpoint needs its time. So the process logs what an interrupted function left running, and
the agent sees how long the process has been waiting: see `Ranks.waits_at_end`.
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
_memory: RankMemory | None = None  # the last call's, whichever call left something: the agent reads that one


class ExitWatch:
    """Remembers what the function of one wrapped call leaves behind when it is interrupted.

    Args:
        memory: the rank's memory in this call, which its agent reads.
    """

    def __init__(self, memory: RankMemory) -> None:
        global _memory
        _memory = memory
        self._before = weakref.WeakSet(_running())

    def note(self) -> None:
        """Call this when a fault has ended the function."""
        for one in _running():
            if not one.daemon and one not in self._before:
                _watch_the_end()
                _noted.add(one)


def _running() -> list[Running]:
    return [*threading.enumerate(), *multiprocessing.active_children()]


@functools.cache
def _watch_the_end() -> None:
    # As concurrent.futures does, which waits there for its threads: atexit comes later. The last callback
    # registered runs first.
    threading._register_atexit(_say_what_is_left)  # type: ignore[attr-defined]


def _say_what_is_left() -> None:
    # Threads first.
    left = sorted((_describe(one) for one in list(_noted) if one.is_alive()), reverse=True)
    if left:
        assert _memory is not None
        _memory.end_stamp = time.monotonic()
        log.warning("exit waits for threads or processes of an interrupted function: %s", ", ".join(left))


def _describe(one: Running) -> str:
    if isinstance(one, threading.Thread):
        return f"thread {one.name} {describe_thread(one.ident or 0) or ''}".strip()
    return f"process {one.name} ({one.pid})"


# Forked children --------------------------------------------------------------------------------------------
#
# Processes that the wrapped function makes by ``os.fork``: none of them is the rank.
#
# A child has copies of the rank's sockets, and runs inside the wrapper's frames. If it left them, it would
# say goodbye, publish its error, or return, all in the rank's name.


@contextlib.contextmanager
def children_end() -> Iterator[None]:
    """Ends a child process that leaves the block, in whatever way.

    Exit code and traceback are the same as at a normal exit of Python, but ``atexit`` callbacks do not run:
    they are the rank's. A child that ``multiprocessing`` forks skips them, too.
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
