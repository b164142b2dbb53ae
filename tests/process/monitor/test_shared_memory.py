"""A rank's shared memory: real processes die in every way, and every watcher learns of it."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ft_wrapper.monitor import shared_memory
from ft_wrapper.monitor.shared_memory import Phase, RankMemory
from ft_wrapper.protocol.notice import Notice

LIMIT = 30.0


@pytest.fixture
def memory() -> Iterator[RankMemory]:
    with contextlib.closing(RankMemory()) as memory:
        yield memory


class Rank:
    """A forked process with its own mapping of the memory: does one thing, and another when it is told."""

    def __init__(
        self, memory: RankMemory, first: Callable[[RankMemory], object], then: Callable[[RankMemory], object]
    ) -> None:
        self._first, self._then = first, then
        self._answers, answers = os.pipe()
        orders, self._orders = os.pipe()
        self._process = multiprocessing.get_context("fork").Process(
            target=self._run, args=(memory.fd, orders, answers)
        )
        self._process.start()
        os.close(answers)
        os.close(orders)
        assert os.read(self._answers, 1) == b"."

    def _run(self, fd: int, orders: int, answers: int) -> None:
        os.close(self._orders)
        memory = RankMemory.from_fd(fd)
        self._first(memory)
        os.write(answers, b".")
        if os.read(orders, 1):
            self._then(memory)

    def tell(self) -> None:
        os.write(self._orders, b".")

    def close(self) -> None:
        os.close(self._orders)
        os.close(self._answers)
        self._process.kill()
        self._process.join(LIMIT)
        self._process.close()


@pytest.fixture
def rank(memory: RankMemory) -> Iterator[Callable[..., Rank]]:
    """Starts a rank on the memory."""
    with contextlib.ExitStack() as ranks:

        def start(first: Callable[[RankMemory], object], then: Callable[[RankMemory], object]) -> Rank:
            started = Rank(memory, first, then)
            ranks.callback(started.close)
            return started

        yield start


def watch(memory: RankMemory, watchers: int) -> tuple[list[threading.Thread], list[bool]]:
    answers: list[bool] = []
    threads = [
        threading.Thread(target=lambda: answers.append(memory.wait_for_death())) for _ in range(watchers)
    ]
    for thread in threads:
        thread.start()
    return threads, answers


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()


DEATHS: dict[str, Callable[[], object]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "return without unlocking": lambda: None,
    "exec": lambda: os.execv("/bin/sleep", ["sleep", "60"]),
}


@pytest.mark.parametrize("death", DEATHS)
def test_every_watcher_learns_of_a_death(memory: RankMemory, rank: Callable[..., Rank], death: str) -> None:
    dying = rank(RankMemory.lock_life, lambda _: DEATHS[death]())
    threads, answers = watch(memory, 3)
    dying.tell()
    join(threads)
    assert answers == [True] * 3
    assert memory.wait_for_death()  # who comes later, too


def test_an_end_in_order_is_no_death(memory: RankMemory, rank: Callable[..., Rank]) -> None:
    ending = rank(RankMemory.lock_life, RankMemory.close)
    threads, answers = watch(memory, 3)
    ending.tell()
    join(threads)
    assert answers == [False] * 3
    assert not memory.wait_for_death()


def test_a_watcher_that_dies_is_not_taken_for_the_rank(memory: RankMemory, rank: Callable[..., Rank]) -> None:
    ending = rank(RankMemory.lock_life, RankMemory.close)
    ending.tell()
    assert not memory.wait_for_death()
    # A watcher killed in the moment in which it has the mutex.
    watcher = rank(lambda memory: shared_memory._pthread("mutex_lock", ctypes.byref(memory)), lambda _: None)
    watcher.tell()
    assert not memory.wait_for_death()


def test_the_end_of_the_thread_that_holds_the_life_is_a_death(memory: RankMemory) -> None:
    holder = threading.Thread(target=memory.lock_life)
    holder.start()
    holder.join(LIMIT)
    with contextlib.closing(RankMemory.from_fd(memory.fd)) as watcher:
        assert watcher.wait_for_death()


def test_a_new_memory_says_idle(memory: RankMemory) -> None:
    assert (memory.phase, memory.iteration, memory.active) == (Phase.IDLE, -1, False)
    assert (memory.hang_protection_disabled, memory.ping_stamp) == (0, 0.0)
    assert 0.0 < memory.main_stamp <= memory.gil_stamp <= time.monotonic()


def test_progress_is_the_older_stamp_once_there_was_a_ping(memory: RankMemory) -> None:
    memory.main_stamp = 5.0
    assert memory.progress_stamp() == 5.0
    memory.ping_stamp = 3.0
    assert memory.progress_stamp() == 3.0
    memory.ping_stamp = 8.0
    assert memory.progress_stamp() == 5.0


def test_a_phase_begins_with_fresh_stamps(memory: RankMemory) -> None:
    memory.main_stamp, memory.ping_stamp = 1.0, 2.0
    before = time.monotonic()
    memory.enter_phase(Phase.WATCHED)
    assert before <= memory.progress_stamp() <= time.monotonic()
    assert (memory.phase, memory.ping_stamp) == (Phase.WATCHED, 0.0)


def test_steps_are_told_with_the_moment_they_began(memory: RankMemory) -> None:
    notes: list[dict[str, Any]] = []
    ping, step = memory.make_ping(lambda: notes.append(memory.last_step()))
    assert (memory.step, memory.last_step()) == (None, {})
    before = time.monotonic()
    step(0)
    assert memory.step == 0 and before <= memory.step_stamp <= time.monotonic()
    assert memory.ping_stamp == 0.0, "a step is no sign of progress"
    ping(1)
    ping(step=2)
    ping()
    assert memory.ping_stamp > 0.0 and memory.step == 2
    began = memory.step_stamp
    step(2)  # a part of it
    assert memory.step_stamp == began
    assert [note["step"] for note in notes] == [0]
    step(1)  # the function has gone back
    assert [note["step"] for note in notes] == [0, 2, 1] and notes[1]["began"] == began
    memory.enter_iteration(4)
    assert (memory.iteration, memory.rank, memory.step) == (4, None, None)
    step(1)
    assert [note["step"] for note in notes] == [0, 2, 1, 1]


def test_whether_a_rank_is_inside(memory: RankMemory) -> None:
    memory.enter_iteration(3)
    assert not memory.is_in_function and not memory.has_restarted, "its first one"
    memory.is_in_function = True
    memory.leave_iteration()
    assert not memory.is_in_function and memory.has_restarted
    memory.enter_iteration(4)
    assert not memory.is_in_function and memory.has_restarted
    memory.is_in_function = True
    memory.enter_iteration(5)
    assert not memory.is_in_function


def test_a_notice_comes_with_the_time_that_is_left(memory: RankMemory) -> None:
    assert memory.notice is None and not memory.looks
    notice = Notice('"é' * 300, "SIGTERM " * 100, 30.0, "a", ends=True, leaving=("3:0",))
    memory.give(notice)
    with contextlib.closing(RankMemory.from_fd(memory.fd)) as other:
        read = other.notice
        assert other.looks and read is not None and read.seconds is not None and 0 < read.seconds <= 30.0
        assert (read.id, read.ends) == ("a", True)
        slot, text = memory._newest, memory._notices[memory._newest].value
        memory.give(Notice("ftrun notice", "maintenance", id="b"))
        assert memory._notices[slot].value == text, "another process may be reading it"
        assert other.notice == Notice("ftrun notice", "maintenance", id="b"), "it is not known how long"
        memory._notices[memory._newest].value = b'{"who":"ft'
        assert other.notice is None, "two have written at once"


@pytest.mark.parametrize("way", ["step", "ping"])
def test_one_that_is_to_leave_does_so_where_a_step_begins(memory: RankMemory, way: str) -> None:
    class Left(BaseException):
        pass

    def look(step: int) -> None:
        if memory.leave_requested:
            raise Left

    notes: list[int] = []
    ping, step = memory.make_ping(lambda: notes.append(memory.step or 0), look)
    tell = step if way == "step" else ping
    tell(1)
    memory.give(Notice("node 3", "SIGTERM", 30.0, "a"))
    for n in (2, 3):  # each looks, and goes on
        tell(n)
    assert memory.step == 3 and notes == [1], "not as if the function had gone back"
    memory.leave_requested = memory.looks = True
    ping()
    tell(3)  # a part of the step that is on
    for n in (4, 1):  # the next one; or the function has gone back
        with pytest.raises(Left):
            tell(n)
        assert memory.step == 3, "it has not begun"
    memory.enter_iteration(1)
    with pytest.raises(Left):
        tell(0)


@pytest.mark.parametrize("n", [-1, 1.5, None, 2**64])
def test_what_is_no_step(memory: RankMemory, n: Any) -> None:
    ping, step = memory.make_ping()
    for tell in (step, ping) if n is not None else (step,):  # also before there is one
        with pytest.raises(TypeError, match=f"{n!r}: a step is an integer of at least 0"):
            tell(n)
        assert memory.step in (None, 0)
        step(0)


@pytest.mark.parametrize("n", [0, 3])
def test_an_error_of_a_note_is_no_wrong_step(memory: RankMemory, n: int) -> None:
    def note() -> None:
        raise ValueError("no place for events")

    _, step = memory.make_ping(note)
    with pytest.raises(ValueError, match="no place for events"):
        step(n)


def is_mapped(address: int) -> bool:
    """Whether a rank's memory is mapped there; another file may have been mapped since."""
    with open("/proc/self/maps") as maps:
        return any(line.startswith(f"{address:x}-") and "/memfd:ft_wrapper_rank" in line for line in maps)


def test_ping_stamps_and_outlives_the_memory() -> None:
    memory = RankMemory()
    address = ctypes.addressof(memory)
    ping = memory.make_ping()[0]
    before = time.monotonic()
    ping()
    assert before <= memory.ping_stamp <= time.monotonic()
    memory.close()
    memory.close()
    assert memory.fd == -1
    del memory
    ping()
    assert is_mapped(address)
    del ping
    assert not is_mapped(address)


def test_both_sides_close_their_own_descriptor(memory: RankMemory) -> None:
    other = RankMemory.from_fd(memory.fd)
    fd = other.fd
    assert fd != memory.fd and not os.get_inheritable(fd)
    other.close()
    with pytest.raises(OSError):
        os.fstat(fd)
    memory.iteration = 3
    assert memory.iteration == 3


def test_a_watcher_that_waits_keeps_the_mapping(memory: RankMemory) -> None:
    memory.lock_life()
    watcher = RankMemory.from_fd(memory.fd)
    address = ctypes.addressof(watcher)
    threads, answers = watch(watcher, 1)
    watcher.close()
    del watcher
    assert is_mapped(address)
    memory.close()
    join(threads)
    threads.clear()
    assert answers == [False]
    assert not is_mapped(address)


def test_closing_while_another_thread_holds_the_life_keeps_the_mapping() -> None:
    memory = RankMemory()
    address = ctypes.addressof(memory)
    locked, closed = threading.Event(), threading.Event()

    def hold(memory: RankMemory) -> None:
        memory.lock_life()
        locked.set()
        closed.wait(LIMIT)

    holder = threading.Thread(target=hold, args=(memory,))
    holder.start()
    assert locked.wait(LIMIT)
    memory.close()
    del memory
    closed.set()
    holder.join(LIMIT)  # the kernel marks the mutex as this thread ends
    assert is_mapped(address)


def test_a_forked_child_does_not_give_the_life_back(memory: RankMemory) -> None:
    memory.lock_life()
    pid = os.fork()
    if pid == 0:
        memory.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert memory.is_life_held


def test_from_fd_refuses_what_is_no_rank_memory() -> None:
    with pytest.raises(OSError):
        RankMemory.from_fd(-1)
    fd = os.memfd_create("other")
    try:
        with pytest.raises(ValueError, match=f"fd={fd} "):
            RankMemory.from_fd(fd)
        os.ftruncate(fd, 4096)
        with pytest.raises(ValueError, match=f"fd={fd} "):
            RankMemory.from_fd(fd)
        os.fstat(fd)  # still the caller's
    finally:
        os.close(fd)


def test_a_platform_without_the_calls_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(RuntimeError, match="memfd_create"):
        RankMemory()
