"""A function that fails again and again in the same way ends the job with its error: `max_same_faults`."""

from __future__ import annotations

import json
import re
import time
from typing import Any, NoReturn

import pytest
from rank_harness import SETTINGS, Job, Rank, with_limits

from ft_wrapper import CallWrapper, Limits, RestartReport, Wrapper
from ft_wrapper.exception import JobAbort, RestartAbort
from ft_wrapper.restart import loop


def fail(number: int) -> NoReturn:
    raise ValueError(f"at {number:#x}")  # a message that differs each time


PROGRESS = ["ping", "step, step", "ping in a block", "step, ping", "elsewhere"]


def make_progress(call_wrapper: CallWrapper, how: str, n: int) -> None:
    if how.startswith("step"):
        call_wrapper.ping()  # at the end of loading
        call_wrapper.ping(step=n)
    if how == "step, step":
        call_wrapper.ping(step=n + 1)
    if how == "step, ping":
        call_wrapper.step(n)
    if how in ("ping", "step, ping"):
        call_wrapper.ping()
    if how == "ping in a block":
        with call_wrapper.disable_hang_protection():
            call_wrapper.ping()
    if how == "elsewhere":
        raise ValueError("the same type at another line")


def fails_at_once(
    rank: Rank, slots: list[int], progress: list[str] | None = None, rounds: int = 100, **settings: Any
) -> Any:
    """One of some slots after the other fails, always, after some progress or none; the others train."""
    paused = []
    pause = loop.pause_before_entering
    loop.pause_before_entering = lambda count: paused.append(pause(count)) or 0.0
    if progress == ["minutes"]:
        loop.PROGRESS_AFTER = 0.0

    @Wrapper(**with_limits(**{**SETTINGS, **settings}))
    def train(call_wrapper: CallWrapper) -> int:
        n = call_wrapper.iteration
        rank.say("in", n=n)
        if n == rounds:
            return n
        if slots[n % len(slots)] == rank.slot:
            make_progress(call_wrapper, progress[n % len(progress)] if progress else "", n)
            fail(n)
        return rank.train()

    try:
        return train()
    except RestartAbort as error:
        assert isinstance(error, SystemExit) and error.code == 1
        raise
    finally:
        rank.say("paused", seconds=paused)


def check_end(job: Job, culprit: int, times: int) -> None:
    job.wait_for_end()
    for slot, process in job.ranks.items():
        # One may hear of another's fault before it has entered. The culprit has been in the last iteration.
        entered = [said["n"] for said in process.said("in")]
        assert len(entered) <= times and (slot != culprit or entered[-1] == times - 1)
        assert process.code == 1
        if slot == culprit:
            assert process.error == "ValueError"
            assert process.text == f"at {times - 1:#x}"
        else:
            assert process.error == "JobEnded"
            assert f"ValueError at test_same_faults.py:{LINE} in fail on slot {culprit}" in process.text
            assert f"{times} times in a row" in process.text and "max_same_faults=" in process.text
            assert "Traceback" not in process.log.partition("JobEnded")[0].partition("leaves the job")[2]
    tracebacks = job[culprit].log.count("\nTraceback (most recent")
    assert tracebacks <= 4, job[culprit].log  # the first fault, and the end, where the harness prints it, too


LINE = fail.__code__.co_firstlineno + 1


def test_each_time_another_rank_fails(job: Job) -> None:
    """The faults of all ranks count together: in a large job each time another one may be the first."""
    job.start(3, fails_at_once, [1, 2, 0])
    check_end(job, 2, 5)


def test_a_spare_ends_too_and_so_does_a_job_that_would_wait_for_ranks(job: Job) -> None:
    job.start(3, fails_at_once, [1], active_world_size=2, min_world_size=3, max_same_faults=4)
    check_end(job, 1, 4)
    for process in job.ranks.values():  # all of them back off
        assert process.said("paused")[0]["seconds"] == [0.0, 0.5, 1.0]
    end = job[1].log.rpartition("leaves the job")[2]
    assert f"line {LINE}, in fail" in end, end


def test_a_rank_alone(job: Job) -> None:
    job.start(1, fails_at_once, [0], max_same_faults=1)
    check_end(job, 0, 1)


def test_the_begin_of_the_first_step_is_no_progress(job: Job) -> None:
    job.start(2, fails_at_once, [1], ["step"], max_same_faults=3)
    check_end(job, 1, 3)


@pytest.mark.parametrize("progress", [PROGRESS, ["minutes"]], ids=["told", "minutes"])
def test_what_makes_progress_or_fails_elsewhere_goes_on(job: Job, progress: list[str]) -> None:
    rounds = 2 * len(progress) + 1
    job.start(2, fails_at_once, [1], progress, rounds, max_same_faults=2)
    assert job.wait() == [rounds, rounds]


def gives_up(rank: Rank, slots: list[int], **settings: Any) -> Any:
    @Wrapper(**with_limits(**{**SETTINGS, **settings}))
    def train(call_wrapper: CallWrapper) -> str:
        rank.say("in", n=call_wrapper.iteration)
        if rank.slot in slots:
            raise JobAbort(f"no such\ncolumn on {rank.slot}")
        return rank.train()

    return train()


def test_what_ends_the_job_for_good_ends_it_on_all_ranks_at_once(job: Job) -> None:
    job.start(4, gives_up, [1], active_world_size=3, max_same_faults=None)
    job.wait_for_end()
    errors = [process.error for process in job.ranks.values()]
    assert errors == ["JobEnded", "JobAbort", "JobEnded", "JobEnded"]
    assert all(len(process.said("in")) <= 1 for process in job.ranks.values())
    assert (
        "another rank's error ended the job: ft_wrapper.exception.JobAbort: no such (slot 1)" in job[0].text
    )
    assert "in gives_up" not in job[0].log.partition("JobEnded")[0].partition("leaves the job")[2]


def fails_in_step(rank: Rank, fails: list[list[int]]) -> Any:
    """In each iteration one slot fails in one step, after progress."""

    def on_restart(report: RestartReport) -> None:
        rank.say("report", fields=json.loads(report.to_json()))

    @Wrapper(**with_limits(**{**SETTINGS, "on_restart": on_restart, "max_same_faults": 2}))
    def train(call_wrapper: CallWrapper) -> int:
        n = call_wrapper.iteration
        slot, step = fails[n] if n < len(fails) else (-1, 0)
        call_wrapper.ping(step=step)
        call_wrapper.ping()
        rank.say("in", n=n)
        if slot == rank.slot:
            rank.hear()
            raise ValueError(f"the batch of step {step}")
        return rank.train() if n < len(fails) else n

    return train()


def test_a_step_that_fails_on_each_try_does_not_end_the_job_if_there_was_progress_before_it(job: Job) -> None:
    fails = [[2, 1207], [2, 1207], [0, 1207], [0, 1208]]
    job.start(3, fails_in_step, fails)
    for n, (slot, _) in enumerate(fails):
        job.expect("in", n=n)
        job.tell("fail", slot)
    assert job.wait() == [4, 4, 4]
    for slot in range(3):
        told = [message["fields"] for message in job[slot].said("report")]
        assert [report["step"] for report in told] == [1207, 1207, 1207, 1208]
    assert not any("times in a row" in process.log for process in job.ranks.values())


def test_the_pause_grows() -> None:
    pauses = [loop.pause_before_entering(count) for count in (1, 2, 3, 4, 5, 100)]
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 10.0]


# ---- what is no exception


class Stop(BaseException):
    """A user's own."""


GROUP = BaseExceptionGroup("two", [Stop(), ValueError()])


def leaves_at_once(rank: Rank, exits: bool) -> Any:
    """Whoever is rank 1 leaves the job."""

    @Wrapper(**SETTINGS, limits=Limits(max_same_faults=2))
    def train(call_wrapper: CallWrapper) -> int:
        if call_wrapper.state.rank == 1:
            raise SystemExit(0) if exits else GROUP
        if (call_wrapper.state.world_size or 0) > 1:  # the other one leaves
            rank.train()
        return 1

    return train()


def test_what_ends_one_rank_after_the_other_ends_the_job(job: Job) -> None:
    job.start(4, leaves_at_once, False)
    job.wait_for_end()
    errors = [process.error for process in job.ranks.values()]
    assert errors == ["JobEnded", "BaseExceptionGroup", "BaseExceptionGroup", "JobEnded"]
    assert "in train on slot 2, 2 times in a row" in job[0].text
    assert "the job ends: " in job[2].log and "the job ends: " not in job[1].log


def test_who_leaves_with_exit_code_0_ends_no_job(job: Job) -> None:
    job.start(4, leaves_at_once, True)
    job.wait_for_end()
    assert job[0].value == 1
    assert [job[slot].error for slot in (1, 2, 3)] == ["SystemExit"] * 3


# ---- hangs


def hangs(rank: Rank) -> Any:
    """Rank 0 returns, and slot 1 hangs after progress: it would come no further."""

    @Wrapper(**with_limits(**{**SETTINGS, "soft_timeout": 1.5, "hard_timeout": 20.0, "max_same_faults": 2}))
    def train(call_wrapper: CallWrapper) -> None:
        if rank.slot == 1:
            call_wrapper.ping(step=1)
            call_wrapper.ping(step=2)
            time.sleep(1000)  # and not `Rank.hang`, which would be the place that is named

    train()


def test_a_hang_that_comes_again_ends_the_job(job: Job) -> None:
    job.start(2, hangs)
    job.wait_for_end()
    assert re.search(r"no progress at test_same_faults\.py:\d+ in train", job[0].text)
    assert "on slot 1, 2 times in a row" in job[0].text
    assert "when ranks [0] had returned" in job[0].text
    assert job[0].error == "JobEnded" and job[1].error == "RestartAbort"
