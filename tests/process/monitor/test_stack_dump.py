"""Where a rank stands, asked from another process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ft_wrapper.monitor.frames import describe_main_thread, dumping_stacks, is_stopped
from ft_wrapper.monitor.shared_memory import RankMemory

sleep_with_gil = ctypes.PyDLL(None).sleep


@contextmanager
def rank(does: Callable[[], object], *, answers: bool = True) -> Iterator[tuple[RankMemory, int, int]]:
    """A child that does something for long: its memory, its process and the pidfd."""
    with contextlib.closing(RankMemory()) as memory:
        ready, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                threading.Thread(target=threading.Event().wait, daemon=True).start()  # another one, elsewhere
                with dumping_stacks(memory) if answers else contextlib.nullcontext():
                    os.write(told, b"!")
                    does()
            finally:
                os._exit(0)
        pidfd = os.pidfd_open(pid)
        try:
            assert os.read(ready, 1) == b"!"
            yield memory, pid, pidfd
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            for fd in (ready, told, pidfd):
                os.close(fd)


def hold_the_gil() -> None:
    sleep_with_gil(600)


def wait() -> None:
    time.sleep(600)


def place_where(asked: tuple[RankMemory, int, int], says: str) -> str:
    """The answer, as soon as the child has come so far."""
    place = ""
    while says not in place:
        place = describe_main_thread(*asked) or ""
    return place


@pytest.mark.timeout(60)
@pytest.mark.parametrize("does", [wait, hold_the_gil])
def test_says_where_the_main_thread_stands(does: Callable[[], object]) -> None:
    with rank(does) as asked:
        # The C library's own sleep ends early by the signal, and time.sleep does not.
        place = place_where(asked, "test_stack_dump.py:") if does is wait else describe_main_thread(*asked)
        assert place is not None and place.startswith("at test_stack_dump.py:")


def be_interrupted() -> None:
    """Another thread sends signals to this one, all the time."""
    signal.signal(signal.SIGUSR1, lambda *_: None)
    main = threading.get_ident()

    def send() -> None:
        while True:
            signal.pthread_kill(main, signal.SIGUSR1)

    threading.Thread(target=send, daemon=True).start()
    while True:
        wait()


@pytest.mark.timeout(60)
def test_it_is_the_main_thread_even_if_that_is_being_interrupted() -> None:
    with rank(be_interrupted) as asked:
        places = [describe_main_thread(*asked) or "" for _ in range(30)]
    assert any(places), "none was known"
    assert not [place for place in places if " in send" in place]


@pytest.mark.timeout(60)
def test_one_that_was_never_told_how_to_answer_is_not_asked() -> None:
    with rank(wait, answers=False) as asked:
        assert describe_main_thread(*asked) is None
        assert os.waitpid(asked[1], os.WNOHANG) == (0, 0), "a signal has ended it"


@pytest.mark.timeout(60)
def test_one_that_was_stopped_says_nothing_and_is_known_as_that() -> None:
    with rank(wait) as asked:
        assert not is_stopped(asked[1])
        os.kill(asked[1], signal.SIGSTOP)
        os.waitpid(asked[1], os.WUNTRACED)
        assert is_stopped(asked[1])
        assert describe_main_thread(*asked) is None


def test_the_end_gives_signal_and_descriptors_back() -> None:
    with contextlib.closing(RankMemory()) as memory:
        before = set(os.listdir("/proc/self/fd"))
        with dumping_stacks(memory):
            assert memory.dump_signal
        assert not memory.dump_signal
        assert set(os.listdir("/proc/self/fd")) == before


def test_one_that_has_ended_is_none() -> None:
    with rank(lambda: None) as (memory, pid, pidfd):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert describe_main_thread(memory, pid, pidfd) is None
        assert not is_stopped(pid)
