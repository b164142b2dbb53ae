"""Waiting in torch's stores, which do not return for a signal, so that a signal's handler runs at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def interruptible(function: Callable[[], T]) -> T:
    """Calls a function in another thread; what a signal's handler raises meanwhile is raised here.

    A caller that is interrupted leaves the thread behind, and what it uses: no one else may use that. It
    waits for as long as the function takes, which has to have a limit of its own.

    Args:
        function: what to call.

    Returns:
        What it returns.

    Raises:
        BaseException: what it raises.
    """
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((function(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=run, name="ft_wrapper-rendezvous-wait", daemon=True).start()
    result, error = answers.get()
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
