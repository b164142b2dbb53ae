"""The progress watchdog: what its two stamps tell, and that nothing is left behind of it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ft_wrapper.monitor.shared_memory import RankMemory
from ft_wrapper.monitor.threads import ProgressWatchdog

LIMIT = 30.0
INTERVAL = 0.01


class Recorder:
    """Stands in for a rank's memory, keeps every stamp, and tells of a number of them."""

    def __init__(self) -> None:
        self.main: list[float] = []
        self.gil: list[float] = []
        self.awaited = sys.maxsize
        self.reached = threading.Event()

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("main_stamp", "gil_stamp"):
            super().__setattr__(name, value)
            return
        (self.main if name == "main_stamp" else self.gil).append(value)
        if len(self.gil) >= self.awaited:
            self.reached.set()

    def wait_for_gil_stamps(self, more: int) -> None:
        """Blocks the calling thread, in C, until so many more came."""
        self.reached.clear()
        self.awaited = len(self.gil) + more
        assert self.reached.wait(LIMIT)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@contextlib.contextmanager
def started(memory: Any, interval: float, **kwargs: Any) -> Iterator[ProgressWatchdog]:
    """A watchdog that no monitor asks anything."""
    ours, asker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, asker:
        watchdog = ProgressWatchdog(memory, interval, ours, {}, **kwargs)
        try:
            yield watchdog
        finally:
            watchdog.stop()


def stamped(recorder: Recorder, **kwargs: Any) -> contextlib.AbstractContextManager[ProgressWatchdog]:
    return started(recorder, INTERVAL, **kwargs)


def run_python_until_main_stamps(recorder: Recorder, count: int) -> None:
    deadline = time.monotonic() + LIMIT
    while len(recorder.main) < count:
        assert time.monotonic() < deadline, "the main thread runs bytecode, but is not stamped"


def test_a_blocked_main_thread_is_no_progress_but_the_gil_can_be_had(recorder: Recorder) -> None:
    with stamped(recorder):
        recorder.wait_for_gil_stamps(2)
        stamps = len(recorder.main)
        recorder.wait_for_gil_stamps(20)
        # A pending call may run on the way in, and several on a machine that halts this thread there.
        assert len(recorder.main) <= stamps + 5
        run_python_until_main_stamps(recorder, len(recorder.main) + 2)  # and it goes on


def test_a_held_gil_stops_both_stamps(recorder: Recorder) -> None:
    sleep_holding_the_gil = ctypes.PyDLL(None).usleep
    with stamped(recorder):
        run_python_until_main_stamps(recorder, 3)
        begin = time.monotonic()
        sleep_holding_the_gil(ctypes.c_uint(200_000))
        end = time.monotonic()
    # Twenty intervals long. Some may have passed between reading the clock and the call.
    assert len([stamp for stamp in recorder.gil if begin < stamp < end]) <= 5
    assert len([stamp for stamp in recorder.main if begin < stamp < end]) <= 5


def test_outside_the_main_thread_both_stamps_go_together(recorder: Recorder) -> None:
    with stamped(recorder, watches_main_thread=False):
        recorder.wait_for_gil_stamps(20)
    assert len(recorder.main) >= 20


def test_stamps_are_fresh_after_start(caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(RankMemory()) as memory:
        memory.gil_stamp = memory.main_stamp = 1.0
        before = time.monotonic()
        with started(memory, 365 * 24 * 3600.0):  # the interval does not delay the end
            assert memory.gil_stamp >= before
            assert memory.main_stamp >= before
    assert not caplog.records, "the interval may be as long as any setting"


def test_at_most_one_pending_call_is_outstanding(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[object] = []

    def accept(callback: object, argument: object) -> int:
        added.append(argument)
        return 0

    monkeypatch.setattr(ctypes.pythonapi, "Py_AddPendingCall", accept)
    with stamped(recorder):
        recorder.wait_for_gil_stamps(10)
    assert len(added) == 1


def test_a_full_queue_of_pending_calls_is_tried_again(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []

    def refuse(callback: object, argument: object) -> int:
        tried.append(argument)
        return -1

    monkeypatch.setattr(ctypes.pythonapi, "Py_AddPendingCall", refuse)
    with stamped(recorder):
        recorder.wait_for_gil_stamps(10)
    assert len(tried) >= 9
    assert len(recorder.main) == 1  # start's


def test_stop_with_a_pending_call_outstanding() -> None:
    """In a process of its own, which a write to freed memory may end."""

    def stop_while_the_main_thread_is_in_c() -> None:
        for _ in range(50):
            memory = RankMemory()
            stopped = threading.Lock()
            stopped.acquire()

            def stop(watchdog: ProgressWatchdog, memory: RankMemory, stopped: threading.Lock) -> None:
                watchdog.stop()
                memory.close()
                stopped.release()

            with started(memory, 0.001) as watchdog:
                thread = threading.Thread(target=stop, args=(watchdog, memory, stopped))
                thread.start()
                stopped.acquire()  # in C: what is pending stays so until after the stop
                thread.join()
            del watchdog, memory, thread
            gc.collect(0)

    process = multiprocessing.get_context("fork").Process(target=stop_while_the_main_thread_is_in_c)
    process.start()
    process.join(LIMIT)
    exitcode = process.exitcode
    process.kill()
    process.join(LIMIT)
    process.close()
    assert exitcode == 0
