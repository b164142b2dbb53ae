"""Wrapped calls after one that failed, in the same process: none returns without having run the function."""

from __future__ import annotations

import random
from typing import Any

import pytest
from rank_harness import SETTINGS, Job, Rank, with_limits

from ft_wrapper import CallWrapper, Wrapper
from ft_wrapper.exception import JobAbort, RankShouldRestart, RestartAbort

KINDS: dict[str, type[BaseException]] = {
    "raises": ValueError,
    "restarts": RankShouldRestart,
    "ends the job": JobAbort,
    "gives up": RestartAbort,
    "is stopped": KeyboardInterrupt,
}

# The others may have ended when one comes back: it hears of that soon.
SOON: dict[str, Any] = {
    "rejoin": True,
    "max_same_faults": 1,
    "soft_timeout": 2.0,
    "hard_timeout": 2.8,
    "heartbeat_timeout": 2.5,
    "barrier_timeout": 4.0,
}


def calls(rank: Rank, sequence: list[list[Any]], **settings: Any) -> list[list[Any]]:
    """Makes one call after the other; says of each whether the function ran, and how it ended."""
    ran: list[int] = []

    @Wrapper(**with_limits(**{**SETTINGS, **SOON, **settings}))
    def train(call_wrapper: CallWrapper, number: int, kind: str, slots: list[int]) -> str:
        ran.append(number)
        if rank.slot in slots:
            raise KINDS[kind](kind)
        return "trained"

    seen: list[list[Any]] = []
    for number, (kind, slots) in enumerate(sequence):
        try:
            end = train(number=number, kind=kind, slots=slots)
        except BaseException as error:
            end = type(error).__name__
        seen.append([number in ran, end])
    return seen


def draw(seed: int) -> tuple[int, list[list[Any]]]:
    """So many ranks, and of each call how it fails, on which of them; on none, mostly."""
    choose = random.Random(seed)
    ranks = choose.randint(1, 3)
    sequence: list[list[Any]] = [["ok", []]]
    for _ in range(3):
        failing = sorted(choose.sample(range(ranks), choose.randint(1, ranks)))
        sequence.append([choose.choice(list(KINDS)), choose.choice([[], failing])])
    return ranks, [*sequence, ["ok", []]]


@pytest.mark.parametrize("seed", [0, 1])
def test_no_call_returns_without_having_run_the_function(job: Job, seed: int) -> None:
    ranks, sequence = draw(seed)
    with job.announced_store() as (_, address):
        job.start(ranks, calls, sequence, env={"FT_WRAPPER_STORE": address})
        for seen in job.wait():
            assert seen[0] == [True, "trained"]
            assert all(has_run for has_run, end in seen if end in (None, "trained")), (sequence, seen)


@pytest.mark.parametrize("kind", ["raises", "gives up"])
def test_a_call_after_one_that_ended_the_job_says_so(job: Job, kind: str) -> None:
    sequence = [["ok", []], [kind, [0]], ["ok", []]]
    with job.announced_store() as (_, address):
        job.start(1, calls, sequence, env={"FT_WRAPPER_STORE": address})
        (seen,) = job.wait()
    # What ends this rank alone does not end the job: it comes back to the call.
    assert seen[2] == ([False, "JobEnded"] if kind == "raises" else [True, "trained"]), seen


def comes_back_late(rank: Rank) -> Any:
    @Wrapper(**with_limits(**{**SETTINGS, **SOON}))
    def train(call_wrapper: CallWrapper, number: int) -> int:
        if (rank.slot, number) == (1, 0):
            raise RestartAbort("it gives up")
        return number

    if rank.slot == 0:
        return train(number=0)
    try:
        train(number=0)
    except RestartAbort:
        rank.hear()
    return train(number=1)


def test_a_rank_that_comes_back_when_the_others_have_completed_the_call_is_refused(job: Job) -> None:
    """Before, it returned None at once: it took the call for its next one."""
    with job.announced_store() as (_, address):
        job.start(2, comes_back_late, env={"FT_WRAPPER_STORE": address})
        job.wait_for_end(0)
        job.tell("go on", 1)
        job.wait_for_end(1)
    assert job[0].value == 0
    assert job[1].error == "RankDiscarded"
    assert "slot 1 left call 0 with an error, and others have completed it since" in job[1].text
