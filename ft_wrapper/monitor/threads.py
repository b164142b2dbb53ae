"""The two threads in a rank: one stops the function when the iteration is over, one stamps the progress.

The watchdog writes two stamps. ``gil_stamp``: its own thread had the GIL. ``main_stamp``: the main thread ran
bytecode. A *pending call* shows that: the interpreter runs it in the main thread, between two instructions.

The pending call is C's ``sem_post`` on a semaphore that the watchdog polls. A Python callback would run
Python code in the main thread, and would lose a signal handler's exception there (a Ctrl-C, an interruption).
The semaphore belongs to the process, since a call may still be pending when everything else has ended.
"""

import contextlib
import ctypes
import dataclasses
import json
import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from .. import events
from ..exception import StoreError, StoreUnavailable
from ..protocol.ends import Ends
from ..protocol.records import DONE, FAULT
from ..store import StoreMixin
from ..store.bounded import in_background
from .frames import forget_frames
from .interrupt import Interrupter
from .shared_memory import RankMemory

log = logging.getLogger(__name__)

_LONG = 86400.0  # seconds; each iteration's notification key is written at its end, so a wait ends earlier

_LONGEST_QUESTION = 4096  # bytes
_ENDS_WITHIN = 10.0  # seconds; on a busy machine
_ABORT_AGAIN = 0.25  # seconds after which the function, still inside, is aborted again
_ABORT_PATIENCE = 5.0  # seconds after which an abort counts as hung; NCCL's sometimes hangs

_libc = ctypes.PyDLL(None)  # its calls keep the GIL: none of them waits
_semaphore = ctypes.create_string_buffer(32)  # a sem_t
_libc.sem_init(_semaphore, 0, 0)


@dataclasses.dataclass
class WatchedIteration:
    """One iteration that the monitor thread watches.

    Args:
        n: number of the iteration.
        entered: called first in the monitor thread, off the restart's path.
        may_be_done: False while this rank is active and has not reported finishing: then a wake can only mean
            a fault, and the store need not be read.
        leaves_when_done: whether the main thread is also interrupted when the iteration ends as done.
        over: set once the iteration has ended, as done or by a fault.
        is_done: whether the iteration has ended as done; valid once ``over`` is set.
        handled: set once the iteration has ended and, after a fault, the function's thread is free.
        ended_at: when this rank saw the fault that ended the iteration, in monotonic seconds; None before.
        aborted_at: when the first abort of its process groups had returned or counted as hung; None before.
        store_lost: the error by which this rank lost the store, so that it freed the function's thread.
    """

    n: int
    entered: Callable[[], None]
    may_be_done: bool
    leaves_when_done: bool = False
    over: threading.Event = dataclasses.field(default_factory=threading.Event)
    is_done: bool = False
    handled: threading.Event = dataclasses.field(default_factory=threading.Event)
    ended_at: float | None = None
    aborted_at: float | None = None
    store_lost: StoreError | None = None


@dataclasses.dataclass(eq=False)
class MonitorThread:
    """The thread that waits for the end of each iteration of a call, and then stops the function.

    It logs the exceptions of ``before_abort``, ``abort`` and ``after_abort``.

    Args:
        store: a client only for this thread, since waiting occupies it. The caller closes it.
        interrupter: stops the thread that runs the function.
        before_abort: called when a fault has ended the iteration; waits for nothing.
        abort: frees the function's thread from collectives.
        after_abort: called after the first abort; may wait for the store.
        abort_may_hang: whether ``abort`` may never return, and needs its own thread.
        describe_abort: describes what a hung abort is doing.
        last_call_wait: seconds to gather further faults before aborting.
    """

    store: StoreMixin
    interrupter: Interrupter
    before_abort: Callable[[], None]
    abort: Callable[[], None]
    after_abort: Callable[[], None]
    abort_may_hang: Callable[[], bool]
    describe_abort: Callable[[], str]
    last_call_wait: float

    def __post_init__(self) -> None:
        self._watches: queue.SimpleQueue[WatchedIteration | None] = queue.SimpleQueue()
        self._last: WatchedIteration | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ft_wrapper-monitor", daemon=True)
        self._thread.start()

    def watch(self, n: int, entered: Callable[[], None], *, may_be_done: bool) -> WatchedIteration:
        """Watches an iteration from now on.

        Args:
            n: number of the iteration.
            entered: called first in the monitor thread, off the restart's path; its exceptions are logged.
            may_be_done: False on an active rank, which sets the returned object's attribute before it reports
                finishing.
        """
        self._last = watch = WatchedIteration(n, entered, may_be_done)
        self._watches.put(watch)
        return watch

    def stop(self, timeout: float) -> bool:
        """Ends the thread. If its iteration has not ended, the thread waits for that, and then does nothing.

        Args:
            timeout: seconds to wait for the thread; at least `_ENDS_WITHIN` if it has nothing left to do.

        Returns:
            Whether the thread has ended.
        """
        self._stopping.set()
        self._watches.put(None)
        has_nothing_to_do = self._last is None or self._last.handled.is_set()
        self._thread.join(max(timeout, _ENDS_WITHIN) if has_nothing_to_do else timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        looked_ahead = False
        while (watch := self._watches.get()) is not None:
            try:
                self._run_logged("reporting the entry", watch.entered)
                if not looked_ahead:  # later iterations run much the same code
                    self._run_logged("looking ahead", self.interrupter.look_ahead)
                looked_ahead = True
                outcome = self._await_end(watch)
                watch.is_done = outcome == DONE
                watch.over.set()
                # If stopped, the rank left the job before this end: there is no thread to free.
                if outcome == FAULT and not self._stopping.is_set():
                    watch.ended_at = self.store.now()
                    self._free_main_thread(watch)
                if watch.is_done and watch.leaves_when_done and not self._stopping.is_set():
                    self.interrupter.request()
                    self.interrupter.interrupt_until_left(_LONG)
            except StoreError as error:
                log.exception("lost the store: this rank cannot learn of other ranks' faults, and leaves")
                forget_frames(error)  # they hold this thread's client, and `watch` holds the error
                watch.store_lost = error
                watch.over.set()
                self._free_main_thread(watch)
            finally:
                watch.handled.set()

    def _await_end(self, watch: WatchedIteration) -> str:
        warned = False
        while True:
            try:
                outcome = Ends(self.store).wait_for_end(watch.n, _LONG, lambda: watch.may_be_done)
                if outcome is not None:
                    return outcome
            except StoreUnavailable as error:
                if self._stopping.is_set():
                    raise
                if not warned:
                    log.warning("training goes on; faults elsewhere go unnoticed until this ends: %s", error)
                warned = True

    def _free_main_thread(self, watch: WatchedIteration) -> None:
        events.emit("end", iteration=watch.n)
        if self.last_call_wait > 0:
            self._stopping.wait(self.last_call_wait)
        self._run_logged("looking where the function is", self.before_abort)
        # From here on no atomic() block can begin; this waits for the end of a running one.
        self.interrupter.request()
        aborting = self._begin_abort()
        watch.aborted_at = self.store.now()
        events.emit("abort", iteration=watch.n)
        has_left = self.interrupter.interrupt_until_left(_ABORT_AGAIN)
        if watch.store_lost is None:
            self._run_logged("telling of the end", self.after_abort)
        # Aborted again: a group that was being made may have opened connections since.
        while not has_left:
            if aborting is None or not aborting.is_alive():
                aborting = self._begin_abort()
            has_left = self.interrupter.interrupt_until_left(_ABORT_AGAIN)
        if aborting is not None:
            # Nothing may touch the groups meanwhile. If the abort never ends, hard_timeout ends the process.
            aborting.join()

    def _begin_abort(self) -> threading.Thread | None:
        """Aborts. Returns the abort's thread, if it has one; the thread has ended unless the abort hangs."""
        if not self.abort_may_hang():
            self._run_logged("abort", self.abort)
            return None
        thread = in_background("abort", lambda: self._run_logged("abort", self.abort))
        thread.join(_ABORT_PATIENCE)
        if thread.is_alive():
            log.error(
                "abort has not returned for %g s (%s); unless it does, this rank is ended at hard_timeout",
                _ABORT_PATIENCE,
                self.describe_abort(),
            )
        return thread

    def _run_logged(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            log.exception("%s failed; the rank goes on without it", what)


class ProgressWatchdog:
    """Stamps a rank's memory at creation, every interval and at each question, from a daemon thread.

    It answers the questions of the rank's monitor.

    Args:
        memory: the memory, which stays open until `stop` has returned.
        interval: seconds between two stamps.
        questions: the rank's end of the socket for questions, which stays open until then, too.
        answers: what makes the answer, by the first byte of a question, from the rest; None: there is none.
        watches_main_thread: whether the function runs in the main thread. If not, a pending call says nothing
            about the function: ``main_stamp`` then equals ``gil_stamp``, and only ``ping`` shows the
            function's progress.
    """

    def __init__(
        self,
        memory: RankMemory,
        interval: float,
        questions: socket.socket,
        answers: Mapping[bytes, Callable[[bytes], Any]],
        watches_main_thread: bool = True,
    ) -> None:
        memory.gil_stamp = memory.main_stamp = time.monotonic()
        self._questions, self._answers = questions, answers
        self._stopping = threading.Event()
        self._thread = in_background(
            "the progress watchdog", lambda: self._run(memory, interval, watches_main_thread)
        )

    def stop(self) -> None:
        """Ends the thread and waits for it.

        Raises:
            RuntimeError: the thread did not end.
        """
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._questions.shutdown(socket.SHUT_RDWR)
        self._thread.join(_ENDS_WITHIN)
        if self._thread.is_alive():
            raise RuntimeError(f"the progress watchdog's thread did not end within {_ENDS_WITHIN} s")

    def _run(self, memory: RankMemory, interval: float, watches_main_thread: bool) -> None:
        add_pending_call: Any = ctypes.pythonapi.Py_AddPendingCall
        post = ctypes.cast(_libc.sem_post, ctypes.c_void_p)
        is_pending = False
        poll = select.poll()
        poll.register(self._questions, select.POLLIN)
        is_asked = True
        while not self._stopping.is_set():
            now = time.monotonic()
            memory.gil_stamp = now
            has_run = not watches_main_thread
            while _libc.sem_trywait(_semaphore) == 0:
                has_run, is_pending = True, False
            if has_run:
                memory.main_stamp = now
            if watches_main_thread and not is_pending:
                # -1: the interpreter's queue of pending calls is full; the next interval tries again.
                is_pending = add_pending_call(post, _semaphore) == 0
            if not is_asked:  # the monitor has ended
                self._stopping.wait(interval)
            elif poll.poll(min(1000 * interval, 1e9)):  # it waits for 25 days at most
                is_asked = self._reply()

    def _reply(self) -> bool:
        """Answers a question; returns False at the end of the line."""
        try:
            if not (question := self._questions.recv(_LONGEST_QUESTION)):
                return False
            if (said := self._said(question)) is not None:
                self._questions.send(said)
        except OSError:
            return False
        return True

    def _said(self, question: bytes) -> bytes | None:
        try:
            answer = self._answers[question[:1]](question[1:])
            return None if answer is None else json.dumps(vars(answer)).encode()
        except Exception:
            log.debug("a question was not answered", exc_info=True)
            return b"null"  # the monitor asks again
