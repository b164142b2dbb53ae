"""How the thread that runs the function is made to leave it.

The monitor thread sends a signal to that thread; the handler, which Python runs in the main thread between
two instructions of whatever it is doing, decides there and then whether to raise. It does so only:

- between entering and leaving `Interrupter.call`, and outside `Interrupter.atomic`;
- where every frame up to the function's is at a right place (`right_place`): one that makes, enters or leaves
  a ``with``, say, would leave a lock held or gradients off for good; unless the thread is stuck there, or
  each frame that is at a wrong place has been for a grace time (each: a long call from a wrong place does not
  lay open what it calls). No time helps against an import, which cut short leaves a broken module behind for
  the rest of the process, or inside torch's call from C++ into Python, where it may abort;
- not while the thread is cleaning up after an earlier interruption (a ``finally``, an ``except``), or in a
  finalizer (a ``__del__``, a generator that is closed), unless that takes longer than another grace time;
- not in this module's own frames.

Where the signal lands at a wrong place, the frames outside of what is wrong are traced by instruction, and
the exception is raised at the first right one. What is not raised there, or cannot be since a debugger
traces, is tried again with the next signal, until the thread is out. What is raised in a finalizer in the end
is swallowed by Python; so the frames outside of it are traced, too, and the first right one raises again.

A function that runs outside the main thread cannot be reached by a signal handler. An asynchronous exception
takes its place: it wakes no blocked call, and the rules are checked when it is sent, not where it arrives.

Nothing here takes a Python-level lock in the function's thread, since an interrupt (a Ctrl-C, too) between
taking and releasing one would leave it held. The few shared fields are single values, ordered by the GIL:
one side writes its own field before it reads the other's, so that at least one of the two sees the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import logging
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

from ft_wrapper.exception import RankShouldRestart
from ft_wrapper.monitor.frames import current_exception, current_frames
from ft_wrapper.monitor.right_place import Obstacle, obstacle, prepare

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_MESSAGE = "this restart iteration is over; let the exception pass"
_FIRST_RESEND = 0.001
_STUCK_AFTER = 3  # resend intervals at one instruction


class Interrupter:
    """Runs a function so that another thread can make it leave.

    All methods but `look_ahead`, `request`, `interrupt_until_left` and `requested` belong to the thread that
    runs the function.

    Args:
        signum: the signal to use; a free real-time signal when None. Unused outside the main thread.
        resend_interval: seconds between two attempts while the function does not leave; the first few follow
            each other faster.
        cleanup_grace: seconds that an interrupted function's ``finally`` and ``except`` blocks may take
            before they are interrupted, too; and that the function may take to come to a right place.

    Raises:
        TypeError: ``signum`` is no integer.
        ValueError: ``signum`` cannot be handled, or a duration is not above 0 (the grace: below 0).
    """

    def __init__(
        self, signum: int | None = None, resend_interval: float = 0.02, cleanup_grace: float = 0.5
    ) -> None:
        if signum is not None:
            _check_signum(signum)
        if not resend_interval > 0:
            raise ValueError(f"resend_interval={resend_interval!r} must be above 0 seconds")
        if not cleanup_grace >= 0:
            raise ValueError(f"cleanup_grace={cleanup_grace!r} must be at least 0 seconds")
        self._wanted_signum = signum
        self._resend_interval = resend_interval
        self._cleanup_grace = cleanup_grace
        self._thread: int | None = None  # set while installed
        self._signum: int | None = None  # set while installed in the main thread
        self._previous: Any = None
        # Written by the function's thread.
        self._running = False
        self._armed = False
        self._depth = 0
        self._grace_since: float | None = None
        # Put off at a wrong place: which frames are at one since when, and the innermost instruction with the
        # time that it was first seen and how often it was seen again.
        self._wrong_since: dict[FrameType, float] = {}
        self._passing: tuple[FrameType, int, float] | None = None
        self._seen_again = 0
        self._traced = False
        self._atomic = Atomic(self)
        # Written by the monitor thread.
        self._requested = False
        self._sent_async = False  # and reset by the function's, once nothing more is sent
        # Between the two: held by the function's thread inside `call`; held around a check of `_armed` and
        # the sending that follows from it; told when an atomic block ended.
        self._inside = threading.Lock()
        self._sending = threading.Lock()
        self._left_atomic: queue.SimpleQueue[None] = queue.SimpleQueue()

    # ---- the function's thread

    @property
    def signum(self) -> int | None:
        """The signal in use; None while not installed, and outside the main thread."""
        return self._signum

    def install(self) -> None:
        """Prepares the calling thread for `call`: in the main thread, installs the signal's handler.

        Raises:
            RuntimeError: it is installed already, or no real-time signal is free.
            ValueError: the signal asked for is in use.
        """
        if self._thread is not None:
            raise RuntimeError("this Interrupter is installed already")
        if threading.current_thread() is threading.main_thread():
            signum = free_signal() if self._wanted_signum is None else self._wanted_signum
            use = _use_of(signum)
            if use is not None:
                raise ValueError(
                    f"signum={signum} ({_name(signum)}) {use}; "
                    "choose another, or None for a free real-time signal"
                )
            self._previous = signal.signal(signum, self._handle)
            signal.siginterrupt(signum, True)
            self._signum = signum
        self._thread = threading.get_ident()

    def close(self) -> None:
        """Restores the signal's previous handler; again, or when not installed, is harmless.

        Raises:
            RuntimeError: called by another thread than `install`, or inside `call`.
        """
        if self._thread is None:
            return
        self._check_thread("close()")
        if self._running:
            raise RuntimeError("close() inside call(): the function must have left first")
        signum = self._signum
        if signum is not None:
            # A signal sent a moment ago may still be on its way, and the previous handler may be the default,
            # which ends the process. So: hold it back, ignore it (that discards it), restore, let through.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signum})
            try:
                signal.signal(signum, signal.SIG_IGN)
                signal.signal(signum, self._previous)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._signum = self._previous = self._thread = None

    def __enter__(self) -> Interrupter:
        """Installs it."""
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes it."""
        self.close()

    def reset(self) -> None:
        """Forgets the interruption, before the next iteration; the last one's monitor thread must be through.

        Raises:
            RuntimeError: called inside `call`.
        """
        if self._running:
            raise RuntimeError("reset() inside call(): the function must have left first")
        self._requested = False

    def call(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function, which `request` and `interrupt_until_left` can end from another thread.

        Returns:
            What the function returns, if it was not interrupted.

        Raises:
            RankShouldRestart: it was interrupted: before it began, while it ran, or so late that it returned
                all the same. An ``Exception`` that an interrupted function raises is the cause.
            BaseException: whatever else the function raises; a ``BaseException`` also when interrupted. Once
                this method has returned or raised, no interruption can come any more.
            RuntimeError: not installed, installed in another thread, or called inside `call`.
        """
        self._check_thread("call()")
        if self._running:
            raise RuntimeError("call() inside call(): an Interrupter runs one function at a time")
        result: Any = None
        error: BaseException | None = None
        began = left = False
        with self._inside:
            # Whatever is raised in the bookkeeping itself (a Ctrl-C; outside the main thread an interruption)
            # must not keep it from being finished.
            while not left:
                try:
                    if not began:
                        began = self._running = True
                        self._grace_since = None
                        self._armed = True
                        if not self._requested:
                            result = _run(fn, args, kwargs)
                    self._armed = False
                    self._withdraw()
                    _stop_tracing(None)
                    self._leave_atomic()  # a block that the function never left
                    self._passing = None
                    self._wrong_since = {}
                    self._traced = self._running = False
                    left = True
                except BaseException as raised:
                    if error is None or not isinstance(raised, (Exception, RankShouldRestart)):
                        error = raised
        if isinstance(error, RankShouldRestart):
            error = _replaced_by(error) or error
        try:
            if self._requested and (error is None or isinstance(error, Exception)):
                raise RankShouldRestart(_MESSAGE) from error
            if error is not None:
                raise error
        finally:
            del error  # it refers to this frame by its traceback
        return result  # type: ignore[no-any-return]

    def atomic(self) -> Atomic:
        """Returns the context manager for a block that is not interrupted half-way.

        Reentrant. An interruption waits for the end of the outermost block, which then raises
        ``RankShouldRestart``, unless another exception is on its way; so does beginning one after the
        interruption. Outside `call` it never raises.

        Raises:
            RuntimeError: on entering, in another thread than the function's.
        """
        return self._atomic

    def _check_thread(self, what: str) -> None:
        if self._thread != threading.get_ident():
            if self._thread is None:
                raise RuntimeError(
                    f"{what} needs an installed Interrupter: call install() first, in the same thread"
                )
            raise RuntimeError(f"{what} must be called by the thread that called install()")

    def _leave_atomic(self) -> None:
        self._depth = 0
        if self._requested:
            self._left_atomic.put(None)

    def _withdraw(self) -> None:
        """After disarming: makes sure that nothing more is sent, and takes back what can be.

        A signal that is still on its way finds the handler disarmed.
        """
        with self._sending:  # who saw us armed has sent by now
            pass
        if self._sent_async:
            self._sent_async = False
            _take_back_async_exception(self._thread)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self._is_wanted() or _is_own(frame):
            return
        wrong = obstacle(frame, _run.__code__)
        handled = sys.exc_info()[1]
        raises = self._may_raise(frame, wrong, handled)
        # There it is raised by itself: outside the finalizer that would swallow it, or outside what is wrong.
        outside = _outside_finalizers(frame, wrong, handled)
        if outside is None and wrong is not None and not raises:
            outside = next((each for each in reversed(wrong.frames) if not self._has_waited(each)), None)
        if outside is not None:
            self._trace_from(outside)
        elif raises:
            _stop_tracing(frame)
        if raises:
            raise self._interruption()

    def _is_wanted(self) -> bool:
        return self._armed and self._requested and not self._depth

    def _interruption(self) -> RankShouldRestart:
        self._passing = None
        self._wrong_since = {}
        self._traced = False
        self._grace_since = time.monotonic()
        return RankShouldRestart(_MESSAGE)

    def _may_raise(
        self, frame: FrameType | None, wrong: Obstacle | None, handled: BaseException | None
    ) -> bool:
        """Whether a function that stands here can be made to leave now."""
        now = time.monotonic()
        self._wrong_since = {each: self._wrong_since.get(each, now) for each in wrong.frames} if wrong else {}
        if wrong is None:
            self._passing = None
        elif wrong.for_good or not (self._is_stuck(frame) or all(map(self._has_waited, wrong.frames))):
            return False
        if (wrong is not None and wrong.finalizer is not None) or self._is_cleaning_up(handled):
            if self._grace_since is None:
                self._grace_since = now
            return now - self._grace_since >= self._cleanup_grace
        return True

    def _has_waited(self, frame: FrameType) -> bool:
        """Whether a frame has been at wrong places for so long that this does not count any more."""
        since = self._wrong_since.get(frame)
        return since is not None and time.monotonic() - since >= self._cleanup_grace

    def _is_right(self, frame: FrameType) -> bool:
        wrong = obstacle(frame, _run.__code__)
        if wrong is None:
            return True
        return not wrong.for_good and wrong.finalizer is None and all(map(self._has_waited, wrong.frames))

    def _is_cleaning_up(self, handled: BaseException | None) -> bool:
        """Whether the exception being handled is an interruption, or closes a generator."""
        kinds = GeneratorExit if self._grace_since is None else (GeneratorExit, RankShouldRestart)
        return _is_in_context(handled, kinds)

    def _trace_from(self, frame: FrameType | None) -> None:
        """Has the first right instruction of these frames raise; calls made from now on are not traced."""
        if sys.gettrace() not in (None, _trace_no_call):
            return  # a debugger's; the next signal comes soon
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
            and self._is_wanted()
            and self._is_right(frame)
            and not self._is_cleaning_up(sys.exc_info()[1])
        ):
            _stop_tracing(frame)
            raise self._interruption()
        return self._trace

    def _is_stuck(self, frame: FrameType | None) -> bool:
        """Whether the innermost frame has been at this instruction for several resends, and seen so often.

        By time alone, a thread that gets no processor would seem to be stuck wherever it waits for one. The
        frame is kept until the next attempt, since a new one could get its address.
        """
        if frame is None:
            return False
        now = time.monotonic()
        if self._passing is None or self._passing[:2] != (frame, frame.f_lasti):
            self._passing = (frame, frame.f_lasti, now)
            self._seen_again = 0
        else:
            self._seen_again += 1
        long = now - self._passing[2] >= _STUCK_AFTER * self._resend_interval
        return long and self._seen_again >= _STUCK_AFTER

    # ---- the monitor thread

    @property
    def requested(self) -> bool:
        """Whether this iteration's function was interrupted."""
        return self._requested

    def look_ahead(self) -> None:
        """Reads the code in which the function stands now, so that an interrupt finds that done.

        A first reading takes up to a millisecond, for which the other ranks would have to wait. What the
        function comes to later is read when it is interrupted there.
        """
        if self._running and self._thread is not None:
            prepare(current_frames().get(self._thread), _run.__code__)

    def request(self, timeout: float | None = None) -> bool:
        """Marks the interruption, and waits until the function is outside `atomic`.

        From then on it cannot begin another atomic block; what `interrupt_until_left` is for can begin.

        Args:
            timeout: seconds to wait at most; for ever when None.

        Returns:
            Whether the function is outside; False only at the timeout. The mark stays then, and the end of
            the block raises in any case.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self._requested = True
        while self._depth:
            try:
                self._left_atomic.get(timeout=_remaining(deadline))
            except queue.Empty:
                return False
        return True

    def interrupt_until_left(self, timeout: float | None = None) -> bool:
        """Interrupts the function, again and again, until its thread is out of `call`.

        Args:
            timeout: seconds to try at most; for ever when None.

        Returns:
            Whether the thread is out.

        Raises:
            RuntimeError: `request` was not called before.
        """
        if not self._requested:
            raise RuntimeError(
                "interrupt_until_left() before request(): an atomic block would not be waited for"
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = min(_FIRST_RESEND, self._resend_interval)
        wait = 0.0
        while True:
            if self._inside.acquire(timeout=wait):
                self._inside.release()
                return True
            remaining = _remaining(deadline)
            if remaining == 0.0:
                return False
            self._send()
            wait = pause if remaining is None else min(pause, remaining)
            # Quickly again at first, and while it passes one ``with`` after the other and is not traced.
            quickly = self._passing is not None and not self._traced
            pause = min(_FIRST_RESEND if quickly else 2 * pause, self._resend_interval)

    def _send(self) -> None:
        with self._sending:
            if not self._armed or self._depth or self._thread is None:
                return
            if self._signum is not None:
                # EAGAIN: as many are queued as the kernel allows, so the thread has enough of them.
                with contextlib.suppress(BlockingIOError):
                    signal.pthread_kill(self._thread, self._signum)
                return
            frame = current_frames().get(self._thread)
            if not _is_own(frame):
                wrong = obstacle(frame, _run.__code__)
                if self._may_raise(frame, wrong, current_exception(self._thread)):
                    self._interruption()
                    self._sent_async = True
                    _set_async_exception(self._thread, RankShouldRestart)


class Atomic:
    """The context manager of `Interrupter.atomic`: one object, entered any number of times."""

    __slots__ = ("_interrupter",)

    def __init__(self, interrupter: Interrupter) -> None:
        self._interrupter = interrupter

    def __enter__(self) -> None:
        """Begins a block that is not interrupted.

        Raises:
            RankShouldRestart: this iteration is over already.
            RuntimeError: in another thread than the function's.
        """
        interrupter = self._interrupter
        if interrupter._thread != threading.get_ident():
            interrupter._check_thread("atomic()")
        interrupter._depth += 1
        if interrupter._requested and interrupter._depth == 1 and interrupter._armed:
            interrupter._leave_atomic()
            interrupter._grace_since = time.monotonic()
            raise RankShouldRestart(_MESSAGE)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the block.

        Raises:
            RankShouldRestart: it was the outermost, the iteration is over, and no exception is on its way.
        """
        interrupter = self._interrupter
        if interrupter._depth > 1:
            interrupter._depth -= 1
            return
        interrupter._depth = 0
        if interrupter._requested:
            interrupter._left_atomic.put(None)
            if kind is None and interrupter._armed:
                interrupter._grace_since = time.monotonic()
                raise RankShouldRestart(_MESSAGE)


def _run(fn: Callable[..., T], args: Any, kwargs: Any) -> T:
    """Calls the function. The one frame of this module in which an interruption may be raised."""
    return fn(*args, **kwargs)


def _is_own(frame: FrameType | None) -> bool:
    """Whether a thread that runs the function is in one of this module's frames."""
    while frame is not None and frame.f_code is not _run.__code__:
        if frame.f_globals is _OWN:
            return True
        frame = frame.f_back
    return False


def _replaced_by(interruption: RankShouldRestart) -> BaseException | None:
    """What was leaving the function when an interruption took its place: a Ctrl-C, which must not be lost."""
    link = interruption.__context__
    while link is not None:
        if isinstance(link, (KeyboardInterrupt, SystemExit)):
            return link
        link = link.__context__
    return None


def _is_in_context(
    error: BaseException | None, kinds: type[BaseException] | tuple[type[BaseException], ...]
) -> bool:
    for _ in range(100):
        if error is None or isinstance(error, kinds):
            return error is not None
        error = error.__context__
    return False


def _outside_finalizers(
    frame: FrameType | None, wrong: Obstacle | None, handled: BaseException | None
) -> FrameType | None:
    """The innermost frame that will not see what is raised here, since Python swallows it, or None."""
    if wrong is not None and wrong.finalizer is not None:
        return wrong.finalizer.f_back
    if _is_in_context(handled, GeneratorExit):
        while frame is not None and frame.f_code is not _run.__code__:
            if frame.f_code.co_flags & inspect.CO_GENERATOR:
                return frame.f_back
            frame = frame.f_back
    return None


def _trace_no_call(frame: FrameType, event: str, argument: object) -> None:
    """What traces new frames: nothing, but `sys.settrace` has the old ones traced."""


def _stop_tracing(frame: FrameType | None) -> None:
    """Ends the tracing of the frames from here to the function's; not a debugger's."""
    if sys.gettrace() is _trace_no_call:
        sys.settrace(None)
        while frame is not None and frame.f_code is not _run.__code__:
            _stop_tracing_frame(frame)
            frame = frame.f_back


def _stop_tracing_frame(frame: FrameType) -> None:
    frame.f_trace = None
    frame.f_trace_opcodes = False


class _Replaced(Exception):
    """Takes the place of an interruption that is not needed any more."""


def _take_back_async_exception(thread: int | None) -> None:
    """Makes sure that the calling thread, this one, gets no interruption any more.

    It replaces the interruption, and takes what replaced it. Setting none instead would leave CPython (3.11
    and 3.12) looking for an exception at every call, for good; and where a frame is traced by instruction, a
    new frame would then look for ever.
    """
    try:
        _set_async_exception(thread, _Replaced)
        for _ in range(1000):  # it is raised where a loop begins again
            pass
    except _Replaced:
        pass


def _set_async_exception(thread: int | None, kind: type[BaseException]) -> None:
    function: Any = ctypes.pythonapi.PyThreadState_SetAsyncExc
    function(ctypes.c_ulong(thread or 0), ctypes.py_object(kind))


def _remaining(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


def _check_signum(signum: int) -> None:
    if not isinstance(signum, int):
        raise TypeError(f"signum={signum!r} must be an integer, or None for a free real-time signal")
    if signum not in signal.valid_signals() or signum in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(
            f"signum={signum} is no signal that can be handled; None takes a free real-time signal"
        )


def free_signal() -> int:
    """Returns a real-time signal that neither Python nor a C library uses in this process.

    Raises:
        RuntimeError: there is none.
    """
    for signum in range(signal.SIGRTMIN + 1, signal.SIGRTMAX + 1):
        if _use_of(signum) is None:
            return signum
    raise RuntimeError(
        "every real-time signal is in use, ignored or blocked in this process; "
        "pass the number of a signal that no one else uses"
    )


def _use_of(signum: int) -> str | None:
    """What speaks against using a signal, or None when it is free."""
    if signum in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return "is blocked in the main thread"
    if signal.getsignal(signum) is not signal.SIG_DFL:
        return "has a handler already, or is ignored"
    # Python does not know of handlers that a C library has installed.
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            field, _, value = line.partition(":")
            if field == "SigCgt" and int(value, 16) >> (signum - 1) & 1:
                return "has a handler already, installed by a C library"
    return None


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"SIGRTMIN+{signum - signal.SIGRTMIN}"


_OWN = globals()
