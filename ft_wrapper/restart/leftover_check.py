"""Says, after a restart, what of earlier iterations is still alive and who holds it.

In a thread of its own, while training goes on. The walk holds the interpreter's lock, so it is cut into short
slices, and ends after a while whether it has found everything or not.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .. import torch_groups
from ..torch_groups import made
from ..torch_groups.leftovers import Leftover, told
from ..torch_groups.made import Made
from ..torch_groups.ways import Walk

log = logging.getLogger(__name__)

ENV = "FT_WRAPPER_LEFTOVERS"

# Seconds.
_LIMIT = 0.1  # of the thread's own time
_SLICE = 0.0005  # a step that begins within it may take as long again
_PAUSE = 0.005  # between two slices, as long as a thread waits for the interpreter's lock
_RELEASED_WITHIN = 10.0  # process groups that end in the background
_CALL_ENDS_WITHIN = 0.1  # while that is waited for
_STEPS_AT_ONCE = 4  # between two looks at the clock
_MOST_LINES = 10


def when_to_look() -> bool | None:
    """Reads the environment: True at every restart, None at the first one, False never.

    Raises:
        ValueError: the variable is something else.
    """
    text = os.environ.get(ENV, "")
    if text not in ("", "0", "1"):
        raise ValueError(
            f"environment variable {ENV}={text!r} must be 1, to look for leftovers at every restart, or 0, "
            "for never; remove it to look at the first one"
        )
    return bool(int(text)) if text else None


class LeftoverCheck:
    """Notices what is made in each iteration of a call, and looks what has outlived it. The call ends it.

    Args:
        when: as `when_to_look` says.
        spared: what these hold is not left over.
        collects: whether a collection has freed what was in reference cycles.
    """

    def __init__(self, when: bool | None, spared: Mapping[str, Any], *, collects: bool) -> None:
        self._when = when
        self._spared = spared
        self._collects = collects
        self._over = threading.Event()
        self._things = made.begin(spared)
        self._has_looked = False
        self._wanted: queue.SimpleQueue[list[Made] | None] = queue.SimpleQueue()
        # Begun before the first iteration: to begin one takes a restart some tenths of a millisecond.
        self._thread: threading.Thread | None = None
        if when is not False:
            self._thread = threading.Thread(target=self._run, name="ft_wrapper-leftovers", daemon=True)
            self._thread.start()

    def enter(self, iteration: int) -> None:
        """Says that an iteration begins."""
        self._things.enter(iteration)

    def look(self) -> bool:
        """Looks, if it is time to and something is alive, in the background; whether it does."""
        if self._when is False or (self._has_looked and not self._when):
            return False
        things = self._things.earlier()
        if things:
            self._has_looked = True
            self._wanted.put(things)
        return bool(things)

    def close(self) -> None:
        """Ends the thread, and notices nothing more."""
        self._over.set()
        self._wanted.put(None)
        if self._thread is not None:
            self._thread.join()
        self._things.close()

    def _run(self) -> None:
        while (things := self._wanted.get()) is not None:
            self._look_at(things)
            if not self._when:
                return

    def _look_at(self, things: list[Made]) -> None:
        try:
            deadline = time.monotonic() + _RELEASED_WITHIN
            while not torch_groups.await_released_groups(_CALL_ENDS_WITHIN):
                if self._over.is_set() or time.monotonic() > deadline:
                    break
            things[:] = [each for each in things if each() is not None]
            if not things or self._over.is_set():
                return
            thread = threading.current_thread()
            unseen = [self, vars(self), thread, vars(thread), things]
            walk = Walk(things, self._spared, unseen=unseen, whole=False)
            is_done = self._walk(walk)
            if not self._over.is_set():
                self._report(told(things, walk), is_done)
        except Exception:
            log.warning("leftovers of earlier iterations could not be looked for", exc_info=True)

    def _walk(self, walk: Walk) -> bool:
        """Walks for as long as it may; whether it has come to the end."""
        steps, spent = walk.steps(), 0.0
        while spent < _LIMIT:
            began = time.thread_time()
            while (took := time.thread_time() - began) < _SLICE:
                for _ in range(_STEPS_AT_ONCE):
                    try:
                        next(steps)
                    except StopIteration:
                        return True
            spent += took
            if self._over.wait(_PAUSE):
                break
        return False

    def _report(self, left: Sequence[Leftover], is_done: bool) -> None:
        held = [each for each in left if each.held_by is not None]
        for each in held[:_MOST_LINES]:
            log.warning("%s", each)
        if len(held) > _MOST_LINES:
            log.warning("%d more leftovers: ft_wrapper.leftovers() tells them all", len(held) - _MOST_LINES)
        lost = [each for each in left if each.held_by is None and not each.within]
        if not lost or not self._collects or self._spared:
            return  # in a reference cycle, most likely: the user's to collect, or a live state's of just now
        kinds = ", ".join(sorted({each.what for each in lost}))
        why = "C++ holds them, most likely" if is_done else f"what holds them was not found in {_LIMIT:g} s"
        log.warning(
            "%d objects of earlier iterations are alive (%s), and %s; ft_wrapper.leftovers(), called in the "
            "function, looks without a limit",
            len(lost),
            kinds,
            why,
        )
