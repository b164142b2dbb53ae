"""Hangs that evidence finds, in jobs with live state: the culprit is named, and no step is lost."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import subprocess
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_harness import SETTINGS, Job, Rank, with_limits

from ft_wrapper import CallWrapper, LiveState, Wrapper
from ft_wrapper.monitor import evidence
from ft_wrapper.monitor.evidence import Hold

EVERY = 40  # steps between two hangs
CULPRIT = 1


def hang(kind: str, pair: Any) -> None:
    """Never returns."""
    match kind:
        case "sleep":
            time.sleep(100_000)
        case "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        case "pipe":
            os.read(os.pipe()[0], 1)
        case "busy":
            while True:
                pass
        case "C":
            ctypes.CDLL(None).sleep(100_000)
        case "C with the GIL":
            ctypes.PyDLL(None).sleep(100_000)  # until the monitor asks where it stands
            time.sleep(100_000)
        case "other group":
            dist.barrier(group=pair)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "loop with the GIL":
            re.match(r"(a+)+$", "a" * 64 + "b")
        case "loader":
            next(iter(torch.utils.data.DataLoader(Stops(), num_workers=1)))
    raise AssertionError(f"{kind} has returned")


class Slow(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> int:
        time.sleep(2.0)
        return 0


class Stops(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> int:
        os.kill(os.getpid(), signal.SIGSTOP)
        return 0


def build() -> dict[str, Any]:
    model = torch.nn.Linear(4, 4)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def trains(rank: Rank, kinds: list[str]) -> list[Any]:
    """A rank hangs each 40 steps, in a way of its own each time."""
    arguments = {**SETTINGS, "soft_timeout": "auto", "hard_timeout": "auto", "barrier_timeout": 60.0}
    reports: list[Any] = []
    lost: list[int | None] = []
    happened: set[int] = set()

    def note(report: Any) -> None:
        reports.append([report.cause, list(report.culprit_slots)])

    @Wrapper(**with_limits(**arguments, on_restart=note, max_same_faults=None))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        dist.init_process_group("gloo")
        pair = dist.new_group([0, CULPRIT])
        live = LiveState(call_wrapper, build)
        lost.append(live.plan.lost)
        for step in live.steps(EVERY * (len(kinds) + 1)):
            live["model"](torch.ones(1, 4)).sum().backward()
            time.sleep(0.01)
            dist.all_reduce(torch.ones(1))
            number, rest = divmod(step, EVERY)
            if rank.slot == CULPRIT and not rest and 0 < number <= len(kinds) and number not in happened:
                happened.add(number)
                hang(kinds[number - 1], pair)
            live.commit()
        return [reports, lost, live.step]

    return train()


SURVIVED = ["sleep", "lock", "pipe", "C", "C with the GIL", "other group", "busy", "loader"]


def test_ranks_that_hang_are_named_and_go_on(job: Job) -> None:
    job.start(3, trains, SURVIVED)
    job.wait_for_end(leftovers=False)  # torch keeps a handler and a pipe of its loaders
    for slot in range(3):
        reports, lost, step = job[slot].value
        assert [culprits for _, culprits in reports] == [[CULPRIT]] * len(SURVIVED), reports
        assert step == EVERY * (len(SURVIVED) + 1)
        assert lost[1:] == [0] * len(SURVIVED)
    for kind, (cause, _) in zip(SURVIVED, reports, strict=True):
        assert "did not come to " in cause and "soft_timeout" not in cause
        if kind in ("sleep", "lock", "pipe", "C", "busy"):
            how = "busy" if kind == "busy" else "asleep"
            assert re.search(rf"{how} at test_hangs\.py:\d+ in hang for .*s; steps take .* ms", cause), cause


@pytest.mark.parametrize("kind", ["stopped", "loop with the GIL"])
def test_a_rank_that_runs_no_python_is_ended(job: Job, kind: str) -> None:
    job.start(3, trains, [kind])
    job.wait_for_end()
    assert job[CULPRIT].code == -signal.SIGKILL
    for slot in (0, 2):
        reports, lost, step = job[slot].value
        ((cause, culprits),) = reports
        assert culprits == [CULPRIT] and step == 2 * EVERY and lost[1:] == [0]
        assert "did not come to " in cause
        assert ("stopped by a signal" if kind == "stopped" else "holding the GIL") in cause


def takes_its_time(rank: Rank, waits: str) -> list[Any]:
    """Nothing hangs: one rank takes long for a reason, or all are stopped for a while."""
    reports: list[Any] = []
    arguments = {**SETTINGS, "soft_timeout": "auto", "hard_timeout": "auto", "barrier_timeout": 60.0}
    if waits == "compiler":  # then the timeouts are 4 and 6 s
        arguments |= {"barrier_timeout": 8.0, "heartbeat_timeout": 7.0}

    @Wrapper(**with_limits(**arguments, on_restart=reports.append))
    def train(call_wrapper: CallWrapper) -> int:
        dist.init_process_group("gloo")
        live = LiveState(call_wrapper, build)
        for step in live.steps(2 * EVERY):
            live["model"](torch.ones(1, 4)).sum().backward()
            time.sleep(0.01)
            dist.all_reduce(torch.ones(1))
            if step == EVERY and waits == "loader" and rank.slot == CULPRIT:
                next(iter(torch.utils.data.DataLoader(Slow(), num_workers=1)))
            elif step == EVERY and waits == "compiler" and rank.slot == CULPRIT:
                exec(COMPILES, {"__name__": "torch._dynamo.convert_frame"})
            elif step == EVERY and waits == "program" and rank.slot == CULPRIT:
                subprocess.run(["sleep", "2"], check=True, capture_output=True)
            elif step == EVERY and waits == "process" and rank.slot == CULPRIT:
                (process := multiprocessing.get_context("fork").Process(target=time.sleep, args=(2,))).start()
                process.join()
            elif step == EVERY and waits == "stop" and not rank.slot:
                rank.say("stop")
            live.commit()
        return live.step

    step = train()
    return [step, [report.cause for report in reports]]


COMPILES = "import time; end = time.monotonic() + 10\nwhile time.monotonic() < end: pass"


@pytest.mark.parametrize("waits", ["loader", "compiler", "program", "process"])
def test_a_rank_with_a_reason_does_not_hang(job: Job, waits: str) -> None:
    """Not even beyond ``soft_timeout``, if it compiles."""
    job.start(3, takes_its_time, waits)
    job.wait_for_end(leftovers=False)
    assert [job[slot].value for slot in range(3)] == [[2 * EVERY, []]] * 3


def test_ranks_that_are_all_stopped_are_paused(job: Job) -> None:
    """They are on one host, so all are stopped within what is allowed to one."""
    job.start(3, takes_its_time, "stop")
    job.expect("stop", 0)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for slot in range(3):
            os.kill(job[slot].pid, number)
        if number == signal.SIGSTOP:
            time.sleep(1.0)  # longer than one of them may be stopped
    job.wait_for_end()
    assert [job[slot].value for slot in range(3)] == [[2 * EVERY, []]] * 3


def trains_without_live_state(rank: Rank, kind: str) -> list[Any]:
    """A rank hangs; a wrong alarm would cost more, so it takes longer to be sure."""
    evidence.PLAIN = Hold(0.5, 0.3)
    reports: list[Any] = []
    arguments = {**SETTINGS, "soft_timeout": "auto", "hard_timeout": "auto", "barrier_timeout": 60.0}
    if kind == "busy":  # then the timeouts are 4 and 6 s
        arguments |= {"barrier_timeout": 8.0, "heartbeat_timeout": 7.0}

    @Wrapper(**with_limits(**arguments, on_restart=reports.append))
    def train(call_wrapper: CallWrapper) -> None:
        dist.init_process_group("gloo")
        for step in range(2 * EVERY):
            call_wrapper.ping(step)
            time.sleep(0.01)
            if step == EVERY and rank.slot == CULPRIT and not reports:
                hang(kind, None)
            dist.all_reduce(torch.ones(1))

    train()
    return [[report.cause, list(report.culprit_slots)] for report in reports]


@pytest.mark.parametrize(("kind", "does"), [("lock", "asleep"), ("busy", "busy")])
def test_a_hang_without_live_state_is_found_too(job: Job, kind: str, does: str) -> None:
    job.start(2, trains_without_live_state, kind)
    job.wait_for_end()
    for slot in range(2):
        ((cause, culprits),) = job[slot].value
        assert culprits == [CULPRIT]
        where = f"collective #[0-9]+ of group 0: {does} at test_hangs.py:[0-9]+ in hang for"
        assert re.search(f"did not come to {where}", cause), cause


def sleeps_in_c(rank: Rank) -> list[Any]:
    """A rank sleeps in C with the GIL held, until the signal that asks where it stands."""
    reports: list[Any] = []

    @Wrapper(
        **with_limits(**{**SETTINGS, "soft_timeout": 1.0, "hard_timeout": 2.0}, on_restart=reports.append)
    )
    def train(call_wrapper: CallWrapper) -> int:
        dist.init_process_group("gloo")
        if rank.slot == CULPRIT and not reports:
            ctypes.PyDLL(None).sleep(100_000)
        dist.all_reduce(torch.ones(1))
        return call_wrapper.iteration

    return [train(), len(reports)]


def test_a_rank_that_leaves_when_it_is_asked_where_it_stands_is_not_ended(job: Job) -> None:
    job.start(2, sleeps_in_c)
    job.wait_for_end()
    assert [job[slot].value for slot in range(2)] == [[1, 1]] * 2
