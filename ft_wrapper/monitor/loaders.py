"""A rank that waits in its data loader: for which worker, how that does, and where it stands.

A slow worker is no hang: the rank says, by its line to the monitor, that it waits (`patience` has what
becomes of that). A worker that is dead or stopped will never answer: that is a fault at once. Torch itself
notices when a child of the rank is killed, but not that one is stopped; and the end of a worker that another
process started (``forkserver``), or that exits in order, only within five seconds.

Nothing tells that the function has begun to wait: a thread looks at its stack five times a second, and only
while the process has children. Torch's and torchdata's loaders wait in methods of the same names.
"""

import contextlib
import logging
import multiprocessing.process
import os
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from ..exception import InternalError
from ..store.bounded import in_background
from .frames import current_frames, is_library, stack_of_child
from .shared_memory import RankMemory

log = logging.getLogger(__name__)

_LOOK = 0.2  # seconds between two looks
_ENDS_WITHIN = 10.0  # seconds; on a busy machine
_SAID_AFTER = 1.0  # seconds of waiting, from which on other ranks may have to know it
_LOADERS = ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader")
_WAITS_IN = ("_try_get_data", "_get_data")


class Awaited(NamedTuple):
    """What a thread waits for in a data loader.

    Args:
        what: the loader's iterator and the batch, so that one wait is told from the next.
        workers: the processes of which one has to answer.
    """

    what: tuple[int, int]
    workers: tuple[int, ...]


def awaited(frame: FrameType | None) -> Awaited | None:
    """Says what a thread waits for in a data loader with workers; None if it does not.

    Args:
        frame: its innermost one.
    """
    while frame is not None:
        if frame.f_code.co_name in _WAITS_IN and frame.f_globals.get("__name__") in _LOADERS:
            iterator: Any = frame.f_locals.get("self")
            try:
                return Awaited((id(iterator), iterator._rcvd_idx), _workers_awaited(iterator))
            except Exception:  # of another version, or it changes just now
                return None
        frame = frame.f_back
    return None


def _workers_awaited(iterator: Any) -> tuple[int, ...]:
    tasks = dict(iterator._task_info)
    if getattr(iterator, "_in_order", True) and iterator._rcvd_idx in tasks:
        numbers = [tasks[iterator._rcvd_idx][0]]
    else:  # any of those that have one; or all, at the beginning of an epoch
        numbers = sorted({task[0] for task in tasks.values() if len(task) == 1})
        numbers = numbers or list(range(len(iterator._workers)))
    return tuple(iterator._workers[number].pid for number in numbers)


def what_ails(pid: int) -> str | None:
    """Says that a process is dead or stopped; None if it can answer.

    One that a debugger holds is not stopped.

    Args:
        pid: the process.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            state = file.read(4096).rpartition(b") ")[2][:1]
    except OSError:
        state = b"X"
    return {b"X": "is dead", b"Z": "is dead", b"T": "is stopped by a signal"}.get(state)


class LoaderWatch:
    """Owns a thread that looks whether the function waits in its data loader.

    Args:
        memory: of the rank.
        thread: which runs the function, as ``threading.get_ident()`` has it.
        soft_timeout: seconds; of half of that it is logged.
        tell: given the iteration, whether the function waits for a worker that lives, and, in words, that the
            worker will not answer, if so.
    """

    def __init__(
        self,
        memory: RankMemory,
        thread: int,
        soft_timeout: float,
        tell: Callable[[int, bool, str | None], None],
    ) -> None:
        self._memory = memory
        self._function = thread
        self._said_after = min(_SAID_AFTER, soft_timeout / 4)
        self._logged_after = soft_timeout / 2
        self._tell_monitor = tell
        self._stopping = threading.Event()
        self._waiting: Awaited | None = None  # for so long that it counts
        self._thread = in_background("watching the data loader", self._run)

    def stop(self) -> None:
        """Ends the thread, and waits for that."""
        self._stopping.set()
        self._thread.join(_ENDS_WITHIN)

    def in_words(self) -> str | None:
        """What the function was waiting for; None if for no worker, or not for long."""
        waiting = self._waiting
        if waiting is None:
            return None
        pid = waiting.workers[0]
        does = what_ails(pid)
        if does is None and (stood := _where(pid, self._memory)):
            does = f"stood {stood}"
        return _waited_for(pid, does)

    def _run(self) -> None:
        last: Awaited | None = None
        began = 0.0
        n = self._memory.iteration
        has_logged = False
        ailing: str | None = None
        while not self._stopping.wait(_LOOK):
            now = awaited(current_frames().get(self._function)) if _has_children() else None
            if now is None or now != last or n != self._memory.iteration:
                if self._waiting is not None:
                    self._waiting = None
                    self._tell(n, False, None)
                last, began, n = now, time.monotonic(), self._memory.iteration
                has_logged, ailing = False, None
                continue
            waited = time.monotonic() - began
            ails = [what_ails(pid) for pid in now.workers]
            # Twice: what it has sent before it died may still come.
            is_fault, ailing = ailing is not None and all(ails), ails[0] if all(ails) else None
            if is_fault:
                self._waiting = None
                self._tell(n, False, _waited_for(now.workers[0], ailing))
                ailing = None
            elif ailing is None and self._waiting is None and waited >= self._said_after:
                self._waiting = now
                self._tell(n, True, None)
            if self._waiting is not None and not has_logged and waited >= self._logged_after:
                has_logged = True
                self._log(now.workers[0])
        if self._waiting is not None:
            self._tell(n, False, None)

    def _tell(self, n: int, waits: bool, ails: str | None) -> None:
        with contextlib.suppress(InternalError):  # the monitor has ended, and this rank leaves for that
            self._tell_monitor(n, waits, ails)

    def _log(self, pid: int) -> None:
        stands = _where(pid, self._memory)
        which = f", which stands {stands}" if stands else ""
        log.warning("rank %s waits for its loader's worker %d%s", self._memory.rank, pid, which)


def _waited_for(pid: int, does: str | None) -> str:
    return f"waited for its loader's worker {pid}" + (f", which {does}" if does else "")


def _has_children() -> bool:
    return bool(getattr(multiprocessing.process, "_children", True))


def _where(pid: int, memory: RankMemory) -> str | None:
    """Where a worker's main thread stands, if it was forked in this call: else it cannot be asked."""
    stack = stack_of_child(pid, memory)
    if not stack:
        return None
    place = next((place for place in stack if not is_library(place.file)), stack[0])
    return f"in {place.function} ({os.path.basename(place.file)}:{place.line})"
