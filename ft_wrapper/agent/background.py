"""Work in a thread of its own, for which no one waits longer than he wants to."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


def in_background(what: str, work: Callable[[], None]) -> threading.Thread:
    """Does some work in a thread, which ends with the process at the latest.

    Args:
        what: what it is, for the thread's name and for messages.
        work: what to do; an error is logged.
    """

    def run() -> None:
        try:
            work()
        except Exception as error:
            log.warning("%s failed: %s", what, error)
            log.debug("%s", what, exc_info=True)

    thread = threading.Thread(target=run, name=f"ft_wrapper-agent-{what.replace(' ', '-')}", daemon=True)
    thread.start()
    return thread


def bounded(what: str, work: Callable[[], None], seconds: float) -> bool:
    """Does some work, but waits for its end so long at the most.

    Args:
        what: what it is, for messages.
        work: what to do; an error is logged. It goes on if it takes longer.
        seconds: how long.

    Returns:
        Whether it has ended.
    """
    thread = in_background(what, work)
    thread.join(seconds)
    if thread.is_alive():
        log.warning("%s: not done after %g s, left alone", what, seconds)
    return not thread.is_alive()
