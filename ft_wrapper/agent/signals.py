"""Signals as something that one can wait for, together with other things."""

from __future__ import annotations

import signal
import socket
import types
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager


class SignalQueue:
    """The signals that arrived and were not looked at yet.

    Args:
        fd: where their numbers are read; readable when there are any.
        signals: those of interest.
    """

    def __init__(self, fd: socket.socket, signals: Iterable[int]) -> None:
        self.fd = fd
        self._signals = frozenset(signals)

    def read(self) -> list[int]:
        """Takes out what arrived since the last call. Does not block."""
        try:
            return [signum for signum in self.fd.recv(4096) if signum in self._signals]
        except BlockingIOError:
            return []


@contextmanager
def queued(signals: Iterable[signal.Signals]) -> Iterator[SignalQueue]:
    """Takes signals over for a while; handlers and wakeup fd are put back afterwards. Main thread only.

    Args:
        signals: which ones. A hangup that is being ignored (``nohup``) stays so.
    """
    taken = [s for s in signals if not (s == signal.SIGHUP and signal.getsignal(s) is signal.SIG_IGN)]
    with ExitStack() as cleanup:
        read_end, write_end = (cleanup.enter_context(end) for end in socket.socketpair())
        read_end.setblocking(False)
        write_end.setblocking(False)
        cleanup.callback(
            signal.set_wakeup_fd, signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
        )
        for signum in taken:
            previous = signal.signal(signum, _noted)
            cleanup.callback(signal.signal, signum, signal.SIG_DFL if previous is None else previous)
        yield SignalQueue(read_end, taken)


def signal_name(signum: int) -> str:
    """``SIGTERM`` for 15; real-time signals, which have no name each, by number."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _noted(signum: int, frame: types.FrameType | None) -> None:
    """Does nothing: the wakeup fd has got the number already."""
