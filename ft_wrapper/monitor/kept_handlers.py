"""What may be raised in the thread that runs the function, by the handlers of signals: where, and when.

Libraries install handlers that raise: torch's for SIGCHLD does when a DataLoader worker was killed. In the
function that is a fault like any other. In the wrapper's own code, half-way through an exchange with the
other ranks, it would throw this rank out of the job.

So whenever the function has been left, each handler that Python code has installed is wrapped: it runs as
before, but an ``Exception`` that it raises is put aside. Any other ``BaseException``, a ``KeyboardInterrupt``
for one, passes. Before the function is entered the handlers are put back. Only the main thread runs handlers;
in a call made by another thread nothing is done.

A function that was cut short may leave handlers behind. The next entry would find them, and one that calls
its predecessor (a framework's, for SIGTERM) would nest one deeper at each restart. So the handlers of before
the call are put back at each restart and at the call's end. Not SIGCHLD's: torch installs it once in a
process, with its first loader, and would not do so again.

The wrapper's own handler makes the function leave where it stands. It cannot

- where a frame up to the function's is at a wrong place (`right_place`): one that makes, enters or leaves a
  ``with``, say, would leave a lock held or gradients off for good. Unless the thread is stuck there, or each
  frame that is at a wrong place has been for a grace time (each: a long call from a wrong place does not lay
  open what it calls). No time helps against an import, which cut short leaves a broken module behind for the
  rest of the process, or inside torch's call from C++ into Python, where it may abort;
- while the thread cleans up after an earlier interruption (a ``finally``, an ``except``), or is in a
  finalizer (a ``__del__``, a generator that is closed), unless that takes longer than another grace time.
"""

import inspect
import logging
import signal
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from ..exception import JobAbort, RankShouldRestart, RestartAbort
from .right_place import Obstacle, obstacle

logger = logging.getLogger(__name__)

#: Seconds between two attempts while the function does not leave; the first few follow each other faster.
RESEND_INTERVAL = 0.02

_OWN = (RestartAbort, RankShouldRestart)  # of which a group may have nothing else
_STUCK_AFTER = 3  # resend intervals at one instruction

Handler = Callable[[int, FrameType | None], object]

_SIGNALS = tuple(int(signum) for signum in signal.valid_signals())
_NAMES = {int(one): one.name for one in signal.Signals}
# What `signal` wraps: enums, which take 60 times as long, have no part in a restart.
_getsignal: Callable[[int], object] = signal._signal.getsignal  # type: ignore[attr-defined]
_setsignal: Callable[[int, Any], object] = signal._signal.signal  # type: ignore[attr-defined]


def free_signal() -> int:
    """Returns a real-time signal that neither Python nor a C library uses in this process.

    Raises:
        RuntimeError: there is none.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    caught_ones = caught()
    for signum in range(signal.SIGRTMIN + 1, signal.SIGRTMAX + 1):
        is_default = signal.getsignal(signum) is signal.SIG_DFL
        if signum not in blocked and is_default and signum not in caught_ones:
            return signum
    raise RuntimeError(
        "every real-time signal is in use, ignored or blocked in this process; "
        "ft_wrapper needs one to interrupt the function, and one to ask where it hangs"
    )


def caught(pid: int | None = None) -> list[int]:
    """The signals with a handler, also those that a C library has installed, of which Python does not know.

    Args:
        pid: the process, which was not reaped yet; this one when None.
    """
    with open(f"/proc/{pid or 'self'}/status", encoding="ascii", errors="replace") as status:
        fields = dict(line.split(":", 1) for line in status if ":" in line)
    bits = int(fields.get("SigCgt", "0"), 16)
    return [signum for signum in _SIGNALS if bits >> (signum - 1) & 1]


class _Keeping:
    """A handler that keeps what the real one raises."""

    def __init__(self, handler: Handler, kept: list[Exception]) -> None:
        self.handler = handler
        self._kept = kept

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        try:
            self.handler(signum, frame)
        except Exception as error:
            self._kept.append(error)


class KeptSignals:
    """Wraps and unwraps the handlers; all methods belong to the thread that runs the function."""

    def __init__(self) -> None:
        self._kept: list[Exception] = []
        self._holds = False
        self._wrapped: list[int] = []
        self._before: dict[int, Any] = {}
        self._are_told = False

    def note(self) -> None:
        """Notes the handlers of before the function's first entry, for `put_back`."""
        if threading.current_thread() is threading.main_thread():
            self._before = {signum: _getsignal(signum) for signum in _SIGNALS if signum != signal.SIGCHLD}

    def put_back(self) -> None:
        """Puts back the handlers that were noted, in place of others that the function has left."""
        changed = []
        for signum, before in self._before.items():
            now = _getsignal(signum)
            now = now.handler if isinstance(now, _Keeping) else now
            # None: a C library's, which Python cannot put back.
            if now != before and now is not None and before is not None:
                _setsignal(signum, before)
                changed.append(_NAMES.get(signum, str(signum)))
        if changed and self._holds:
            self._holds = False
            self.hold()
        if changed and not self._are_told:
            self._are_told = True
            logger.info("the function left signal handlers behind (%s): put back", ", ".join(changed))

    def hold(self) -> None:
        """Wraps all handlers that can raise; again is harmless, and finishes what a signal cut short."""
        if self._holds or threading.current_thread() is not threading.main_thread():
            return
        for signum in _SIGNALS:
            handler = _getsignal(signum)
            if callable(handler):
                self._wrapped.append(signum)  # first: a signal may cut this short
                if not isinstance(handler, _Keeping):
                    _setsignal(signum, _Keeping(handler, self._kept))
        self._holds = True

    def release(self) -> None:
        """Puts the handlers back, but for those that other code has replaced in between."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._holds = False
        for signum in self._wrapped:
            handler = _getsignal(signum)
            if isinstance(handler, _Keeping):
                _setsignal(signum, handler.handler)
        self._wrapped.clear()

    def forget(self) -> None:
        """Logs what was raised; to be called where it makes no difference any more."""
        while self._kept:
            error = self._kept.pop(0)
            logger.warning("a signal handler raised %r outside of the function: ignored", error)

    def raise_kept(self) -> None:
        """Raises the first thing that was kept.

        Raises:
            Exception: what a handler has raised; others are forgotten.
        """
        if self._kept:
            error = self._kept.pop(0)
            self.forget()
            raise error


# ---- whether our own may raise now


class Deferral:
    """Why one function was not made to leave yet. Belongs to the function's thread.

    Args:
        end: the code of the frame outside of the function.
        unwind_grace: seconds for its ``finally`` and ``except`` blocks, and to come to a right place.
    """

    def __init__(self, end: CodeType, unwind_grace: float) -> None:
        self._end = end
        self._grace = unwind_grace
        # When the clean-up after an interruption began, or was first met; None if there was none.
        self._grace_since: float | None = None
        # Put off at a wrong place: which frames are at one since when, and the innermost instruction with the
        # time that it was first seen and how often it was seen again.
        self._wrong_since: dict[FrameType, float] = {}
        self._passing: tuple[FrameType, int, float] | None = None
        self._seen_again = 0

    @property
    def is_passing(self) -> bool:
        """Whether the thread was at a wrong place when it was last looked at."""
        return self._passing is not None

    def begin(self) -> None:
        """The function begins: no interruption of it was raised yet."""
        self._grace_since = None

    def forget(self) -> None:
        """Drops the frames: the thread has left them, or is about to."""
        self._passing = None
        self._wrong_since = {}

    def interrupted(self) -> None:
        """An interruption is about to be raised: what follows is the function's clean-up."""
        self._grace_since = time.monotonic()

    def may_raise(
        self, frame: FrameType | None, wrong: Obstacle | None, handled: BaseException | None
    ) -> bool:
        """Whether a function that stands here can be made to leave now.

        Args:
            frame: its innermost frame.
            wrong: what `obstacle` says of that.
            handled: the exception that its thread handles.
        """
        now = time.monotonic()
        self._wrong_since = {each: self._wrong_since.get(each, now) for each in wrong.frames} if wrong else {}
        if wrong is None:
            self._passing = None
        elif wrong.for_good or not (self._is_stuck(frame) or all(map(self.has_waited, wrong.frames))):
            return False
        if (wrong is not None and wrong.finalizer is not None) or self._is_cleaning_up(handled):
            if self._grace_since is None:
                self._grace_since = now
            return now - self._grace_since >= self._grace
        return True

    def is_right(self, frame: FrameType, handled: BaseException | None) -> bool:
        """Whether a traced frame has come to where an interruption can be raised."""
        wrong = obstacle(frame, self._end)
        if wrong is not None and (
            wrong.for_good or wrong.finalizer is not None or not all(map(self.has_waited, wrong.frames))
        ):
            return False
        return not self._is_cleaning_up(handled)

    def has_waited(self, frame: FrameType) -> bool:
        """Whether a frame has been at wrong places for so long that this does not count any more."""
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
        if self._passing is None or self._passing[:2] != (frame, frame.f_lasti):
            self._passing = (frame, frame.f_lasti, now)
            self._seen_again = 0
        else:
            self._seen_again += 1
        long = now - self._passing[2] >= _STUCK_AFTER * RESEND_INTERVAL
        return long and self._seen_again >= _STUCK_AFTER


def replaced_by(interruption: RankShouldRestart) -> BaseException | None:
    """What was leaving the function when an interruption took its place: a Ctrl-C, which must not be lost."""
    link = interruption.__context__
    while link is not None:
        if isinstance(link, (KeyboardInterrupt, SystemExit)):
            return link
        link = link.__context__
    return None


def weightier(error: BaseException | None, raised: BaseException) -> BaseException:
    """Which of two exceptions counts; of a group that a task group has made, the wrapper's own.

    Args:
        error: what came first; None if nothing did.
        raised: what came after it.
    """
    if isinstance(raised, BaseExceptionGroup):
        groups = map(raised.subgroup, (JobAbort, RestartAbort, RankShouldRestart))
        raised = next((group for group in groups if group is not None), raised)
        while isinstance(raised, BaseExceptionGroup) and raised.split(_OWN)[1] is None:
            raised = raised.exceptions[0]
    return raised if error is None or not isinstance(raised, (Exception, RankShouldRestart)) else error


def outside_finalizers(
    frame: FrameType | None, wrong: Obstacle | None, handled: BaseException | None, end: CodeType
) -> FrameType | None:
    """The innermost frame that will not see what is raised here, since Python swallows it, or None."""
    if wrong is not None and wrong.finalizer is not None:
        return wrong.finalizer.f_back
    if _is_in_context(handled, GeneratorExit):
        while frame is not None and frame.f_code is not end:
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
