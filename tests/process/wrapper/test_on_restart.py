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
        rank.await_word()
        if call_wrapper.iteration == 0 and rank.hear() == "raise":
            raise ValueError("told to")
        return call_wrapper.iteration

    return train()


def reports(job: Job, slot: int) -> list[dict[str, Any]]:
    return [message["fields"] for message in job[slot].said("report")]


def lines(job: Job, words: str) -> list[str]:
    return [line for process in job.ranks.values() for line in process.log.splitlines() if words in line]


# ---- what it is told


def test_each_rank_is_told_once_before_it_enters_the_function(job: Job) -> None:
    job.start(5, trains, active_world_size=3)
    job.expect("in", 0, 1, 2, n=0)
    job.kill(1)
    job.expect("report", 0, 2, 3, 4, n=1)
    job.expect("in", 0, 2, 3, n=1)  # after it
    job.tell("finish", 0, 2, 3)
    assert job.wait(killed=(1,)) == [1, 1, 1, None]
    told = [reports(job, slot) for slot in (0, 2, 3, 4)]
    assert [len(each) for each in told] == [1, 1, 1, 1]
    phases = [each[0].pop("phases") for each in told]
    assert all(list(each) == ALL_PHASES and min(each.values()) >= 0 for each in phases)
    assert told[0] == told[1] == told[2] == told[3]
    [report] = told[0]
    cause, seconds = report.pop("cause"), report.pop("seconds")
    assert cause.startswith("rank 1 (slot 1 on ") and "died" in cause
    assert seconds > 0
    assert report == {
        "iteration": 1,
        "interruption": "TERMINATED",
        "lost_slots": [1],
        "joined_slots": [],
        "promoted": [{"slot": 3, "rank": 2}],
        "recompiled_ranks": [],
        "active_world_size": 3,
        "world_size": 4,
        "step": None,
        "excluded": "",
        "culprit_slots": [1],
        "replacements": [],
    }
    [line] = lines(job, "restart 1: ")
    assert line.endswith(job[0].said("report")[0]["line"])


def test_a_process_that_joins_is_told_as_well(job: Job) -> None:
    job.start(3, trains, rejoin=True, on_join="now", join_window=0.0)
    job.expect("in", n=0)
    job.kill(1)
    job.expect("in", 0, 2, n=1)
    job.start_again(1)
    job.expect("report", 0, 1, 2, n=2)
    job.expect("in", 0, 1, 2, n=2)
    job.tell("finish")
    assert job.wait() == [2, 2, 2]
    old, new = reports(job, 0)[-1], reports(job, 1)[-1]
    assert (old["cause"], old["interruption"]) == ("slot 1 joined", None)
    assert (old["joined_slots"], old["lost_slots"]) == ([1], [])
    assert "restart 2: slot 1 joined; 3 active + 0 spare ranks" in job[0].said("report")[-1]["line"]
    assert (list(old.pop("phases")), list(new.pop("phases"))) == (ALL_PHASES, ["enter"])
    assert old == new


def only_on_slot(rank: Rank, slot: int, **settings: Any) -> Any:
    return trains(rank, **settings, **({} if rank.slot == slot else {"on_restart": None}))


def test_ranks_may_differ_in_whether_they_have_one(job: Job) -> None:
    job.start(2, only_on_slot, 1)
    job.expect("in", n=0)
    job.tell("raise", 0)
    job.expect("report", 1, n=1)
    job.expect("in", n=1)
    job.tell("finish")
    assert job.wait() == [1, 1]


def tells_steps(rank: Rank, **settings: Any) -> Any:
    """In the first iteration slot 0 is in step 7 and slot 1 in step 8; the others tell none, as all later."""

    @Wrapper(**with_limits(**{**SETTINGS, "on_restart": functools.partial(says, rank), **settings}))
    def train(call_wrapper: CallWrapper) -> int:
        if call_wrapper.iteration == 0 and rank.slot == 0:
            call_wrapper.step(6)
            call_wrapper.step(7)
        if call_wrapper.iteration == 0 and rank.slot == 1:
            call_wrapper.ping(step=8)
        rank.say("in", n=call_wrapper.iteration)
        while not rank.is_told():
            time.sleep(0.02)
        return call_wrapper.iteration

    return train()


def test_it_says_what_step_this_rank_had_come_to(job: Job) -> None:
    job.start(4, tells_steps, rejoin=True, on_join="now", join_window=0.0)
    job.expect("in", n=0)
    job.kill(2)
    job.expect("in", 0, 1, 3, n=1)
    job.start_again(2)
    job.expect("in", 0, 1, 2, 3, n=2)
    job.tell("finish")
    assert job.wait() == [2, 2, 2, 2]
    steps = {slot: [report["step"] for report in reports(job, slot)] for slot in range(4)}
    assert steps == {0: [7, None], 1: [8, None], 2: [None], 3: [None, None]}


# ---- failing


def fails(rank: Rank, does: str, **settings: Any) -> Any:
    """In the first restart slot 1 fails in its ``on_restart``."""

    def on_restart(report: RestartReport) -> None:
        says(rank, report)
        if rank.slot != 1 or report.iteration > 1:
            return
        if does == "raises":
            raise KeyError("no network")
        if does == "leaves":
            raise SystemExit(5)
        if does == "is deaf":
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # as a call into C
            signal.sigwait([signal.SIGUSR1])
        if does == "fails when interrupted":
            try:
                rank.hang()
            except BaseException:
                raise ValueError("in the wake") from None
        rank.hang()

    return trains(rank, on_restart=on_restart, **settings)


def test_what_it_raises_is_logged_and_the_iteration_goes_on(job: Job) -> None:
    job.start(2, fails, "raises")
    job.expect("in", n=0)
    job.tell("raise", 0)
    job.expect("in", n=1)
    job.tell("finish")
    assert job.wait() == [1, 1]
    assert job[1].log.count("on_restart failed on rank 1, and the iteration goes on") == 1
    assert "KeyError: 'no network'" in job[1].log
    assert "on_restart failed" not in job[0].log
    for slot in (0, 1):
        [report] = reports(job, slot)
        assert (report["interruption"], report["lost_slots"], report["promoted"]) == ("EXCEPTION", [], [])
        assert "raised ValueError: told to" in report["cause"]


def test_a_rank_that_leaves_in_it_is_gone_on_without(job: Job) -> None:
    job.start(3, fails, "leaves")
    job.expect("in", n=0)
    job.tell("raise", 0)
    job.expect("in", 0, 2, n=2)
    job.tell("finish", 0, 2)
    job.wait_for_end()
    assert (job[0].value, job[2].value, job[1].code) == (2, 2, 5)
    # The only one, if slot 1 left before slot 2 was in its own.
    assert reports(job, 2)[-1]["lost_slots"] == [1]


SOON = {"soft_timeout": 1.5, "hard_timeout": 2.5}


def test_a_hang_in_it_restarts_all_ranks(job: Job) -> None:
    job.start(2, fails, "hangs", **SOON)
    job.expect("in", n=0)
    job.tell("raise", 0)
    job.expect("in", n=2)
    job.tell("finish")
    assert job.wait() == [2, 2]
    [_, report] = reports(job, 0)
    assert report["interruption"] == "SOFT_TIMEOUT"
    assert report["cause"].startswith("rank 1 (slot 1 ") and report["cause"].endswith(" in hang")


def test_a_rank_that_cannot_be_interrupted_in_it_is_ended(job: Job) -> None:
    job.start(2, fails, "is deaf", **SOON)
    job.expect("in", n=0)
    job.tell("raise", 0)
    job.expect("in", 0, n=2)
    job.tell("finish", 0)
    assert job.wait(killed=(1,)) == [2]


def test_a_fault_interrupts_it(job: Job) -> None:
    job.start(3, fails, "fails when interrupted")
    job.expect("in", n=0)
    job.tell("raise", 0)
    job.expect("report", 1, n=1)
    job.kill(2)
    job.expect("in", 0, 1, n=2)
    job.tell("finish", 0, 1)
    assert job.wait(killed=(2,)) == [2, 2]
    assert not job[1].said("in")[1:-1], "it must not enter the function of the iteration that is over"
    assert "on_restart failed" not in job[1].log


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
    words = "on_restart is not called: active ranks [1] of 3 did not come into iteration 1 within "
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
