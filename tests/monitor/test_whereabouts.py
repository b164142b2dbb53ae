"""Where a thread is, in words."""

import queue
import threading
from collections.abc import Callable

from ft_wrapper.monitor.whereabouts import whereabouts


def place_while(blocks: Callable[[], object], frees: Callable[[], object], says: str) -> str:
    """Where a thread is said to be, as soon as ``says`` is part of it."""
    started: queue.SimpleQueue[int] = queue.SimpleQueue()

    def train() -> None:
        started.put(threading.get_ident())
        blocks()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        ident = started.get(timeout=60)
        place = ""
        while says not in place:
            place = whereabouts(ident) or ""
        return place
    finally:
        frees()
        thread.join(60)


def test_names_the_library_function_and_the_users_line() -> None:
    event = threading.Event()
    place = place_while(event.wait, event.set, "in wait")
    assert place.startswith("in wait, called at test_whereabouts.py:") and place.endswith(" in train")


def test_in_the_users_own_code_there_is_only_the_line() -> None:
    lock = threading.Lock()
    lock.acquire()
    place = place_while(lock.acquire, lock.release, "train")
    assert place.startswith("at test_whereabouts.py:") and place.endswith(" in train")


def test_a_thread_that_is_gone_is_nowhere() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join(60)
    assert thread.ident is not None and whereabouts(thread.ident) is None
