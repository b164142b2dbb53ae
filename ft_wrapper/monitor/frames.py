"""Frames and tracebacks: describes what a thread is doing, and frees what an exception keeps alive.

The monitor can also ask from outside the process, even while the rank holds the GIL: on a signal, Python's
``faulthandler`` writes the stack of the main thread into a pipe. It does so in the signal's handler, in C,
and takes no lock. The monitor reads the pipe through ``/proc``.

``sys._current_frames()`` and ``sys._current_exceptions()`` make objects while they lock the interpreter's
list of threads. Before 3.12 (CPython's issue 106883) that may start a garbage collection. A finalizer in it
may release the GIL to a thread that takes the GIL and then waits for the list, a deadlock. So the collector
is off during these calls.
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
    """Returns the exception that another thread handles, if any.

    Args:
        thread: the thread's identifier.
    """
    handled: Any = _uncollected(sys._current_exceptions).get(thread)
    error: BaseException | None = handled[1] if isinstance(handled, tuple) else handled  # before Python 3.12
    return error


def _uncollected(look: Callable[[], Any]) -> Any:
    """Calls a C function with the collector off, and returns its result.

    All of it is one C call: no other thread gets the GIL and calls ``gc.disable()``, which this would undo.
    """
    if sys.version_info >= (3, 12):
        return look()  # the collector runs between two instructions only
    results: list[Any] = []
    calls = (gc.isenabled, gc.disable, look, gc.enable)
    # `gc.enable` is called only if `gc.isenabled` returned True.
    results.extend(map(operator.call, itertools.compress(calls, itertools.chain((1, 1, 1), results))))
    return results.pop(2)  # otherwise this frame, which is among them, would refer to itself: a cycle


# ---- what a thread is doing: the log line of a hang shows which ranks wait, and which they wait for


class SourceLocation(NamedTuple):
    """A frame's position in the source.

    Args:
        file: path of the source file.
        line: line number.
        function: name of the function.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}"


def describe_thread(thread: int) -> str | None:
    """Describes what a thread is doing.

    Args:
        thread: the thread's ``threading.get_ident()``.

    Returns:
        The function it is in and the line of the user's code that led there; None if there is no such thread.
    """
    return describe_stack(list(locations(current_frames().get(thread))))


def describe_stack(stack: Sequence[SourceLocation]) -> str | None:
    """Describes a stack: its innermost function, and the line of the user's code that led there.

    Args:
        stack: locations of the frames, the innermost first.

    Returns:
        The description; None if the stack is empty.
    """
    if not stack:
        return None
    inner = stack[0]
    users = next((place for place in stack if not is_library(place.file)), inner)
    return f"at {inner}" if users is inner else f"in {inner.function}, called at {users}"


def is_library(file: str) -> bool:
    """Whether a source file belongs to Python's library or to an installed package."""
    return any(part in file for part in _LIBRARIES)


def locations(frame: FrameType | None) -> Iterator[SourceLocation]:
    """The locations of a frame and of its callers."""
    while frame is not None:
        yield SourceLocation(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


# ---- the same, asked from outside the process


@contextlib.contextmanager
def dumping_stacks(memory: RankMemory) -> Iterator[None]:
    """Within it, the monitor can ask for the main thread's stack. Entered by the main thread.

    Args:
        memory: the rank's shared memory, where the monitor finds the signal and the pipe.

    Raises:
        RuntimeError: no real-time signal is free.
        OSError: no file descriptor is free.
    """
    signum = free_signal()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # in a forked child the pipe has no reader
    faulthandler.register(signum, file=writer, all_threads=False, chain=False)
    memory.dump_fd = reader
    memory.dump_signal = signum  # last: the monitor asks once it is set
    try:
        yield
    finally:
        memory.dump_signal = 0
        faulthandler.unregister(signum)
        os.close(reader)
        os.close(writer)


def describe_main_thread(memory: RankMemory, pid: int, pidfd: int) -> str | None:
    """Describes what the main thread of a rank is doing, just before the rank's process is ended.

    Args:
        memory: the memory shared with the rank.
        pid: the rank's process.
        pidfd: a pidfd of this process.

    Returns:
        A description as of `describe_thread`; None if the main thread cannot be asked, or does not begin to
        answer within half a second.
    """
    signum = memory.dump_signal
    if not signum:
        return None
    text = b""
    pipe = f"/proc/{pid}/fd/{memory.dump_fd}"
    # This fails if the process has just ended on its own.
    with contextlib.suppress(OSError), open(pipe, "rb", buffering=0, opener=_open_nonblocking) as dump:
        # To the main thread, since the dump shows the thread that gets the signal. While the main thread is
        # being interrupted, the kernel gives a signal for the process to another thread (86 of 90 times).
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
        trace: the traceback of an exception that left the wrapped function.
    """
    while trace is not None and is_own(trace.tb_frame):
        trace = trace.tb_next
    return trace


def raised_at(trace: TracebackType | None) -> SourceLocation | None:
    """The innermost line of the user's code that led to an exception; without such a line, the outermost.

    Args:
        trace: the traceback of an exception that left the wrapped function.
    """
    lines = [(frame, number) for frame, number in traceback.walk_tb(users_part(trace))]
    found = next((line for line in reversed(lines) if _is_users(line[0])), lines[0] if lines else None)
    if found is None:
        return None
    frame, number = found
    return SourceLocation(frame.f_code.co_filename, number, frame.f_code.co_name)


def users_line(thread: int) -> SourceLocation | None:
    """The innermost line of the user's code in a thread's stack; None if it has none.

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
    """Drops the wrapper's own frames from the start of a traceback, if user frames follow, and clears them.

    A user frame refers to its callers, and would keep alive everything they hold.

    Args:
        error: an exception that leaves the wrapped function, caught in the outermost frame.
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
    """Whether a frame runs code of this package."""
    module: str = frame.f_globals.get("__name__", "")
    return module.partition(".")[0] == __name__.partition(".")[0]


def forget_frames(error: BaseException) -> None:
    """Drops the objects that the frames of an exception hold: models, tensors, process groups.

    Args:
        error: the exception; its causes and contexts are cleared, too.
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
    """Describes why a distributed checkpoint failed; None if the error is no such failure.

    Torch's ``CheckpointException`` is a ``BaseException``, though its cause may be a fault like any other (a
    full disk).

    Args:
        error: an exception that left the wrapped function.
    """
    # If the module is not imported, this is not its exception.
    api: Any = sys.modules.get("torch.distributed.checkpoint.api")
    if api is None or not isinstance(error, api.CheckpointException):
        return None
    by_rank = [
        f"rank {rank}: {''.join(traceback.format_exception_only(cause)).strip()}"
        for rank, (cause, _) in error.failures.items()
    ]
    return f"{type(error).__name__}: {'; '.join(by_rank)}"
