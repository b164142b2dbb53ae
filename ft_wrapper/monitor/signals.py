"""The signals of a process: which have handlers, and how other code's handlers are contained.

Libraries install handlers that raise: torch's SIGCHLD handler does when a DataLoader worker was killed. In
the function such an exception is a fault like any other. In the wrapper's own code, in the middle of an
exchange with the other ranks, it would make this rank leave the job.

So while the function is not running, each Python handler is wrapped: it runs as before, but an ``Exception``
that it raises is put aside. Any other ``BaseException``, such as ``KeyboardInterrupt``, passes. Before the
function is entered, the handlers are unwrapped. In a call made by another thread nothing is wrapped.

An interrupted function may leave handlers behind. A handler that calls its predecessor (a framework's, for
SIGTERM) would nest one level deeper at each restart. So each restart, and the call's end, restores the
handlers from before the call. SIGCHLD's handler stays: torch installs it once per process, with its first
loader.
"""

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

Handler = Callable[[int, FrameType | None], object]

_SIGNALS = tuple(int(signum) for signum in signal.valid_signals())
_NAMES = {int(one): one.name for one in signal.Signals}
# What `signal` wraps. Its enums would take 60 times as long at each restart.
_getsignal: Callable[[int], object] = signal._signal.getsignal  # type: ignore[attr-defined]
_setsignal: Callable[[int, Any], object] = signal._signal.signal  # type: ignore[attr-defined]


class _KeptHandler:
    """A wrapped handler: keeps the exceptions of the real one."""

    def __init__(self, handler: Handler, kept: list[Exception]) -> None:
        self.handler = handler
        self._kept = kept

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        try:
            self.handler(signum, frame)
        except Exception as error:
            self._kept.append(error)


class KeptHandlers:
    """Wraps and unwraps the handlers; all methods belong to the thread that runs the function."""

    def __init__(self) -> None:
        # Only the main thread runs handlers, and may replace them.
        is_main = threading.current_thread() is threading.main_thread()
        self._signals = _SIGNALS if is_main else ()
        self._kept: list[Exception] = []
        self._before: dict[int, Any] = {}
        self._are_told = False

    def note(self) -> None:
        """Notes the handlers before the function's first entry, for `put_back`."""
        self._before = {signum: _getsignal(signum) for signum in self._signals if signum != signal.SIGCHLD}

    def put_back(self) -> None:
        """Restores the noted handlers, wrapped, where the function has left different ones."""
        changed = []
        for signum, before in self._before.items():
            now = _getsignal(signum)
            now = now.handler if isinstance(now, _KeptHandler) else now
            # None: a C library's handler, which Python cannot install.
            if now != before and now is not None and before is not None:
                _setsignal(signum, before)
                changed.append(_NAMES.get(signum, str(signum)))
        if changed:
            self.hold()
        if changed and not self._are_told:
            self._are_told = True
            logger.info("the function left signal handlers behind (%s): restored", ", ".join(changed))

    def hold(self) -> None:
        """Wraps all Python handlers. A second call is harmless, and completes a call that was cut short."""
        for signum in self._signals:
            handler = _getsignal(signum)
            if callable(handler) and not isinstance(handler, _KeptHandler):
                _setsignal(signum, _KeptHandler(handler, self._kept))

    def release(self) -> None:
        """Unwraps the handlers, except those that other code has replaced meanwhile."""
        for signum in self._signals:
            handler = _getsignal(signum)
            if isinstance(handler, _KeptHandler):
                _setsignal(signum, handler.handler)

    def forget(self) -> None:
        """Logs the kept exceptions, once it is too late to raise them."""
        while self._kept:
            error = self._kept.pop(0)
            logger.warning("a signal handler raised %r outside the function: ignored", error)

    def raise_kept(self) -> None:
        """Raises the first kept exception, if there is one, and logs the others.

        Raises:
            Exception: a handler's exception.
        """
        if self._kept:
            error = self._kept.pop(0)
            self.forget()
            raise error


# Signals in use ---------------------------------------------------------------------------------------------


def free_signal() -> int:
    """Returns a real-time signal that neither Python nor a C library uses in this process.

    Raises:
        RuntimeError: none is free.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handled = handled_signals()
    for signum in range(signal.SIGRTMIN + 1, signal.SIGRTMAX + 1):
        is_default = signal.getsignal(signum) is signal.SIG_DFL
        if signum not in blocked and is_default and signum not in handled:
            return signum
    raise RuntimeError(
        "every real-time signal is in use, ignored or blocked in this process; "
        "ft_wrapper needs one to interrupt the function, and one to ask where it hangs"
    )


def handled_signals(pid: int | None = None) -> list[int]:
    """Returns the signals with a handler, including a C library's handlers, which Python does not know.

    Args:
        pid: a process that has not been reaped; None for this one.
    """
    with open(f"/proc/{pid or 'self'}/status", encoding="ascii", errors="replace") as status:
        fields = dict(line.split(":", 1) for line in status if ":" in line)
    bits = int(fields.get("SigCgt", "0"), 16)
    return [int(signum) for signum in signal.valid_signals() if bits >> (signum - 1) & 1]
