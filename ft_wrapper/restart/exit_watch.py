"""The end of a process whose function was interrupted.

Python waits at its end for every thread that is no daemon, and for child processes. A thread of an executor
that was interrupted in its shutdown, or that hangs in a call for ranks that are no more, would keep the
process from ever exiting. So what an interrupted function has left running is remembered, waited for with a
limit, and named. What the function leaves that returned is waited for as long as Python does.
"""

import logging
import multiprocessing.process
import os
import sys
import threading
import time
import weakref
from typing import TypeAlias

from ..monitor.frames import whereabouts

log = logging.getLogger(__name__)

#: Seconds from the end of the main thread until the log says what it waits for.
SAID_AFTER = 5.0
#: Seconds from the end of the main thread until the process exits regardless, with code 1.
ENDED_AFTER = 60.0

Running: TypeAlias = threading.Thread | multiprocessing.process.BaseProcess

_noted: weakref.WeakSet[Running] = weakref.WeakSet()
_lock = threading.Lock()
_is_registered = False


class ExitWatch:
    """Remembers what the function of one wrapped call leaves behind when it is interrupted."""

    def __init__(self) -> None:
        self._before = weakref.WeakSet(_running())

    def note(self) -> None:
        """To be called when the function has been left by a fault."""
        left = [one for one in _running() if not one.daemon and one not in self._before]
        if not left:
            return
        global _is_registered
        with _lock:
            _noted.update(left)
            if not _is_registered:
                # As concurrent.futures does, which waits there for its threads: atexit comes after that. What
                # was registered last is called first.
                threading._register_atexit(_begin_watch)  # type: ignore[attr-defined]
                _is_registered = True


def _running() -> list[Running]:
    return [*threading.enumerate(), *multiprocessing.active_children()]


def _begin_watch() -> None:
    if _left():
        threading.Thread(target=_watch, name="ft_wrapper-exit", daemon=True).start()


def _watch() -> None:
    began = time.monotonic()
    _wait(began + SAID_AFTER)
    if left := _left():
        log.warning("the process waits at its end for what an interrupted function left: %s", ", ".join(left))
    _wait(began + ENDED_AFTER)
    if left := _left():
        log.error("the process is ended, %g s after its main thread: %s", ENDED_AFTER, ", ".join(left))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)


def _wait(deadline: float) -> None:
    for one in list(_noted):
        one.join(max(0.0, deadline - time.monotonic()))


def _left() -> list[str]:
    """Names what still runs."""
    names = []
    for one in list(_noted):
        if isinstance(one, threading.Thread):
            name = f"thread {one.name} {whereabouts(one.ident or 0) or ''}".strip()
        else:
            name = f"process {one.name} ({one.pid})"
        if one.is_alive():
            names.append(name)
    return sorted(names, reverse=True)  # threads first
