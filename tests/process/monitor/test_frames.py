"""Where threads are, asked for without a deadlock, and said in words."""

from __future__ import annotations

import gc
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import pytest

from ft_wrapper.monitor import frames
from ft_wrapper.monitor.frames import current_exception, current_frames, describe_thread

# Collections begin all the time and destroy what releases the GIL, while threads come and go.
BUSY = """
import gc, sys, threading, time
from ft_wrapper.monitor.frames import current_frames

class Slow:
    def __init__(self):
        self.itself = self
    def __del__(self):
        time.sleep(0.0005)

def start_threads():
    while True:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

threading.Thread(target=start_threads, daemon=True).start()
gc.set_threshold(1)
for _ in range(300):
    Slow()
    assert threading.get_ident() in current_frames()
    assert gc.isenabled()
gc.disable()
current_frames()
assert not gc.isenabled()
"""


def test_frames_can_be_asked_for_while_threads_start_and_garbage_is_collected() -> None:
    subprocess.run([sys.executable, "-c", BUSY], check=True, timeout=60)


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
            place = describe_thread(ident) or ""
        return place
    finally:
        frees()
        thread.join(60)


def test_names_the_library_function_and_the_users_line() -> None:
    event = threading.Event()
    place = place_while(event.wait, event.set, "in wait")
    assert place.startswith("in wait, called at test_frames.py:") and place.endswith(" in train")


def test_in_the_users_own_code_there_is_only_the_line() -> None:
    lock = threading.Lock()
    lock.acquire()
    place = place_while(lock.acquire, lock.release, "train")
    assert place.startswith("at test_frames.py:") and place.endswith(" in train")


def test_a_thread_that_is_gone_is_nowhere() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join(60)
    assert thread.ident is not None and describe_thread(thread.ident) is None


@pytest.mark.parametrize("look", [frames.current_frames, lambda: frames.current_exception(0)])
def test_the_users_choice_whether_to_collect_stays(look: Callable[[], object]) -> None:
    """Whichever moment of a look it falls into."""
    stop = threading.Event()

    def looks() -> None:
        while not stop.is_set():
            look()

    thread = threading.Thread(target=looks)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    lost = 0
    try:
        for choose, is_on in [(gc.disable, False), (gc.enable, True)] * 1000:
            choose()
            os.sched_yield()
            lost += gc.isenabled() != is_on
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
        gc.enable()
    assert lost == 0


def test_a_look_at_the_frames_keeps_nothing_alive() -> None:
    """Without the collector: a cycle of a frame and the look at it would hold what all functions have."""

    class Model:
        pass

    def trains() -> weakref.ref[Model]:
        model = Model()
        assert threading.get_ident() in current_frames()
        assert current_exception(threading.get_ident()) is sys.exc_info()[1]
        return weakref.ref(model)

    gc.collect()
    gc.disable()
    try:
        assert trains()() is None
    finally:
        gc.enable()
