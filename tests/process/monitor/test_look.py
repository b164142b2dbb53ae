"""What Linux says of real processes: whether they move, and what their main threads wait in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ft_wrapper.monitor.evidence import Look
from ft_wrapper.monitor.look import descendants, is_lost, look_at, slices

LIMIT = 60.0  # seconds, however busy the machine is
READY = "import os, sys, time; os.write(1, b'!');"


@pytest.fixture
def start() -> Iterator[Callable[[str], int]]:
    """Starts Python with some code, and returns its process once it has come to the code."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(code: str) -> int:
        process = subprocess.Popen([sys.executable, "-c", READY + code], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None and process.stdout.read(1) == b"!"
        return process.pid

    yield begin
    for process in started:
        for child in descendants(process.pid):
            os.kill(child, signal.SIGKILL)
        process.kill()
        process.communicate(timeout=LIMIT)


def await_look(pid: int, is_expected: Callable[[Look], bool]) -> Look:
    """Looks until a process has come to what is expected."""
    deadline = time.monotonic() + LIMIT
    while not is_expected(seen := look_at(pid, time.monotonic())):
        assert time.monotonic() < deadline, seen
        time.sleep(0.01)  # nothing announces that a process has fallen asleep
    return seen


ENDLESS = {
    "sleep": "time.sleep(1000)",
    "lock": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "pipe": "os.read(os.pipe()[0], 1)",
    "C": "import ctypes; ctypes.CDLL(None).pause()",
    "C with the GIL": "import ctypes; ctypes.PyDLL(None).pause()",
    "poll": "import select; select.poll().poll()",
    "queue": "import queue; queue.Queue().get()",
    "socket": "import socket; a, b = socket.socketpair(); a.recv(1)",
    "child": "import subprocess; subprocess.run(['sleep', '1000'])",
}
ENDING = {
    "sleep": "time.sleep(100)",
    "lock": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire(timeout=100)",
    "poll": "import select; select.poll().poll(100_000)",
    "select": "import select; select.select([], [], [], 100)",
    "queue": "import queue; queue.Queue().get(timeout=100)",
    "socket": "import socket; a, b = socket.socketpair(); a.settimeout(100); a.recv(1)",
    "event": "import threading; threading.Event().wait(100)",
    "epoll": "import select; select.epoll().poll(100)",
}


def is_asleep(seen: Look) -> bool:
    return seen.state == "S"


@pytest.mark.parametrize("code", ENDLESS.values(), ids=ENDLESS)
def test_a_thread_that_sleeps_without_end_does_not_move(start: Callable[[str], int], code: str) -> None:
    pid = start(code)
    first = await_look(pid, is_asleep)
    before = slices(pid)
    second = look_at(pid, time.monotonic())
    assert before == slices(pid)
    assert (first.run, first.waited, first.slices) == (second.run, second.waited, second.slices)
    assert not second.ends_soon and not second.is_in_file


@pytest.mark.parametrize("code", ENDING.values(), ids=ENDING)
def test_a_wait_with_a_timeout_is_known_as_one(start: Callable[[str], int], code: str) -> None:
    await_look(start(code), lambda seen: seen.state == "S" and seen.ends_soon)


def test_a_timeout_in_the_far_future_is_none(start: Callable[[str], int]) -> None:
    assert not await_look(start("time.sleep(10_000)"), is_asleep).ends_soon


def test_a_thread_that_runs_moves(start: Callable[[str], int]) -> None:
    pid = start("\nwhile True: pass")
    first = await_look(pid, lambda seen: seen.state == "R")
    await_look(pid, lambda seen: seen.run > first.run)


def test_other_threads_and_children_count_as_work_elsewhere(start: Callable[[str], int]) -> None:
    thread = "import threading; threading.Thread(target=lambda: [None for _ in iter(int, 1)]).start(); "
    child = "import subprocess; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    for code in (f"{thread} threading.Event().wait()", child):
        pid = start(code)
        first = await_look(pid, lambda seen: seen.are_others_ready)
        await_look(pid, lambda seen, first=first: seen.elsewhere > first.elsewhere)  # type: ignore[misc]


def test_the_thread_that_answers_is_left_out(start: Callable[[str], int]) -> None:
    code = (
        "import threading; spin = threading.Thread(target=lambda: [None for _ in iter(int, 1)]);"
        "spin.start(); sys.stdout.write(f'{spin.native_id}\\n'); sys.stdout.flush(); threading.Event().wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", "import sys;" + code], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        thread = int(process.stdout.readline())
        await_look(process.pid, lambda seen: seen.are_others_ready)
        assert not look_at(process.pid, time.monotonic(), thread).are_others_ready
        process.kill()


def test_a_stopped_process_is_seen_as_stopped(start: Callable[[str], int]) -> None:
    pid = start("time.sleep(1000)")
    assert not is_lost(pid)
    os.kill(pid, signal.SIGSTOP)
    await_look(pid, lambda seen: seen.state == "T")
    assert is_lost(pid)


def test_a_process_that_has_ended_is_lost(start: Callable[[str], int]) -> None:
    pid = start("sys.exit()")
    deadline = time.monotonic() + LIMIT
    while not is_lost(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert is_lost(2**22 + 1)
    with pytest.raises(OSError):
        look_at(2**22 + 1, time.monotonic())


def test_a_read_of_a_fifo_is_no_work_on_a_file(start: Callable[[str], int], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    pid = start(f"os.read(os.open({str(tmp_path / 'fifo')!r}, os.O_RDWR), 1)")
    assert not await_look(pid, is_asleep).is_in_file


def test_bytes_written_to_a_file_are_counted(start: Callable[[str], int], tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    pid = start(f"\nwith open({path!r}, 'wb') as file:\n while True: file.seek(0), file.write(bytes(9999))")
    first = look_at(pid, time.monotonic())
    await_look(pid, lambda seen: seen.copied > first.copied + 1_000_000)
