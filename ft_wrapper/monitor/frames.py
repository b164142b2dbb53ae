"""Frames and tracebacks: where threads stand, in words, and what an exception keeps alive.

A rank can also be asked from outside its process where it stands, when it holds the GIL: it has Python's
``faulthandler`` write the stack of its main thread into a pipe when a signal comes. That happens in the
signal's handler, in C, and takes no lock. The monitor reads the pipe through ``/proc``.

``sys._current_frames()`` and ``sys._current_exceptions()`` make objects while they hold the interpreter's
list of threads. Before 3.12 (CPython's issue 106883) a garbage collection may begin there, and what it
destroys may release the GIL to a thread that then waits, GIL in hand, for the list. So nothing is collected
meanwhile.
"""

import contextlib
import ctypes
import faulthandler
import gc
import itertools
import operator
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from types import FrameType, TracebackType
from typing import Any, NamedTuple, cast

import psutil

from ..exception import RankShouldRestart
from .shared_memory import RankMemory
from .signals import free_signal

_LIBRARIES = (
    f"{os.sep}site-packages{os.sep}",
    f"{os.sep}dist-packages{os.sep}",
    os.path.dirname(os.__file__),
)
_FIRST_LINE = 0.5  # seconds until the dump begins; a process in an uninterruptible wait writes none
_NEXT_LINE = 0.05  # seconds between two of its lines: there is no mark at its end
_SYS_TGKILL = {"x86_64": 234, "aarch64": 131}.get(os.uname().machine)  # glibc's own: from 2.30 only
_FRAME = re.compile(r'^ +File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def current_frames() -> dict[int, FrameType]:
    """Returns the innermost frame of each thread by its identifier, as ``sys._current_frames()``."""
    return cast(dict[int, FrameType], _uncollected(sys._current_frames))


def current_exception(thread: int) -> BaseException | None:
    """Returns the exception that a thread handles, if any; in one's own, ``sys.exc_info()`` serves.

    Args:
        thread: the thread's identifier.
    """
    handled: Any = _uncollected(sys._current_exceptions).get(thread)
    error: BaseException | None = handled[1] if isinstance(handled, tuple) else handled  # before Python 3.12
    return error


def _uncollected(look: Callable[[], Any]) -> Any:
    """What a function in C returns; nothing is collected meanwhile.

    All of it is one call of C, in which no other thread gets the GIL: its ``gc.disable()`` would be undone.
    """
    if sys.version_info >= (3, 12):  # collects between two instructions only
        return look()
    results: list[Any] = []
    calls = (gc.isenabled, gc.disable, look, gc.enable)
    # The last one depends on what the first has returned.
    results.extend(map(operator.call, itertools.compress(calls, itertools.chain((1, 1, 1), results))))
    return results.pop(2)  # not left in a variable of a frame that is among them: that would be a cycle


# ---- where a thread stands: for the log line of a hang, to tell who waits from who is waited for


class SourceLocation(NamedTuple):
    """Where a frame is.

    Args:
        file: path of the source.
        line: number in it.
        function: its name.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}"


def describe_thread(thread: int) -> str | None:
    """Describes what a thread is doing.

    Args:
        thread: its identifier, as ``threading.get_ident()`` has it.

    Returns:
        The function it is in and the line of the user's code that led there; None if there is no such thread.
    """
    return describe_stack(list(locations(current_frames().get(thread))))


def describe_stack(stack: Sequence[SourceLocation]) -> str | None:
    """Says where a stack stands: the function it is in, and the line of the user's code that led there.

    Args:
        stack: the innermost frame first.

    Returns:
        None if it is empty.
    """
    if not stack:
        return None
    inner = stack[0]
    users = next((place for place in stack if not is_library(place.file)), inner)
    return f"at {inner}" if users is inner else f"in {inner.function}, called at {users}"


def is_library(file: str) -> bool:
    """Whether a source file is one of Python's library or of an installed package."""
    return any(part in file for part in _LIBRARIES)


def locations(frame: FrameType | None) -> Iterator[SourceLocation]:
    """The frame's place, and those of its callers."""
    while frame is not None:
        yield SourceLocation(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


# ---- the same, asked from outside the process


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
        os.set_blocking(self._write, False)  # a child of an earlier call has a pipe without a reader
        faulthandler.register(self._signum, file=self._write, all_threads=False, chain=False)
        memory.dump_fd = self._read
        memory.dump_signal = self._signum  # last: it says that there is one to ask

    def close(self) -> None:
        """Gives the signal and the pipe back."""
        self._memory.dump_signal = 0
        faulthandler.unregister(self._signum)
        os.close(self._read)
        os.close(self._write)


def describe_main_thread(memory: RankMemory, pid: int, pidfd: int) -> str | None:
    """Says where a rank's main thread stands, which is about to be ended. Takes at most half a second.

    Args:
        memory: shared with the rank.
        pid: its process.
        pidfd: of that.

    Returns:
        As `describe_thread`; None if there is no main thread to ask, or it does not answer.
    """
    signum = memory.dump_signal
    if not signum:
        return None
    text = b""
    pipe = f"/proc/{pid}/fd/{memory.dump_fd}"
    # What fails: it has just ended by itself.
    with contextlib.suppress(OSError), open(pipe, "rb", buffering=0, opener=_open_nonblocking) as dump:
        # To the main thread, as the dump is of the thread that gets it. The kernel gives a process's signal
        # to another thread while the main thread is being interrupted (86 of 90 times).
        signal.pidfd_send_signal(pidfd, 0 if _SYS_TGKILL else signum)
        if _SYS_TGKILL:
            ctypes.CDLL(None).syscall(_SYS_TGKILL, pid, pid, signum)
        while connection.wait([dump.fileno()], _NEXT_LINE if text else _FIRST_LINE) and (
            part := dump.read(1 << 16)
        ):
            text += part
    frames = _FRAME.findall(text.decode(errors="replace"))
    return describe_stack([SourceLocation(file, int(line), function) for file, line, function in frames])


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


# ---- the traceback of an exception that has left the wrapped function


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback without the wrapper's own frames at its start.

    Args:
        trace: of an exception that left the wrapped function.
    """
    while trace is not None and is_own(trace.tb_frame):
        trace = trace.tb_next
    return trace


def raised_at(trace: TracebackType | None) -> SourceLocation | None:
    """The innermost line of the user's code that led to an exception; if there is none, its outermost line.

    Args:
        trace: of an exception that left the wrapped function.
    """
    lines = [(frame, number) for frame, number in traceback.walk_tb(users_part(trace))]
    found = next((line for line in reversed(lines) if _is_users(line[0])), lines[0] if lines else None)
    if found is None:
        return None
    frame, number = found
    return SourceLocation(frame.f_code.co_filename, number, frame.f_code.co_name)


def users_line(thread: int) -> SourceLocation | None:
    """The innermost line of the user's code that a thread is in; None if it is in none.

    Args:
        thread: the thread's identifier.
    """
    frame = current_frames().get(thread)
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    return next(locations(frame), None)


def _is_users(frame: FrameType) -> bool:
    return not (is_own(frame) or is_library(frame.f_code.co_filename))


def drop_own_frames(error: BaseException) -> None:
    """Takes the wrapper's own frames from the start of a traceback, if the user's follow, and empties them.

    The user's frames refer to those that called them, and so would keep what these hold.

    Args:
        error: what leaves the wrapped function, caught in the outermost frame.
    """
    trace, users = error.__traceback__, users_part(error.__traceback__)
    if users is None:
        return
    error.__traceback__ = users
    while trace is not None and trace is not users:
        with contextlib.suppress(RuntimeError):  # the outermost one is running
            trace.tb_frame.clear()
        trace = trace.tb_next


def is_own(frame: FrameType) -> bool:
    """Whether a frame is one of this package."""
    module: str = frame.f_globals.get("__name__", "")
    return module.partition(".")[0] == __name__.partition(".")[0]


@contextlib.contextmanager
def interruptions_unreported() -> Iterator[None]:
    """In the block Python does not report ``RankShouldRestart`` raised where it can only ignore exceptions.

    A destructor or a callback of the collector is such a place. The interruption is raised again outside, so
    an "Exception ignored in" would only alarm.
    """
    report = sys.unraisablehook

    def unraisable_hook(unraisable: "sys.UnraisableHookArgs") -> None:  # `safe_points` knows this name
        if not issubclass(unraisable.exc_type, RankShouldRestart):
            report(unraisable)

    sys.unraisablehook = unraisable_hook
    try:
        yield
    finally:
        if sys.unraisablehook is unraisable_hook:
            sys.unraisablehook = report


def forget_frames(error: BaseException) -> None:
    """Drops what the frames of an exception hold: models, tensors, process groups.

    Args:
        error: the exception; those that it was raised from, or while handling, are cleared too.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        if link.__traceback__ is not None:
            traceback.clear_frames(link.__traceback__)
            link.__traceback__ = None
        pending += [link.__cause__, link.__context__]


def checkpoint_failure(error: BaseException) -> str | None:
    """Says what made a distributed checkpoint fail; None if the error is no such failure.

    Torch's ``CheckpointException`` is a ``BaseException``, though a full disk, say, is a fault like others.

    Args:
        error: what left the wrapped function.
    """
    # What it has not imported, it does not raise.
    api: Any = sys.modules.get("torch.distributed.checkpoint.api")
    if api is None or not isinstance(error, api.CheckpointException):
        return None
    by_rank = [
        f"rank {rank}: {''.join(traceback.format_exception_only(cause)).strip()}"
        for rank, (cause, _) in error.failures.items()
    ]
    return f"{type(error).__name__}: {'; '.join(by_rank)}"
