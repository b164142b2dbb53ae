"""The signals of a rank's process: a free one for the wrapper's own use, and those that Python code handles.

Libraries install handlers that raise: torch's for SIGCHLD does when a DataLoader worker was killed. In the
function that is a fault like any other. In the wrapper's own code, half-way through an exchange with the
other ranks, it would throw this rank out of the job.

So whenever the function has been left, each handler that Python code has installed is wrapped: it runs as
before, but an ``Exception`` that it raises is put aside. Any other ``BaseException``, a ``KeyboardInterrupt``
for one, passes. Before the function is entered the handlers are put back. Only the main thread runs handlers;
in a call made by another thread nothing is done.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType

logger = logging.getLogger(__name__)

Handler = Callable[[int, FrameType | None], object]

_SIGNALS = tuple(int(signum) for signum in signal.valid_signals())
# What `signal.getsignal` wraps: enums, which take 60 times as long, have no part in a restart.
_getsignal: Callable[[int], object] = signal._signal.getsignal  # type: ignore[attr-defined]


def free_signal() -> int:
    """Returns a real-time signal that neither Python nor a C library uses in this process.

    Raises:
        RuntimeError: there is none.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    caught = _caught()
    for signum in range(signal.SIGRTMIN + 1, signal.SIGRTMAX + 1):
        is_default = signal.getsignal(signum) is signal.SIG_DFL
        if signum not in blocked and is_default and not caught >> (signum - 1) & 1:
            return signum
    raise RuntimeError(
        "every real-time signal is in use, ignored or blocked in this process; "
        "ft_wrapper needs one to interrupt the function, and one to ask where it hangs"
    )


def _caught() -> int:
    """The signals with a handler, as bits; Python does not know of those that a C library has installed."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            field, _, value = line.partition(":")
            if field == "SigCgt":
                return int(value, 16)
    return 0


class _Keeping:
    """A handler that keeps what the real one raises."""

    def __init__(self, handler: Handler, kept: list[Exception]) -> None:
        self.handler = handler
        self._kept = kept

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        try:
            self.handler(signum, frame)
        except Exception as error:
            self._kept.append(error)


class KeptSignals:
    """Wraps and unwraps the handlers; all methods belong to the thread that runs the function."""

    def __init__(self) -> None:
        self._kept: list[Exception] = []
        self._holds = False
        self._wrapped: list[int] = []

    def hold(self) -> None:
        """Wraps all handlers that can raise; again is harmless, and finishes what a signal cut short."""
        if self._holds or threading.current_thread() is not threading.main_thread():
            return
        for signum in _SIGNALS:
            handler = _getsignal(signum)
            if callable(handler):
                self._wrapped.append(signum)  # first: a signal may cut this short
                if not isinstance(handler, _Keeping):
                    signal.signal(signum, _Keeping(handler, self._kept))
        self._holds = True

    def release(self) -> None:
        """Puts the handlers back, but for those that other code has replaced in between."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._holds = False
        for signum in self._wrapped:
            handler = _getsignal(signum)
            if isinstance(handler, _Keeping):
                signal.signal(signum, handler.handler)
        self._wrapped.clear()

    def forget(self) -> None:
        """Logs what was raised; to be called where it makes no difference any more."""
        while self._kept:
            error = self._kept.pop(0)
            logger.warning("a signal handler raised %r outside of the function: ignored", error)

    def raise_kept(self) -> None:
        """Raises the first thing that was kept.

        Raises:
            Exception: what a handler has raised; others are forgotten.
        """
        if self._kept:
            error = self._kept.pop(0)
            self.forget()
            raise error
