"""Signals as something that one can wait for, together with other things."""

import signal
import socket
import types
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""What is forwarded to the ranks and ends them, by default."""
SHUTDOWN_TIMEOUT = 5.0
"""Seconds from the signal that ends ranks to SIGKILL, by default."""


class Signalled(BaseException):
    """A signal arrived while nothing else could be done about it.

    Args:
        signum: its number.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal_name(signum))
        self.signum = signum


class SignalQueue:
    """The signals that arrived and were not looked at yet.

    Args:
        fd: where their numbers are read; readable when there are any.
        signals: those of interest.
    """

    def __init__(self, fd: socket.socket, signals: Iterable[int]) -> None:
        self.fd = fd
        self._signals = frozenset(signals)
        self._raises = False

    @property
    def ending(self) -> frozenset[int]:
        """Those that end the job: all but SIGCHLD."""
        return self._signals - {signal.SIGCHLD}

    def read(self) -> list[int]:
        """Takes out what arrived since the last call. Does not block."""
        try:
            return [signum for signum in self.fd.recv(4096) if signum in self._signals]
        except BlockingIOError:
            return []

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Within it, the first signal is raised instead, as `Signalled`; SIGCHLD is not.

        For waits that know nothing of signals. One that had come before counts, too.
        """
        self._raises = True
        try:
            for signum in self.read():
                self.note(signum, None)
            yield
        finally:
            self._raises = False

    def note(self, signum: int, frame: types.FrameType | None) -> None:
        """The handler. The wakeup fd has got the number already."""
        if self._raises and signum in self.ending:
            self._raises = False
            raise Signalled(signum)


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
        queue = SignalQueue(read_end, taken)
        cleanup.callback(
            signal.set_wakeup_fd, signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
        )
        for signum in taken:
            previous = signal.signal(signum, queue.note)
            cleanup.callback(signal.signal, signum, signal.SIG_DFL if previous is None else previous)
        yield queue


def signal_name(signum: int) -> str:
    """``SIGTERM`` for 15; real-time signals, which have no name each, by number."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
