"""The signals that an agent gets: queued for its loop, or raised in code that cannot look at a queue.

A process of ours also gets one from the kernel when its parent dies: `die_with`.
"""

import ctypes
import os
import signal
import socket
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

from ..exception import RestartTimeout, StoreUnavailable
from ..store.bounded import call_in_thread

T = TypeVar("T")

#: Those that are forwarded to the ranks and end them, by default.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
#: Handed to the ranks that have a handler; they end nothing. Schedulers send them ahead of a job's end.
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
#: As what a supervisor forwards each of them to its agent: a sender may signal every process, as SLURM does,
#: and then the agent has that signal already. So it counts both, and the larger count counts.
FORWARDED: dict[int, int] = {signum: signal.SIGRTMIN + signum for signum in (*SIGNALS, *NOTICES)}
_ORIGINAL = {forwarded: signum for signum, forwarded in FORWARDED.items()}
#: Seconds from the signal that ends ranks to SIGKILL, by default.
SHUTDOWN_TIMEOUT = 5.0

_PR_SET_PDEATHSIG = 1
# Looked up before any fork: between fork and exec that would not be safe.
prctl = ctypes.CDLL(None, use_errno=True).prctl


class Signalled(BaseException):
    """A signal arrived while nothing else could be done about it.

    Args:
        signum: its number.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal_name(signum))
        self.signum = signum


class SignalQueue:
    """The signals that arrived and were not read yet.

    Args:
        fd: where their numbers are read; readable when there are any.
        ending: those that end the job.
    """

    def __init__(self, fd: socket.socket, ending: Iterable[int]) -> None:
        self.fd = fd
        self.ending = frozenset(ending)
        self._raises = False
        self._got: Counter[int] = Counter()

    def read(self, flags: int = 0) -> list[int]:
        """Takes out what arrived since the last call; ``MSG_PEEK`` leaves it there. Does not block."""
        with suppress(BlockingIOError):
            got, arrived = self._got.copy() if flags else self._got, self.fd.recv(4096, flags)
            return [original(signum) for signum in arrived if _is_new(signum, got)]
        return []

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Within it, the first signal that ends the job is raised, too, as `Signalled`; others are not.

        For waits that ignore signals. A signal that came earlier and was not read counts, too.
        """
        self._raises = True
        try:
            for signum in self.read(socket.MSG_PEEK):
                self.note(signum, None)
            yield
        finally:
            self._raises = False

    def interruptible(self, ask: Callable[[], T], seconds: float | None) -> T:
        """Asks something in a thread; a signal that ends the job ends the wait for the answer.

        Args:
            ask: asks, and returns the answer.
            seconds: how long to wait; None if the function has a limit of its own.

        Raises:
            StoreUnavailable: a signal came, or it took longer.
        """
        try:
            with self.raised():
                return call_in_thread(ask, "asking the store", seconds)
        except (Signalled, RestartTimeout) as error:
            raise StoreUnavailable(f"not waited for: {error}") from error

    def note(self, signum: int, frame: types.FrameType | None) -> None:
        """The handler. The wakeup fd has got the number already."""
        if self._raises and original(signum) in self.ending:
            self._raises = False
            raise Signalled(original(signum))


def original(signum: int) -> int:
    """The signal that a supervisor has forwarded as this one; itself if it is none of `FORWARDED`."""
    return _ORIGINAL.get(signum, signum)


def _is_new(signum: int, got: Counter[int]) -> bool:
    """Counts an arrival; false if the same signal has come the other way, directly or forwarded, before."""
    got[signum] += 1
    return got[signum] > got[FORWARDED.get(signum, _ORIGINAL.get(signum, 0))]


@contextmanager
def queued(ending: Iterable[signal.Signals]) -> Iterator[SignalQueue]:
    """Takes over signals within the context: these, `NOTICES` and SIGCHLD. Main thread only.

    Handlers and wakeup fd are put back afterwards; forwarded signals are ignored then. A hangup (``nohup``)
    or a notice that is being ignored stays so.

    Args:
        ending: those that end the job.
    """
    ignored = [s for s in (signal.SIGHUP, *NOTICES) if signal.getsignal(s) is signal.SIG_IGN]
    ending = frozenset(ending).difference(ignored)
    taken = ending.union(NOTICES, (signal.SIGCHLD,)).difference(ignored)
    with ExitStack() as cleanup:
        read_end, write_end = (cleanup.enter_context(end) for end in socket.socketpair())
        read_end.setblocking(False)
        write_end.setblocking(False)
        queue = SignalQueue(read_end, ending)
        cleanup.callback(
            signal.set_wakeup_fd, signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
        )
        for signum in taken.intersection(FORWARDED):
            signal.signal(FORWARDED[signum], queue.note)
            # The other one of two may come late, and must not kill a process that is about to exit. It is
            # handled, as programs that are started later would ignore what this process ignores.
            cleanup.callback(signal.signal, FORWARDED[signum], lambda *_: None)
        for signum in taken:
            previous = signal.signal(signum, queue.note)
            cleanup.callback(signal.signal, signum, signal.SIG_DFL if previous is None else previous)
        yield queue


def handle_notices(handler: Callable[[int, types.FrameType | None], object] | signal.Handlers) -> None:
    """Sets the handler of all `NOTICES`; one that is being ignored stays so. Main thread only."""
    for signum in NOTICES:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, handler)
            signal.signal(FORWARDED[signum], handler)


def signal_name(signum: int) -> str:
    """``SIGTERM`` for 15; real-time signals, which have no names, by number."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def die_with(parent: int, ignored: Sequence[int] = ()) -> None:
    """This process is killed when its parent dies, even while it holds the GIL; at once if it has died.

    Args:
        parent: the process that is our parent, if it lives.
        ignored: signals that this process ignores.
    """
    for signum in ignored:
        signal.signal(signum, signal.SIG_IGN)
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
