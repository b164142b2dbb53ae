"""The thread in a rank that stamps, for the monitor, how far the interpreter still works.

Two stamps. ``gil_stamp``: this thread had the GIL. ``main_stamp``: the main thread ran bytecode, which a
*pending call* tells: the interpreter runs it in the main thread, between two instructions.

The pending call is C's own ``sem_post`` on a semaphore that this thread waits on. A Python callback would
run Python code in the main thread, and whatever a signal handler raises there (a Ctrl-C, an interruption) is
lost in the callback; and it would have to be kept alive for a call that may come after everything else ended.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from types import TracebackType
from typing import Any

from ft_wrapper.monitor import libc
from ft_wrapper.monitor.shared_memory import RankMemory

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT = 10.0

# Semaphores of watchdogs that were stopped before their last pending call ran. They are never freed: the
# interpreter still holds their addresses.
_outstanding: list[ctypes.Array[ctypes.c_char]] = []


class ProgressWatchdog:
    """Stamps a rank's memory every interval, from a daemon thread.

    Args:
        memory: where the stamps go. Must stay open until `stop` has returned.
        interval: seconds between two stamps.
        watches_main_thread: whether the function runs in the main thread. If not, a pending call says
            nothing about it: ``main_stamp`` is then stamped with ``gil_stamp``, and only ``ping`` tells of
            the function's progress.

    Raises:
        ValueError: the interval is not above 0.
    """

    def __init__(self, memory: RankMemory, interval: float, watches_main_thread: bool = True) -> None:
        if not interval > 0:
            raise ValueError(f"interval={interval!r} must be above 0 seconds")
        libc.require()
        self._memory = memory
        self._interval = interval
        self._watches_main_thread = watches_main_thread
        self._semaphore = ctypes.create_string_buffer(libc.SEMAPHORE_SIZE)
        self._address = ctypes.addressof(self._semaphore)
        libc.semaphore_init(self._address)
        self._pending = False
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread. The stamps are fresh when it returns.

        Raises:
            RuntimeError: it was started before.
        """
        if self._thread is not None:
            raise RuntimeError("this ProgressWatchdog was started before; make a new one")
        self._memory.gil_stamp = self._memory.main_stamp = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="ft_wrapper.progress_watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and waits for it; again, or without a start, is harmless.

        Raises:
            RuntimeError: the thread did not end.
        """
        thread = self._thread
        if thread is None or self._stopping:
            return
        self._stopping = True
        libc.semaphore_post(self._address)
        thread.join(_JOIN_TIMEOUT)
        if thread.is_alive():
            raise RuntimeError(f"the progress watchdog's thread did not end within {_JOIN_TIMEOUT} s")
        if self._pending:
            _outstanding.append(self._semaphore)

    def __enter__(self) -> ProgressWatchdog:
        """Starts the thread."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stops the thread."""
        self.stop()

    def _run(self) -> None:
        add_pending_call: Any = ctypes.pythonapi.Py_AddPendingCall
        callback = ctypes.cast(libc.semaphore_post_function(), ctypes.c_void_p)
        address = ctypes.c_void_p(self._address)
        next_stamp = time.monotonic()
        while not self._stopping:
            now = time.monotonic()
            self._memory.gil_stamp = now
            if not self._watches_main_thread:
                self._memory.main_stamp = now
            if now >= next_stamp:
                next_stamp = now + self._interval
                if self._watches_main_thread and not self._pending:
                    # -1: the interpreter's queue is full. The next interval tries again.
                    self._pending = add_pending_call(callback, address) == 0
            if libc.semaphore_wait(self._address, next_stamp - now) and not self._stopping:
                self._pending = False
                self._memory.main_stamp = time.monotonic()
