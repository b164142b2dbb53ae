"""How the thread that runs the function is made to leave it.

The monitor thread sends a signal to that thread; the handler, which Python runs in the main thread between
two instructions of whatever it is doing, decides there and then whether to raise. It does so only between
entering and leaving `Interrupter.call`, outside `Interrupter.atomic` and this module's own frames, and where
`Deferral` finds that nothing is left undone by it. It cannot raise

- where a frame up to the function's is at a wrong place (`right_place`): one that makes, enters or leaves a
  ``with``, say, would leave a lock held or gradients off for good. Unless the thread is stuck there, or each
  frame that is at a wrong place has been for a grace time (each: a long call from a wrong place does not lay
  open what it calls). No time helps against an import, which cut short leaves a broken module behind for the
  rest of the process, or inside torch's call from C++ into Python, where it may abort;
- while the thread cleans up after an earlier interruption (a ``finally``, an ``except``), or is in a
  finalizer (a ``__del__``, a generator that is closed), unless that takes longer than another grace time.

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
from typing import Any, ParamSpec, TypeVar

from ..exception import JobAbort, RankShouldRestart, RestartAbort
from ..settings import Limits
from .frames import current_exception, current_frames
from .kept_handlers import free_signal
from .right_place import obstacle, prepare

P = ParamSpec("P")
T = TypeVar("T")

#: Seconds between two attempts while the function does not leave; the first few follow each other faster.
RESEND_INTERVAL = 0.02

_MESSAGE = "this restart iteration is over; let the exception pass"
_FIRST_RESEND = 0.001
_STUCK_AFTER = 3  # resend intervals at one instruction
_TO_LEAVE = (RestartAbort, RankShouldRestart)  # of which a group may have nothing else


class Interrupter:
    """Runs a function so that another thread can make it leave.

    Made by the thread that runs the function: the main thread installs a signal's handler. To that thread
    belong all methods but `look_ahead`, `request` and `interrupt_until_left`.

    Args:
        unwind_grace: seconds for the function's clean-up, before that is interrupted, too.

    Attributes:
        thread: the function's, as ``threading.get_ident()`` has it.
        signum: the signal in use; None outside the main thread.
        requested: whether this iteration's function was interrupted.

    Raises:
        RuntimeError: no real-time signal is free.
    """

    def __init__(self, unwind_grace: float = Limits.cleanup_timeout) -> None:
        self.thread = threading.get_ident()
        self.signum: int | None = None
        # Written by the function's thread.
        self._armed = False
        self._depth = 0
        self._unwind_grace = unwind_grace
        self._deferral = Deferral(unwind_grace)
        self._traced = False
        self._atomic = Atomic(self)
        # Written by the monitor thread.
        self.requested = False
        self._sent_async = False  # and reset by the function's, once nothing more is sent
        # Between the two: held by the function's thread inside `call`; held around a check of `_armed` and
        # the sending that follows from it; told when an atomic block ended.
        self._inside = threading.Lock()
        self._sending = threading.Lock()
        self._left_atomic: queue.SimpleQueue[None] = queue.SimpleQueue()
        if threading.current_thread() is threading.main_thread():
            self.signum = free_signal()
            signal.signal(self.signum, self._handle)
            signal.siginterrupt(self.signum, True)

    # ---- the function's thread

    @property
    def is_running(self) -> bool:
        """Whether the function is being called."""
        return self._armed

    def close(self) -> None:
        """Gives the signal back; the function has left."""
        if self.signum is None:
            return
        # A signal sent a moment ago may still be on its way, and by default it ends the process. So: hold
        # it back, ignore it (that discards it), restore, let through.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {self.signum})
        try:
            signal.signal(self.signum, signal.SIG_IGN)
            signal.signal(self.signum, signal.SIG_DFL)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def reset(self) -> None:
        """Forgets the interruption, before the next iteration: the last one's monitor thread is through."""
        self.requested = False

    def call(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function, which `request` and `interrupt_until_left` can end from another thread.

        Once this method has returned or raised, no interruption can come any more.

        Raises:
            RankShouldRestart: it was interrupted: before it began, while it ran, or so late that it had
                already returned. An ``Exception`` that an interrupted function raises is the cause.
            BaseException: whatever else the function raises; a ``BaseException`` also when interrupted.
        """
        result: Any = None
        error: BaseException | None = None
        began = left = False
        with self._inside:
            # Whatever is raised in the bookkeeping itself (a Ctrl-C; outside the main thread an interruption)
            # must not keep it from being finished.
            while not left:
                try:
                    if not began:
                        began = True
                        self._armed = True
                        if not self.requested:
                            result = _run(fn, args, kwargs)
                    self._armed = False
                    self._withdraw()
                    _stop_tracing(None)
                    self._leave_atomic()  # a block that the function never left
                    self._deferral = Deferral(self._unwind_grace)  # which holds no frame
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
            del error  # it refers to this frame by its traceback
        return result  # type: ignore[no-any-return]

    def atomic(self) -> "Atomic":
        """Returns the context manager for a block that is not interrupted half-way.

        Reentrant. An interruption waits for the end of the outermost block, which then raises
        ``RankShouldRestart``, unless another exception is on its way; so does beginning one after the
        interruption. Outside `call` it never raises.

        Raises:
            RuntimeError: on entering, in another thread than the function's.
        """
        return self._atomic

    def _leave_atomic(self) -> None:
        self._depth = 0
        if self.requested:
            self._left_atomic.put(None)

    def _withdraw(self) -> None:
        """After disarming: makes sure that nothing more is sent, and takes back what can be.

        A signal that is still on its way finds the handler disarmed.
        """
        with self._sending:  # who saw us armed has sent by now
            pass
        if self._sent_async:
            self._sent_async = False
            _take_back_async_exception(self.thread)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self._is_due() or _is_own(frame):
            return
        raises, outside = self._deferral.decide(frame, sys.exc_info()[1])
        if outside is not None:
            self._trace_from(outside)
        elif raises:
            _stop_tracing(frame)
        if raises:
            raise self._interruption()

    def _is_due(self) -> bool:
        return self._armed and self.requested and not self._depth

    def _interruption(self) -> RankShouldRestart:
        self._deferral.interrupted()
        self._traced = False
        return RankShouldRestart(_MESSAGE)

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
            and self._is_due()
            and self._deferral.is_right(frame, sys.exc_info()[1])
        ):
            _stop_tracing(frame)
            raise self._interruption()
        return self._trace

    # ---- the monitor thread

    def look_ahead(self) -> None:
        """Reads the code in which the function stands now, so that an interrupt finds that done.

        A first reading takes up to a millisecond, for which the other ranks would have to wait. What the
        function comes to later is read when it is interrupted there.
        """
        if self._armed:
            prepare(current_frames().get(self.thread), _run.__code__)

    def request(self) -> None:
        """Marks the interruption, and waits until the function is outside `atomic`.

        From then on it cannot begin another atomic block; what `interrupt_until_left` is for can begin.
        """
        self.requested = True
        while self._depth:
            self._left_atomic.get()

    def interrupt_until_left(self, timeout: float) -> bool:
        """Interrupts the function, again and again, until its thread is out of `call`; whether it is.

        Args:
            timeout: seconds to try at most.
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
            # Quickly again at first, and while it passes one ``with`` after the other and is not traced.
            quickly = self._deferral.passing is not None and not self._traced
            pause = min(_FIRST_RESEND if quickly else 2 * pause, RESEND_INTERVAL)
        self._inside.release()
        return True

    def _send(self) -> None:
        with self._sending:
            if not self._armed or self._depth:
                return
            if self.signum is not None:
                # EAGAIN: as many are queued as the kernel allows, so the thread has enough of them.
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
            RankShouldRestart: this iteration is over already.
            RuntimeError: in another thread than the function's.
        """
        interrupter = self._interrupter
        if interrupter.thread != threading.get_ident():
            raise RuntimeError("atomic() must be entered by the thread that runs the function")
        interrupter._depth += 1
        if interrupter.requested and interrupter._depth == 1 and interrupter._armed:
            interrupter._leave_atomic()
            interrupter._deferral.interrupted()
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
        interrupter._leave_atomic()
        if interrupter.requested and interrupter._armed and kind is None:
            interrupter._deferral.interrupted()
            raise RankShouldRestart(_MESSAGE)


class Deferral:
    """Whether one function can be made to leave where it stands. Belongs to the function's thread.

    Args:
        unwind_grace: seconds for its ``finally`` and ``except`` blocks, and to come to a right place.

    Attributes:
        passing: the innermost frame with its instruction, and when that was first seen, if the thread was
            at a wrong place when it was last looked at.
    """

    def __init__(self, unwind_grace: float) -> None:
        self._grace = unwind_grace
        # When the clean-up after an interruption began, or was first met; None if there was none.
        self._grace_since: float | None = None
        # Put off at a wrong place: which frames are at one since when, and how often the innermost
        # instruction was seen again.
        self._wrong_since: dict[FrameType, float] = {}
        self.passing: tuple[FrameType, int, float] | None = None
        self._seen_again = 0

    def interrupted(self) -> None:
        """An interruption is about to be raised: what follows is the function's clean-up."""
        self.passing = None
        self._wrong_since = {}
        self._grace_since = time.monotonic()

    def decide(self, frame: FrameType | None, handled: BaseException | None) -> tuple[bool, FrameType | None]:
        """Decides about a function that stands here.

        Args:
            frame: its innermost frame.
            handled: the exception that its thread handles.

        Returns:
            Whether it can be made to leave now. And the innermost frame of those in which the first right
            instruction has to raise: later, or again where Python swallows what is raised here. Or None.
        """
        wrong = obstacle(frame, _run.__code__)
        now = time.monotonic()
        self._wrong_since = {each: self._wrong_since.get(each, now) for each in wrong.frames}
        new = [each for each in wrong.frames if not self._has_waited(each)]
        if not wrong.frames:
            self.passing = None
            raises = True
        else:
            raises = not wrong.for_good and (self._is_stuck(frame) or not new)
        if raises and (wrong.finalizer is not None or self._is_cleaning_up(handled)):
            if self._grace_since is None:
                self._grace_since = now
            raises = now - self._grace_since >= self._grace
        if wrong.finalizer is not None:
            return raises, wrong.finalizer.f_back
        outside = _outside_generator(frame) if _is_in_context(handled, GeneratorExit) else None
        if outside is None and new and not raises:
            outside = new[-1]
        return raises, outside

    def is_right(self, frame: FrameType, handled: BaseException | None) -> bool:
        """Whether a traced frame has come to where an interruption can be raised."""
        wrong = obstacle(frame, _run.__code__)
        if wrong.for_good or wrong.finalizer is not None:
            return False
        return all(map(self._has_waited, wrong.frames)) and not self._is_cleaning_up(handled)

    def _has_waited(self, frame: FrameType) -> bool:
        """Whether a frame has been at wrong places too long for them to count."""
        since = self._wrong_since.get(frame)
        return since is not None and time.monotonic() - since >= self._grace

    def _is_cleaning_up(self, handled: BaseException | None) -> bool:
        """Whether the exception being handled is an interruption, or closes a generator."""
        kinds = GeneratorExit if self._grace_since is None else (GeneratorExit, RankShouldRestart)
        return _is_in_context(handled, kinds)

    def _is_stuck(self, frame: FrameType | None) -> bool:
        """Whether the innermost frame has been at this instruction for several resends, and seen so often.

        By time alone, a thread that gets no processor would seem to be stuck wherever it waits for one. The
        frame is kept until the next attempt, since a new one could get its address.
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
    """What called the innermost generator: it does not see what is raised in one that is being closed."""
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
    """Calls the function. The one frame of this module in which an interruption may be raised."""
    return fn(*args, **kwargs)


def _is_own(frame: FrameType | None) -> bool:
    """Whether a thread that runs the function is in one of this module's frames."""
    while frame is not None and frame.f_code is not _run.__code__:
        if frame.f_globals is _OWN:
            return True
        frame = frame.f_back
    return False


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


def _replaced_by(interruption: RankShouldRestart) -> BaseException | None:
    """What was leaving the function when an interruption took its place: a Ctrl-C, which must not be lost."""
    link = interruption.__context__
    while link is not None:
        if isinstance(link, (KeyboardInterrupt, SystemExit)):
            return link
        link = link.__context__
    return None


def _weightier(error: BaseException | None, raised: BaseException) -> BaseException:
    """Which of two exceptions counts; of a group that a task group has made, the wrapper's own.

    Args:
        error: what came first; None if nothing did.
        raised: what came after it.
    """
    if isinstance(raised, BaseExceptionGroup):
        groups = map(raised.subgroup, (JobAbort, RestartAbort, RankShouldRestart))
        raised = next((group for group in groups if group is not None), raised)
        while isinstance(raised, BaseExceptionGroup) and raised.split(_TO_LEAVE)[1] is None:
            raised = raised.exceptions[0]
    return raised if error is None or not isinstance(raised, (Exception, RankShouldRestart)) else error


class _Replaced(Exception):
    """Takes the place of an interruption that is not needed any more."""


def _take_back_async_exception(thread: int) -> None:
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


def _set_async_exception(thread: int, kind: type[BaseException]) -> None:
    function: Any = ctypes.pythonapi.PyThreadState_SetAsyncExc
    function(ctypes.c_ulong(thread), ctypes.py_object(kind))


_OWN = globals()
