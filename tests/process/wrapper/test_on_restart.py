"""``on_restart``: called once on each rank after a restart, with what the log's line is made of."""

from __future__ import annotations

import dataclasses
import functools
import json
import signal
import time
from typing import Any

import pytest
from rank_harness import SETTINGS, Job, Rank, with_limits

from ft_wrapper import CallWrapper, RestartReport, Wrapper
from ft_wrapper.rank_assignment import ActivateAllRanks, RankAssignment, RankAssignmentCtx, ShiftRanks
from ft_wrapper.restart.on_restart import Reporter

ALL_PHASES = ["abort", "leave", "arrive", "decide", "enter"]


def says(rank: Rank, report: RestartReport) -> None:
    rank.say("report", n=report.iteration, line=str(report), fields=json.loads(report.to_json()))


def trains(rank: Rank, **settings: Any) -> Any:
    """Trains until it is told to raise or to finish."""

    @Wrapper(**with_limits(**{**SETTINGS, "on_restart": functools.partial(says, rank), **settings}))
    def train(call_wrapper: CallWrapper) -> int:
        rank.say("in", n=call_wrapper.iteration)
        while not rank.is_told():
            time.sleep(0.02)
        if rank.hear() == "raise":
            raise ValueError("told to")
        return call_wrapper.iteration

    return train()


def reports(job: Job, slot: int) -> list[dict[str, Any]]:
    return [message["fields"] for message in job[slot].said("report")]


def lines(job: Job, words: str) -> list[str]:
    return [line for process in job.ranks.values() for line in process.log.splitlines() if words in line]


# ---- what it is told


def tells_steps(rank: Rank, **settings: Any) -> Any:
    """In the first iteration slot 0 is in step 7 and slot 2 in step 8; the others tell none, as all later.

    Slot 4, a spare, has no ``on_restart``: ranks may differ in that.
    """
    on_restart = None if rank.slot == 4 else functools.partial(says, rank)

    @Wrapper(**with_limits(**{**SETTINGS, "on_restart": on_restart, **settings}))
    def train(call_wrapper: CallWrapper) -> int:
        if call_wrapper.iteration == 0 and rank.slot == 0:
            call_wrapper.step(6)
            call_wrapper.step(7)
        if call_wrapper.iteration == 0 and rank.slot == 2:
            call_wrapper.ping(step=8)
        rank.say("in", n=call_wrapper.iteration)
        while not rank.is_told():
            time.sleep(0.02)
        return call_wrapper.iteration

    return train()


def test_each_rank_is_told_once_before_it_enters_the_function(job: Job) -> None:
    job.start(5, tells_steps, active_world_size=3, rejoin=True, on_join="now", join_window=0.0)
    job.expect("in", 0, 1, 2, n=0)
    job.kill(1)
    job.expect("report", 0, 2, 3, n=1)
    job.expect("in", 0, 2, 3, n=1)  # after it
    job.start_again(1)
    active = (0, 1, 2, 3)
    job.expect("report", *active, n=2)
    job.expect("in", 0, n=2)
    job.tell("finish")
    job.wait()
    told = {slot: reports(job, slot) for slot in active}
    assert {slot: len(each) for slot, each in told.items()} == {0: 2, 1: 1, 2: 2, 3: 2}
    assert not job[4].said("report")
    phases = {slot: [report.pop("phases") for report in each] for slot, each in told.items()}
    assert phases[1][0].keys() == {"enter"}
    for slot in (0, 2, 3):
        assert all(list(each) == ALL_PHASES and min(each.values()) >= 0 for each in phases[slot])
    # The step that this rank had come to.
    steps = {slot: [report.pop("step") for report in each] for slot, each in told.items()}
    assert steps == {0: [7, None], 1: [None], 2: [8, None], 3: [None, None]}
    assert told[0] == told[2] == told[3] and told[0][1:] == told[1]
    [lost, joined] = told[0]
    cause, seconds = lost.pop("cause"), lost.pop("seconds")
    assert cause.startswith("rank 1 (slot 1 on ") and "died" in cause
    assert seconds > 0
    assert lost == {
        "iteration": 1,
        "interruption": "TERMINATED",
        "lost_slots": [1],
        "joined_slots": [],
        "promoted": [{"slot": 3, "rank": 2}],
        "recompiled_ranks": [],
        "active_world_size": 3,
        "world_size": 4,
        "excluded": "",
        "culprit_slots": [1],
        "replacements": [],
    }
    assert (joined["cause"], joined["interruption"]) == ("slot 1 joined", None)
    assert (joined["joined_slots"], joined["lost_slots"]) == ([1], [])
    for n, report in enumerate(job[0].said("report"), 1):
        [line] = lines(job, f"restart {n}: ")
        assert line.endswith(report["line"])


# ---- failing


#: What a slot does in its ``on_restart``, in some iterations.
FAILS = {
    1: (1, "raises"),
    2: (1, "hangs"),
    4: (1, "leaves"),
    6: (2, "fails when interrupted"),
    8: (2, "is deaf"),
}


def fails(rank: Rank, **settings: Any) -> Any:
    def on_restart(report: RestartReport) -> None:
        says(rank, report)
        slot, does = FAILS.get(report.iteration, (-1, ""))
        if rank.slot != slot:
            return
        if does == "raises":
            raise KeyError("no network")
        if does == "leaves":
            raise SystemExit(5)
        if does == "is deaf":
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # as a call into C
            signal.sigwait([signal.SIGUSR1])
        try:
            rank.hang()
        except BaseException:
            if does == "fails when interrupted":
                raise ValueError("in the wake") from None
            raise

    return trains(rank, on_restart=on_restart, **settings)


SOON = {"soft_timeout": 1.5, "hard_timeout": 2.5}


def test_what_fails_in_it_is_logged_or_a_fault_of_its_rank(job: Job) -> None:
    job.start(5, fails, **SOON, max_same_faults=None)
    # What it raises is logged, and the iteration goes on; a hang restarts all ranks; one that leaves in it or
    # cannot be interrupted is gone on without. So these are the iterations, and who is in them.
    for n, slots in [(0, (0, 1, 2, 3, 4)), (1, (0, 1, 2, 3, 4)), (3, (0, 1, 2, 3, 4)), (5, (0, 2, 3, 4))]:
        job.expect("in", *slots, n=n)
        job.tell("raise", 0)
    job.expect("report", 2, n=6)
    job.kill(3)  # a fault interrupts it
    job.expect("in", 0, 2, 4, n=7)
    job.tell("raise", 0)
    job.expect("in", 0, 4, n=9)
    job.tell("finish", 0, 4)
    job.wait_for_end()
    assert (job[0].value, job[4].value, job[1].code) == (9, 9, 5)
    assert job[2].code is not None and job[2].code < 0
    assert job[1].log.count("on_restart failed on rank 1; the iteration goes on") == 1
    assert "KeyError: 'no network'" in job[1].log
    for slot in (0, 2, 3, 4):
        assert "on_restart failed" not in job[slot].log
    assert not [said for said in job[2].said("in") if said["n"] in (6, 8)], "that iteration was over"
    told = {report["iteration"]: report for report in reports(job, 0)}
    raised, hung = told[1], told[3]
    assert (raised["interruption"], raised["lost_slots"], raised["promoted"]) == ("EXCEPTION", [], [])
    assert "raised ValueError: told to" in raised["cause"]
    assert hung["interruption"] == "SOFT_TIMEOUT"
    assert hung["cause"].startswith("rank 1 (slot 1 ") and hung["cause"].endswith(" in hang")
    # The only one, if slot 1 left before the others were in their own.
    assert reports(job, 4)[4]["lost_slots"] == [1] and told[9]["lost_slots"] == [2]


# ---- waiting for the others


@dataclasses.dataclass
class ComesLate(RankAssignment):
    """Slot 1 comes late into the first restart."""

    rank: Rank

    def __call__(self, context: RankAssignmentCtx) -> RankAssignmentCtx:
        if self.rank.slot == 1 and context.state.iteration == 1:
            self.rank.say("late")
            while not self.rank.is_told():
                time.sleep(0.02)
        return ActivateAllRanks()(ShiftRanks()(context))


def with_a_late_one(rank: Rank, **settings: Any) -> Any:
    return trains(rank, rank_assignment=ComesLate(rank), **settings)


def test_a_fault_frees_those_who_wait_for_the_others(job: Job) -> None:
    """They look by themselves much later."""
    never = dict(
        zip(("monitor_thread_interval", *SOON, "barrier_timeout"), (1e3, 2e3, 3e3, 4e3), strict=True)
    )
    job.start(3, with_a_late_one, **never)
    job.expect("in", n=0)
    job.tell("raise", 0)
    job.expect("late", 1)
    job.kill(1)
    job.expect("in", 0, 2, n=2)
    job.tell("finish", 0, 2)
    assert job.wait(killed=(1,)) == [2, 2]
    assert [report["iteration"] for report in reports(job, 0)] == [2]


def test_one_that_takes_too_long_is_named_and_the_others_enter(job: Job) -> None:
    # They look so seldom that they would count as hung, if it were not known that they wait.
    intervals = {"monitor_thread_interval": 1.9, "progress_watchdog_interval": 0.5}
    timeouts = {"soft_timeout": 2.0, "hard_timeout": 3.5, "heartbeat_timeout": 5.0, "barrier_timeout": 6.0}
    job.start(3, with_a_late_one, **intervals, **timeouts)
    job.expect("in", n=0)
    job.tell("raise", 0)
    job.expect("late", 1)
    job.expect("in", 0, 2, n=1)
    job.tell("finish")
    assert job.wait() == [1, 1, 1]
    words = "on_restart is not called: active ranks [1] of 3 did not enter iteration 1 within "
    assert len(lines(job, words)) == 2 and not reports(job, 0)


def without_the_last_one(rank: Rank) -> Any:
    Reporter.entered = lambda *_: None  # type: ignore[method-assign]
    return trains(rank)


def test_a_lost_count_is_noticed(job: Job) -> None:
    job.start(2, without_the_last_one)
    job.expect("in", n=0)
    job.tell("raise", 0)
    job.expect("report", n=1)
    job.tell("finish")
    assert job.wait() == [1, 1]
    assert "raised ValueError" in reports(job, 1)[0]["cause"]


# ---- bad input


@pytest.mark.parametrize("wrong", [3, "post", lambda: None, lambda report, more: None])
def test_a_wrong_one_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"on_restart=.* must be None or a function of one argument"):
        Wrapper(on_restart=wrong)
