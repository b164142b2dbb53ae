"""Calls that may block: each runs in its own thread, for which the caller waits a limited time."""

import logging
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from ..exception import RestartTimeout

log = logging.getLogger(__name__)

T = TypeVar("T")


def call_in_thread(function: Callable[[], T], what: str, seconds: float | None = None) -> T:
    """Calls a function in a daemon thread and waits for its result.

    While the caller waits, signal handlers run at once, and their exceptions are raised here; a call to
    torch's stores would delay them. A thread that does not end in time, or whose caller was interrupted, is
    left behind with everything it uses: only the end of the process ends it.

    Args:
        function: the function.
        what: description of the call, for the error and the thread's name.
        seconds: how long to wait; None if the function has its own limit.

    Returns:
        The function's result.

    Raises:
        ft_wrapper.exception.RestartTimeout: the call took longer.
        BaseException: the function's error.
    """
    # A queue, so that no frame of an error's own traceback holds the error.
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((function(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=run, name=f"ft_wrapper: {what}", daemon=True).start()
    try:
        result, error = answers.get(timeout=seconds)
    except queue.Empty:
        limit = timedelta(seconds=seconds or 0.0)
        raise RestartTimeout(f"{what} did not finish within timeout={limit}") from None
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback holds this frame
    return result  # type: ignore[return-value]


def in_background(what: str, work: Callable[[], object]) -> threading.Thread:
    """Starts work in a daemon thread.

    Args:
        what: description of the work, for the thread's name and for messages.
        work: the function to call; its errors are logged.
    """

    def run() -> None:
        try:
            work()
        except Exception as error:
            log.warning("%s failed: %s", what, error)
            log.debug("%s", what, exc_info=True)

    thread = threading.Thread(target=run, name=f"ft_wrapper: {what}", daemon=True)
    thread.start()
    return thread


def bounded(what: str, work: Callable[[], object], seconds: float) -> None:
    """Starts work in a daemon thread, and waits a limited time for its end.

    Args:
        what: description of the work, for the thread's name and for messages.
        work: the function to call; its errors are logged, and it goes on if it takes longer.
        seconds: how long to wait.
    """
    thread = in_background(what, work)
    thread.join(seconds)
    if thread.is_alive():
        log.warning("%s: not done after %g s, no longer waiting", what, seconds)


def take_or_make(idle: list[T], make: Callable[[], T]) -> T:
    """Takes an idle object, or makes a new one; from any thread.

    Args:
        idle: the idle objects.
        make: makes an object.
    """
    try:
        return idle.pop()
    except IndexError:
        return make()
