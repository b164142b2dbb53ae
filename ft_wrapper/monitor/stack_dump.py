"""Where a rank stands, asked from outside its process: also of one that holds the GIL.

The rank has Python's ``faulthandler`` write the stack of its main thread into a pipe when a signal comes.
That happens in the signal's handler, in C, and takes no lock. The monitor reads the pipe through ``/proc``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import select
import signal

import psutil

from .frames import Place, stack_in_words
from .shared_memory import RankMemory
from .signals import free_signal

_FIRST_LINE = 0.5  # seconds until the dump begins; a process in an uninterruptible wait writes none
_NEXT_LINE = 0.05  # seconds between two of its lines: there is no mark at its end
_FRAME = re.compile(r'^ +File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class StackDump:
    """Has the main thread's stack written when the monitor asks for it. Made by the main thread.

    Args:
        memory: tells the monitor how to ask.

    Raises:
        RuntimeError: no real-time signal is free.
        OSError: no file descriptor is free.
    """

    def __init__(self, memory: RankMemory) -> None:
        self._memory = memory
        self._signum = free_signal()
        self._read, self._write = os.pipe()
        faulthandler.register(self._signum, file=self._write, all_threads=False, chain=False)
        memory.dump_fd = self._read
        memory.dump_signal = self._signum  # last: it says that there is one to ask

    def close(self) -> None:
        """Gives the signal and the pipe back."""
        self._memory.dump_signal = 0
        faulthandler.unregister(self._signum)
        os.close(self._read)
        os.close(self._write)


def where_it_stands(memory: RankMemory, pid: int, pidfd: int) -> str | None:
    """Says where a rank's main thread stands, which is about to be ended. Takes half a second at the most.

    Args:
        memory: shared with the rank.
        pid: its process.
        pidfd: of that.

    Returns:
        As `whereabouts`; None if it cannot be said: there is no main thread to ask, or it does not answer.
    """
    signum = memory.dump_signal
    if not signum:
        return None
    text = b""
    try:
        pipe = os.open(f"/proc/{pid}/fd/{memory.dump_fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        signal.pidfd_send_signal(pidfd, signum)
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while poll.poll(1000 * (_NEXT_LINE if text else _FIRST_LINE)):
            part = os.read(pipe, 1 << 16)
            if not part:
                break
            text += part
    except OSError:
        pass  # it has just ended by itself
    finally:
        os.close(pipe)
    frames = _FRAME.findall(text.decode(errors="replace"))
    return stack_in_words([Place(file, int(line), function) for file, line, function in frames])


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False
