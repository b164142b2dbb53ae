"""What the function has started: its children end with it, and nothing keeps the process's end up."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import subprocess
import threading
import time
from datetime import timedelta
from typing import Any

import psutil
import pytest
from rank_harness import SETTINGS, TIMEOUT, Job, Rank

from ft_wrapper import CallWrapper, Wrapper
from ft_wrapper.abort import AbortProcesses
from ft_wrapper.restart import exit_watch

FORK = multiprocessing.get_context("fork")


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def has_children(rank: Rank) -> Any:
    """Which of all kinds of children live in the next iteration; each rank has another abort."""
    before = FORK.Process(target=time.sleep, args=(1000,))
    before.start()
    started: dict[str, Any] = {"before the call": before}
    kept: list[int] = []
    pools: list[concurrent.futures.ProcessPoolExecutor] = []
    settings: dict[str, Any] = [
        {},
        {"abort": AbortProcesses(keep=lambda process: process.pid in kept)},
        {"abort": AbortProcesses(processes=lambda: [before.pid, started["Popen"].pid])},
    ][rank.slot]

    @Wrapper(**SETTINGS, **settings)
    def train(call_wrapper: CallWrapper) -> dict[str, bool]:
        if call_wrapper.iteration == 0:
            started["daemon"] = FORK.Process(target=time.sleep, args=(1000,), daemon=True)
            started["child"] = FORK.Process(target=time.sleep, args=(1000,))
            for name in ("daemon", "child"):
                started[name].start()
            started["Popen"] = subprocess.Popen(["sleep", "1000"])
            pools.append(concurrent.futures.ProcessPoolExecutor(1, FORK))  # else it ends by itself
            started["pool's"] = pools[0].submit(os.getpid).result()
            kept.append(started["child"].pid)
            call_wrapper.store.barrier([rank.slot], "all have theirs", 3, timedelta(minutes=1))
            raise ValueError
        pids = {name: getattr(child, "pid", child) for name, child in started.items()}
        return {name: lives(pid) for name, pid in pids.items()}

    try:
        return train()
    finally:
        for child in started.values():
            pid = getattr(child, "pid", child)
            if lives(pid):
                os.kill(pid, 9)
            if hasattr(child, "wait"):
                child.wait()
            elif hasattr(child, "join"):
                child.join()


def test_the_functions_children_end_with_the_iteration(job: Job) -> None:
    job.start(3, has_children)
    job.wait_for_end(leftovers=False)
    lost = [{name for name, lived in job[slot].value.items() if not lived} for slot in range(3)]
    assert lost == [{"daemon", "child", "pool's"}, {"daemon", "pool's"}, {"before the call", "Popen"}]


def leaves_an_executor(rank: Rank, ends_before: bool, calls: int) -> Any:
    """Interrupted before an executor's shutdown, one of whose threads ends when the test says so."""
    memories: list[Any] = []

    def note(record: Any) -> bool:
        rank.say("waits", words=record.getMessage(), told=memories[-1].end_stamp > 0.0)
        return True

    exit_watch.log.addFilter(note)

    def write() -> None:
        rank.hear()
        rank.say("written")

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper, call: int) -> int:
        memories.append(call_wrapper._call.own.memory)  # of this call, which the rank's agent reads
        if call == call_wrapper.iteration == 0:
            if rank.slot == 1:
                rank.hear()
                raise ValueError
            pool = concurrent.futures.ThreadPoolExecutor(1, "writer")
            pool.submit(write)
            rank.say("in")
            rank.train()
        rank.say("in again")
        for thread in threading.enumerate():
            if ends_before and thread.name.startswith("writer"):
                thread.join(TIMEOUT)
        return call_wrapper.iteration

    return [train(call=call) for call in range(calls)]


@pytest.mark.parametrize(("ends_before", "calls"), [(True, 1), (False, 2)])
def test_a_thread_that_an_interrupted_function_left_is_waited_for(
    job: Job, ends_before: bool, calls: int
) -> None:
    job.start(2, leaves_an_executor, ends_before, calls)
    job.expect("in", 0)
    job.tell("fail", 1)
    job.expect("in again" if ends_before else "waits", 0)
    job.tell("write", 0)
    job.expect("written", 0)
    job.wait_for_end(leftovers=False)
    assert [process.code for process in job.ranks.values()] == [0, 0]
    lines = [said["words"] for said in job[0].said("waits")]
    assert len(lines) == (not ends_before)
    line = "exit waits for threads or processes of an interrupted function: thread writer_0"
    assert all(words.startswith(line) for words in lines), lines
    assert all(said["told"] for said in job[0].said("waits")), (
        "the agent hears of it, whichever call has left it"
    )
