"""Makes the thread that runs the function leave it.

The monitor thread sends a signal. Python runs the signal's handler in the main thread, between two
instructions, and the handler decides whether to raise the interruption. It may raise only between entering
and leaving `Interrupter.call`, and outside `Interrupter.atomic` and this module's own frames. Even there,
`Deferral` puts it off in two cases:

- The thread is at an *unsafe point* (`safe_points`). It enters or leaves a ``with``, for example: an
  interruption would leave a lock held, or gradients off, for good. Two exceptions: the thread has not moved
  for several resends, or *every* unsafe frame has been unsafe for `cleanup_timeout`. (Every one: waiting in
  an outer frame must not expose a newly entered inner one.) Two kinds of frame stay unsafe however long they
  take: an import, since half of one leaves a broken module behind for the rest of the process, and torch's
  call from C++ into Python, where an exception may abort the process.
- The thread cleans up after an earlier interruption (in a ``finally`` or an ``except``), or runs a finalizer
  (a ``__del__``, or a generator that is being closed). The thread gets another `cleanup_timeout` for that.

After a signal at an unsafe point, Python traces the unsafe frame and its callers by instruction, and the
tracer raises at the first safe point. If it reaches none, or a debugger already traces, the next signal tries
again, until the thread has left. Python swallows exceptions raised inside a finalizer. So the finalizer's
callers are traced, too, and the tracer raises again at their first safe point.

A signal handler cannot reach a function that runs outside the main thread. An asynchronous exception replaces
the signal there. It wakes no blocked call, and the rules are checked when it is sent, not where it arrives.

The function's thread takes no Python-level lock here: an exception (a Ctrl-C, too) between taking and
releasing it would leave it held. The few shared fields are single values, ordered by the GIL. Each side
writes its own field before it reads the other's, so at least one of the two sees the other's write.
"""

import contextlib
import ctypes
import inspect
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from ..exception import JobAbort, RankShouldRestart, RestartAbort
from ..settings import AllLimits
from .frames import current_exception, current_frames
from .safe_points import obstacle, prepare
from .signals import free_signal

P = ParamSpec("P")
T = TypeVar("T")

#: Seconds between two signals while the function does not leave; the first few follow each other faster.
RESEND_INTERVAL = 0.02

_MESSAGE = "this restart iteration is over; let the exception pass"
_FIRST_RESEND = 0.001
_STUCK_AFTER = 3  # resend intervals at one instruction
_TO_LEAVE = (RestartAbort, RankShouldRestart)  # an exception group of these alone stands for its first


class Interrupter:
    """Runs a function so that another thread can make it leave.

    The thread that runs the function makes it, and calls all methods but `look_ahead`, `request` and
    `interrupt_until_left`. In the main thread it also installs a signal's handler.

    Args:
        cleanup_timeout: seconds for the function's clean-up, before the clean-up is interrupted, too.

    Attributes:
        thread: the function's thread, by its ``threading.get_ident()``.
        signum: the signal in use; None outside the main thread.
        requested: whether the function of this iteration has to leave.
        is_running: whether the function is being called, and may be interrupted.

    Raises:
        RuntimeError: no real-time signal is free.
    """

    def __init__(self, cleanup_timeout: float = AllLimits.cleanup_timeout) -> None:
        self.thread = threading.get_ident()
        self.signum: int | None = None
        # Written by the function's thread.
        self.is_running = False
        self._depth = 0
        self._cleanup_timeout = cleanup_timeout
        self._deferral = Deferral(cleanup_timeout)
        self._traced = False
        self._atomic = Atomic(self)
        # Written by the monitor thread.
        self.requested = False
        self._sent_async = False  # the function's thread resets it, once sending has stopped
        # Between the two threads. `_inside`: the function's thread holds it inside `call`. `_sending`: held
        # from a check of `is_running` to the sending that follows. `_left_atomic`: an atomic block has ended.
        self._inside = threading.Lock()
        self._sending = threading.Lock()
        self._left_atomic: queue.SimpleQueue[None] = queue.SimpleQueue()
        if threading.current_thread() is threading.main_thread():
            self.signum = free_signal()
            signal.signal(self.signum, self._handle)
            signal.siginterrupt(self.signum, True)

    # ---- the function's thread

    def close(self) -> None:
        """Releases the signal, after the function has left."""
        if self.signum is None:
            return
        # A signal that was just sent may be pending, and by default it ends the process. So: block it, ignore
        # it (which discards it), restore the default, unblock.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {self.signum})
        try:
            signal.signal(self.signum, signal.SIG_IGN)
            signal.signal(self.signum, signal.SIG_DFL)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def reset(self) -> None:
        """Forgets the interruption, before the next iteration; the monitor thread is done with the last."""
        self.requested = False

    def call(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function, which `request` and `interrupt_until_left` can end from another thread.

        Once this method has returned or raised, no interruption comes.

        Raises:
            RankShouldRestart: the function was interrupted: before it began, while it ran, or after it had
                returned. If an interrupted function raises an ``Exception``, this is the cause.
            BaseException: any other error of the function. If it is not an ``Exception``, then also when the
                function was interrupted.
        """
        result: Any = None
        error: BaseException | None = None
        began = left = False
        with self._inside:
            # An exception in the bookkeeping itself (a Ctrl-C; outside the main thread an interruption) must
            # not cut the bookkeeping short.
            while not left:
                try:
                    if not began:
                        began = True
                        self.is_running = True
                        if not self.requested:
                            result = _run(fn, args, kwargs)
                    self.is_running = False
                    self._withdraw()
                    _stop_tracing(None)
                    self._leave_atomic()  # the function may have left a block open
                    self._deferral = Deferral(self._cleanup_timeout)  # the old one holds frames
                    self._traced = False
                    left = True
                except BaseException as raised:
                    error = _weightier(error, raised)
        if isinstance(error, RankShouldRestart):
            error = _replaced_by(error) or error
        try:
            if self.requested and (error is None or isinstance(error, Exception)):
                raise RankShouldRestart(_MESSAGE) from error
            if error is not None:
                raise error
        finally:
            del error  # its traceback refers to this frame
        return result  # type: ignore[no-any-return]

    def atomic(self) -> "Atomic":
        """Returns the context manager for a block that is not interrupted.

        Reentrant. An interruption waits for the end of the outermost block. This end then raises
        ``RankShouldRestart``, unless another exception leaves the block. Beginning a block after an
        interruption raises it, too. Outside `call` neither raises.

        Raises:
            RuntimeError: on entering, in another thread than the function's.
        """
        return self._atomic

    def _leave_atomic(self) -> None:
        self._depth = 0
        if self.requested:
            self._left_atomic.put(None)

    def _withdraw(self) -> None:
        """After disarming: ensures that nothing more is sent, and takes back an asynchronous exception.

        A signal that is still pending finds the handler disarmed.
        """
        with self._sending:  # a sender that read `is_running` before has sent by now
            pass
        if self._sent_async:
            self._sent_async = False
            _take_back_async_exception(self.thread)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self._is_due() or _is_own(frame):
            return
        raises, trace_from = self._deferral.decide(frame, sys.exc_info()[1])
        if trace_from is not None:
            self._trace_from(trace_from)
        elif raises:
            _stop_tracing(frame)
        if raises:
            raise self._interruption()

    def _is_due(self) -> bool:
        return self.is_running and self.requested and not self._depth

    def _interruption(self) -> RankShouldRestart:
        self._deferral.interrupted()
        self._traced = False
        return RankShouldRestart(_MESSAGE)

    def _trace_from(self, frame: FrameType | None) -> None:
        """Raises at the first safe point of a frame and its callers. New frames are not traced."""
        if sys.gettrace() not in (None, _trace_no_call):
            return  # a debugger traces; the next signal comes soon
        while frame is not None and frame.f_code is not _run.__code__:
            frame.f_trace = self._trace
            frame.f_trace_opcodes = True
            frame = frame.f_back
        sys.settrace(_trace_no_call)
        self._traced = True

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "return":  # or an exception, or a generator's yield
            _stop_tracing_frame(frame)
            return None  # or it would be traced again
        if (
            event in ("opcode", "line")
            and self._is_due()
            and self._deferral.is_safe(frame, sys.exc_info()[1])
        ):
            _stop_tracing(frame)
            raise self._interruption()
        return self._trace

    # ---- the monitor thread

    def look_ahead(self) -> None:
        """Analyses the code that the function runs now, so that an interruption need not.

        The first analysis takes up to a millisecond, and at a restart the other ranks would wait for it. Code
        that the function enters later is analysed when an interruption meets it.
        """
        if self.is_running:
            prepare(current_frames().get(self.thread), _run.__code__)

    def request(self) -> None:
        """Requests that the function leaves, and waits for the end of its atomic block, if it is in one.

        From then on the function cannot begin another atomic block. `interrupt_until_left` makes it leave.
        """
        self.requested = True
        while self._depth:
            self._left_atomic.get()

    def interrupt_until_left(self, timeout: float) -> bool:
        """Interrupts the function repeatedly, until its thread has left `call`.

        Args:
            timeout: the most seconds to try.

        Returns:
            Whether the thread has left.
        """
        deadline = time.monotonic() + timeout
        pause = min(_FIRST_RESEND, RESEND_INTERVAL)
        wait = 0.0
        while not self._inside.acquire(timeout=wait):
            remaining = deadline - time.monotonic()
            if remaining <= 0.0:
                return False
            self._send()
            wait = min(pause, remaining)
            # At short intervals first, and while an untraced thread moves from one unsafe point to another.
            quickly = self._deferral.passing is not None and not self._traced
            pause = min(_FIRST_RESEND if quickly else 2 * pause, RESEND_INTERVAL)
        self._inside.release()
        return True

    def _send(self) -> None:
        with self._sending:
            if not self.is_running or self._depth:
                return
            if self.signum is not None:
                # EAGAIN: the kernel's queue is full of them, so one will reach the thread anyway.
                with contextlib.suppress(BlockingIOError):
                    signal.pthread_kill(self.thread, self.signum)
                return
            frame = current_frames().get(self.thread)
            if _is_own(frame):
                return
            raises, _ = self._deferral.decide(frame, current_exception(self.thread))
            if raises:
                self._interruption()
                self._sent_async = True
                _set_async_exception(self.thread, RankShouldRestart)


class Atomic:
    """The context manager of `Interrupter.atomic`: one object, entered any number of times."""

    __slots__ = ("_interrupter",)

    def __init__(self, interrupter: Interrupter) -> None:
        self._interrupter = interrupter

    def __enter__(self) -> None:
        """Begins a block that is not interrupted.

        Raises:
            RankShouldRestart: the iteration is already over.
            RuntimeError: in another thread than the function's.
        """
        interrupter = self._interrupter
        if interrupter.thread != threading.get_ident():
            raise RuntimeError("atomic() must be entered by the thread that runs the function")
        interrupter._depth += 1
        if interrupter.requested and interrupter._depth == 1 and interrupter.is_running:
            interrupter._leave_atomic()
            interrupter._deferral.interrupted()
            raise RankShouldRestart(_MESSAGE)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the block.

        Raises:
            RankShouldRestart: the outermost block ends without an exception, and the iteration is over.
        """
        interrupter = self._interrupter
        if interrupter._depth > 1:
            interrupter._depth -= 1
            return
        interrupter._leave_atomic()
        if interrupter.requested and interrupter.is_running and kind is None:
            interrupter._deferral.interrupted()
            raise RankShouldRestart(_MESSAGE)


class RaiseDecision(NamedTuple):
    """What `Deferral` decides.

    Args:
        raises: whether to raise now.
        trace_from: the frame that is traced, with its callers, to raise at the first safe point: later, or
            once more if Python swallows the exception raised now. None if no frame is traced.
    """

    raises: bool
    trace_from: FrameType | None


class Deferral:
    """Decides whether the function can be made to leave where it is. Belongs to the function's thread.

    Args:
        cleanup_timeout: seconds for ``finally`` and ``except`` blocks, and for reaching a safe point.

    Attributes:
        passing: the innermost frame, its instruction, and when it was first seen there, if the thread was at
            an unsafe point at the last look; otherwise None.
    """

    def __init__(self, cleanup_timeout: float) -> None:
        self._timeout = cleanup_timeout
        # When the clean-up after an interruption began, or was first seen; None if there was none.
        self._cleaning_since: float | None = None
        # Since when each frame is at an unsafe point, and how often `passing` was seen again.
        self._unsafe_since: dict[FrameType, float] = {}
        self.passing: tuple[FrameType, int, float] | None = None
        self._seen_again = 0

    def interrupted(self) -> None:
        """Notes that an interruption is about to be raised: the function's clean-up follows."""
        self.passing = None
        self._unsafe_since = {}
        self._cleaning_since = time.monotonic()

    def decide(self, frame: FrameType | None, handled: BaseException | None) -> RaiseDecision:
        """Decides whether an interruption is raised where the function is now.

        Args:
            frame: the function's innermost frame.
            handled: the exception that the function's thread handles.
        """
        found = obstacle(frame, _run.__code__)
        now = time.monotonic()
        self._unsafe_since = {each: self._unsafe_since.get(each, now) for each in found.frames}
        waited_for = [each for each in found.frames if not self._has_waited(each)]
        if not found.frames:
            self.passing = None
            raises = True
        else:
            raises = not found.for_good and (self._is_stuck(frame) or not waited_for)
        if raises and (found.finalizer is not None or self._is_cleaning_up(handled)):
            if self._cleaning_since is None:
                self._cleaning_since = now
            raises = now - self._cleaning_since >= self._timeout
        if found.finalizer is not None:
            return RaiseDecision(raises, found.finalizer.f_back)
        trace_from = _outside_generator(frame) if _is_in_context(handled, GeneratorExit) else None
        if trace_from is None and waited_for and not raises:
            trace_from = waited_for[-1]
        return RaiseDecision(raises, trace_from)

    def is_safe(self, frame: FrameType, handled: BaseException | None) -> bool:
        """Whether an interruption can be raised where a traced frame is now."""
        found = obstacle(frame, _run.__code__)
        if found.for_good or found.finalizer is not None:
            return False
        return all(map(self._has_waited, found.frames)) and not self._is_cleaning_up(handled)

    def _has_waited(self, frame: FrameType) -> bool:
        """Whether a frame has been unsafe for `cleanup_timeout`, and no longer delays an interruption."""
        since = self._unsafe_since.get(frame)
        return since is not None and time.monotonic() - since >= self._timeout

    def _is_cleaning_up(self, handled: BaseException | None) -> bool:
        """Whether the thread handles an earlier interruption, or closes a generator."""
        kinds = GeneratorExit if self._cleaning_since is None else (GeneratorExit, RankShouldRestart)
        return _is_in_context(handled, kinds)

    def _is_stuck(self, frame: FrameType | None) -> bool:
        """Whether several signals, over several resend intervals, found the thread at this instruction.

        Time alone does not show it: a thread that waits for a processor does not move either. The frame is
        kept until the next signal, or a new frame could get its address.
        """
        if frame is None:
            return False
        now = time.monotonic()
        if self.passing is None or self.passing[:2] != (frame, frame.f_lasti):
            self.passing = (frame, frame.f_lasti, now)
            self._seen_again = 0
        else:
            self._seen_again += 1
        long = now - self.passing[2] >= _STUCK_AFTER * RESEND_INTERVAL
        return long and self._seen_again >= _STUCK_AFTER


def _outside_generator(frame: FrameType | None) -> FrameType | None:
    """The caller of the innermost generator. An exception in a generator being closed does not reach it."""
    while frame is not None and frame.f_code is not _run.__code__:
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            return frame.f_back
        frame = frame.f_back
    return None


def _is_in_context(
    error: BaseException | None, kinds: type[BaseException] | tuple[type[BaseException], ...]
) -> bool:
    for _ in range(100):
        if error is None or isinstance(error, kinds):
            return error is not None
        error = error.__context__
    return False


def _run(fn: Callable[..., T], args: Any, kwargs: Any) -> T:
    """Calls the function. Of this module's frames, only this one may be interrupted."""
    return fn(*args, **kwargs)


def _is_own(frame: FrameType | None) -> bool:
    """Whether the function's thread is inside this module."""
    while frame is not None and frame.f_code is not _run.__code__:
        if frame.f_globals is _OWN:
            return True
        frame = frame.f_back
    return False


def _trace_no_call(frame: FrameType, event: str, argument: object) -> None:
    """Traces no new frame. With it as `sys.settrace`'s function, older frames are traced by ``f_trace``."""


def _stop_tracing(frame: FrameType | None) -> None:
    """Ends our tracing, not a debugger's, of a frame and its callers up to the function's."""
    if sys.gettrace() is _trace_no_call:
        sys.settrace(None)
        while frame is not None and frame.f_code is not _run.__code__:
            _stop_tracing_frame(frame)
            frame = frame.f_back


def _stop_tracing_frame(frame: FrameType) -> None:
    frame.f_trace = None
    frame.f_trace_opcodes = False


def _replaced_by(interruption: RankShouldRestart) -> BaseException | None:
    """The Ctrl-C or exit, if any, that an interruption replaced on its way out. It must not be lost."""
    link = interruption.__context__
    while link is not None:
        if isinstance(link, (KeyboardInterrupt, SystemExit)):
            return link
        link = link.__context__
    return None


def _weightier(error: BaseException | None, raised: BaseException) -> BaseException:
    """Returns the one of two exceptions that counts. An exception group stands for the wrapper's own in it.

    Args:
        error: the first exception; None if there was none.
        raised: the second exception.
    """
    if isinstance(raised, BaseExceptionGroup):
        groups = map(raised.subgroup, (JobAbort, RestartAbort, RankShouldRestart))
        raised = next((group for group in groups if group is not None), raised)
        while isinstance(raised, BaseExceptionGroup) and raised.split(_TO_LEAVE)[1] is None:
            raised = raised.exceptions[0]
    return raised if error is None or not isinstance(raised, (Exception, RankShouldRestart)) else error


class _Replaced(Exception):
    """Replaces an interruption that is no longer needed."""


def _take_back_async_exception(thread: int) -> None:
    """Ensures that an asynchronous exception sent to the calling thread no longer arrives.

    Another exception replaces it, and is caught here. Clearing it instead would leave CPython (3.11 and 3.12)
    checking for one at every call, for good; and if a frame is traced by instruction, a new frame would check
    forever.

    Args:
        thread: the calling thread.
    """
    try:
        _set_async_exception(thread, _Replaced)
        for _ in range(1000):  # CPython raises it at a loop's jump back
            pass
    except _Replaced:
        pass


def _set_async_exception(thread: int, kind: type[BaseException]) -> None:
    function: Any = ctypes.pythonapi.PyThreadState_SetAsyncExc
    function(ctypes.c_ulong(thread), ctypes.py_object(kind))


_OWN = globals()
