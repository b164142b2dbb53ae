"""Every kind of fault is noticed by whom it must be, and the others go on."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from rank_harness import SETTINGS, Job, Rank, await_end

from ft_wrapper import CallWrapper, FrozenState, Wrapper
from ft_wrapper.abort import Abort
from ft_wrapper.monitor.watch import RankMonitor


def kinds_of(call_wrapper: CallWrapper) -> list[Any]:
    return [[record.rank, record.interruption.name] for record in call_wrapper.faults]


# ---- host or network lost


def loses_hosts(rank: Rank) -> Any:
    @Wrapper(**{**SETTINGS, "heartbeat_timeout": 2.0})
    def train(call_wrapper: CallWrapper) -> list[Any]:
        n = call_wrapper.iteration
        rank.say("in", n=n, faults=kinds_of(call_wrapper))
        if n == 0:
            rank.train()
        if n == 1:
            assert rank.hear() == "raise"
            raise RuntimeError("connection reset by peer")
        return n

    return train()


def test_a_silent_rank_is_gone_on_without_and_named_before_what_failed_in_its_wake(job: Job) -> None:
    """No one is there to tell of it; the second time the iteration has ended when the others miss it."""
    job.start(4, loses_hosts)
    job.expect("in", n=0)
    job.lose_hosts(3)
    job.expect("in", 0, 1, 2, n=1, faults=[[-1, "UNRESPONSIVE"]])
    job.lose_hosts(2)
    job.tell("raise", 0)
    assert job.wait(killed=(2, 3)) == [2, 2]
    (line,) = [line for slot in (0, 1) for line in job[slot].log.splitlines() if "restart 2:" in line]
    culprit = f"slot 2 (on {os.uname().nodename} pid {job[2].pid}) stopped answering: evicted"
    assert f"restart 2: {culprit} (and 1 fault in its wake); no spare stepped in" in line


class HangingAbort(Abort):
    def __call__(self, state: FrozenState) -> FrozenState:
        if state.rank == 1:
            time.sleep(1000)
        return state


def raises_and_hangs_in_the_abort(rank: Rank) -> Any:
    settings = {**SETTINGS, "soft_timeout": 1.5, "hard_timeout": 2.0}

    @Wrapper(**settings, abort=HangingAbort())
    def train(call_wrapper: CallWrapper) -> None:
        if call_wrapper.iteration == 0:
            rank.say("in")
            assert rank.hear() == "go"
            if rank.slot == 1:
                raise RuntimeError("what it was all about")

    return train()


def test_a_rank_that_is_killed_in_a_hanging_abort_has_said_what_failed(job: Job) -> None:
    job.start(2, raises_and_hangs_in_the_abort)
    job.expect("in")
    job.tell("go")
    job.wait_for_end()
    assert job[1].code == -signal.SIGTERM  # by its monitor
    assert "Traceback" in job[1].log and "RuntimeError: what it was all about" in job[1].log


# ---- all of it stopped at once: a container is paused, a machine suspended


def is_paused_as_a_whole(rank: Rank) -> Any:
    settings = {**SETTINGS, "soft_timeout": 1.5, "hard_timeout": 2.0, "heartbeat_timeout": 2.0}

    @Wrapper(**settings)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        rank.say("in", n=call_wrapper.iteration)
        until = None
        while until is None or time.monotonic() < until:  # goes on for a while, so that it is looked at
            if until is None and rank.is_told():
                until = time.monotonic() + 1.0
            time.sleep(0.02)
        return [call_wrapper.iteration, os.getpid(), kinds_of(call_wrapper)]

    return train()


def test_a_job_that_was_paused_for_longer_than_hard_timeout_goes_on_where_it_was(job: Job) -> None:
    job.start(3, is_paused_as_a_whole)
    job.expect("in", n=0)
    monitors = list(job.monitors().values())
    ranks = [job[slot].pid for slot in range(3)]
    for pid in (*monitors, *ranks):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3.5)  # the pause
    for pid in (*monitors, *ranks):  # those first that end others
        os.kill(pid, signal.SIGCONT)
    job.tell("finish")
    assert job.wait() == [[0, pid, []] for pid in ranks]


# ---- the monitor process itself


# A store that is lost is given up after barrier_timeout.
SHORT = {"soft_timeout": 2.0, "hard_timeout": 3.0, "heartbeat_timeout": 3.5, "barrier_timeout": 4.0}


def loses_its_monitor(rank: Rank) -> Any:
    @Wrapper(**{**SETTINGS, **SHORT})
    def train(call_wrapper: CallWrapper) -> list[Any]:
        if call_wrapper.iteration == 0:
            rank.say("in")
            rank.train()
        return kinds_of(call_wrapper)

    return train()


def test_a_rank_without_its_monitor_leaves(job: Job) -> None:
    job.start(3, loses_its_monitor)
    job.expect("in")
    os.kill(job.monitors()[1], signal.SIGKILL)
    job.wait_for_end()
    assert job[1].error == "InternalError"
    assert "monitor process ended" in job[1].text
    assert job[0].value == job[2].value == [[1, "MONITOR_PROCESS_EXCEPTION"]]


def does_something_without_a_store(rank: Rank) -> Any:
    @Wrapper(**{**SETTINGS, **SHORT})
    def train(call_wrapper: CallWrapper) -> None:
        rank.say("in")
        rank.await_word()
        if rank.slot == 1:
            raise ValueError("what it reads of the others is gone")
        if rank.slot == 2:
            rank.train()

    return train()


def test_the_loss_of_the_store_is_waited_for_once(job: Job) -> None:
    """By a rank that fails, one that trains and one that returns; as where rank 0's host is lost."""
    job.start(4, does_something_without_a_store)
    job.expect("in")
    monitor = job.monitors()[0]
    os.kill(monitor, signal.SIGKILL)
    job.send_signal(0, signal.SIGKILL)
    await_end(monitor)
    job.tell("go", 1, 2, 3)
    job.wait_for_end()
    for slot in (1, 2, 3):
        assert job[slot].error == "StoreError"
        # An operation that waits says first that it tries again, and in the end that the store is lost.
        before, lost, after = job[slot].log.partition(f"store at 127.0.0.1:{job.port + 1} is lost")
        assert "trying again" in before
        assert lost
        assert "trying again" not in after


def has_a_stuck_monitor(rank: Rank) -> Any:
    if rank.slot == 1:
        # As one that was halted, and looks for the store when that has ended with the job.
        RankMonitor.__init__ = lambda *_: time.sleep(1000)  # type: ignore[method-assign]
    settings = {**SETTINGS, "barrier_timeout": 600.0}

    @Wrapper(**settings)
    def train(call_wrapper: CallWrapper) -> str:
        return os.environ["RANK"]

    return train()


def test_a_monitor_that_is_stuck_in_the_end_holds_nobody_up(job: Job) -> None:
    job.start(2, has_a_stuck_monitor)
    assert job.wait() == ["0", "1"]
