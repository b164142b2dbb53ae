"""A dying process steps back behind all others; no one else is ever touched."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ft_wrapper.monitor.watch import may_step_forward, stepping_back

PRIORITY = os.sched_param(0)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process with two threads that does nothing; `dead` makes it die."""
    script = "import sys, threading; threading.Thread(target=input).start(); print(); input()"
    process = subprocess.Popen([sys.executable, "-uc", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def dead(process: subprocess.Popen[bytes]) -> int:
    """Kills it and leaves it unreaped: a process that is exiting, for as long as the test likes."""
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process.pid


def policies(pid: int) -> set[int]:
    found = set()
    for tid in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # a thread that has been joined ends a moment later
            found.add(os.sched_getscheduler(int(tid)))
    return found


@pytest.fixture
def allowed() -> None:
    if not may_step_forward():
        pytest.skip("needs CAP_SYS_NICE, or RLIMIT_NICE at 20")


@pytest.mark.usefixtures("allowed")
def test_a_dying_process_steps_back_for_the_time_of_the_block(process: subprocess.Popen[bytes]) -> None:
    os.setpriority(os.PRIO_PROCESS, process.pid, 5)
    pid = dead(process)
    with stepping_back(pid, allowed=True):
        assert policies(pid) == {os.SCHED_IDLE}
    assert policies(pid) == {os.SCHED_OTHER}
    assert os.getpriority(os.PRIO_PROCESS, pid) == 5


def test_a_living_process_is_left_alone(process: subprocess.Popen[bytes]) -> None:
    assert len(os.listdir(f"/proc/{process.pid}/task")) == 2
    with stepping_back(process.pid, allowed=True):
        assert policies(process.pid) == {os.SCHED_OTHER}


def test_a_thread_that_has_another_policy_keeps_it(process: subprocess.Popen[bytes]) -> None:
    os.sched_setscheduler(process.pid, os.SCHED_BATCH, PRIORITY)
    pid = dead(process)
    with stepping_back(pid, allowed=True):
        assert policies(pid) == {os.SCHED_BATCH}
    assert policies(pid) == {os.SCHED_BATCH}


def test_nothing_is_done_that_cannot_be_undone(process: subprocess.Popen[bytes]) -> None:
    pid = dead(process)
    with stepping_back(pid, allowed=False):
        assert policies(pid) == {os.SCHED_OTHER}


def test_a_process_that_is_gone_is_no_error(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(60)
    with stepping_back(process.pid, allowed=True):
        pass


def test_one_that_goes_meanwhile_is_no_error(process: subprocess.Popen[bytes]) -> None:
    pid = dead(process)
    with stepping_back(pid, allowed=may_step_forward()):
        process.wait(60)


def test_trying_it_out_changes_only_a_thread_of_its_own() -> None:
    before = policies(os.getpid())
    may_step_forward()
    assert policies(os.getpid()) == before


def test_who_may_not_go_back_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tid: int, policy: int, priority: os.sched_param) -> None:
        if policy == os.SCHED_OTHER:
            raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert may_step_forward() is False
