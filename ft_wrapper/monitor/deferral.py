"""Whether the thread that runs the function can be made to leave it where it stands.

It cannot

- where a frame up to the function's is at a wrong place (`right_place`): one that makes, enters or leaves a
  ``with``, say, would leave a lock held or gradients off for good. Unless the thread is stuck there, or each
  frame that is at a wrong place has been for a grace time (each: a long call from a wrong place does not lay
  open what it calls). No time helps against an import, which cut short leaves a broken module behind for the
  rest of the process, or inside torch's call from C++ into Python, where it may abort;
- while the thread cleans up after an earlier interruption (a ``finally``, an ``except``), or is in a
  finalizer (a ``__del__``, a generator that is closed), unless that takes longer than another grace time.
"""

from __future__ import annotations

import inspect
import time
from types import CodeType, FrameType

from ..exception import RankShouldRestart
from .right_place import Obstacle, obstacle

RESEND_INTERVAL = 0.02
"""Seconds between two attempts while the function does not leave; the first few follow each other faster."""
CLEANUP_GRACE = 0.5
"""Seconds for an interrupted function's ``finally`` and ``except`` blocks, and to come to a right place."""

_STUCK_AFTER = 3  # resend intervals at one instruction


class Deferral:
    """Why one function was not made to leave yet. Belongs to the function's thread.

    Args:
        end: the code of the frame outside of the function.
    """

    def __init__(self, end: CodeType) -> None:
        self._end = end
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
            return now - self._grace_since >= CLEANUP_GRACE
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
        return since is not None and time.monotonic() - since >= CLEANUP_GRACE

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
