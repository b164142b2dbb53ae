"""What the preflight finds, in the log of a job; and what is set for torch's watchdog meanwhile."""

from __future__ import annotations

import os
from typing import Any

import pytest
from rank_harness import SETTINGS, Job, Rank

from ft_wrapper import CallWrapper, Wrapper

LOGGED = "GLOO_SOCKET_IFNAME=no-such0: there is no interface no-such0 here"
WRONG: dict[str, str | None] = {"GLOO_SOCKET_IFNAME": "no-such0"}
VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
UNSET: dict[str, str | None] = {VARIABLE: None, f"{VARIABLE[6:]}": None}


def times_logged(job: Job, slot: int) -> int:
    return job[slot].log.count(LOGGED)


def fails_and_calls_again(rank: Rank) -> int:
    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> int:
        if call_wrapper.iteration < 2:
            raise ValueError("again")
        return call_wrapper.iteration

    train()
    return int(train())


def test_rank_0_logs_what_was_found_once(job: Job) -> None:
    job.start(2, fails_and_calls_again, env=WRONG)
    job.wait()
    assert "restart 2" in job[0].log + job[1].log
    assert [times_logged(job, slot) for slot in range(2)] == [1, 0]


def dies_and_comes_back(rank: Rank) -> None:
    @Wrapper(**SETTINGS, use_global_iteration=True, min_world_size=2)
    def train(call_wrapper: CallWrapper) -> None:
        rank.say("in", n=call_wrapper.iteration)
        if call_wrapper.iteration == 0:
            rank.hang()

    train()


def test_a_process_that_comes_back_logs_nothing(job: Job) -> None:
    with job.announced_store() as (_, address):
        job.start(2, dies_and_comes_back, env={**WRONG, "FT_WRAPPER_STORE": address})
        job.expect("in", n=0)
        job.kill(0)
        job.start_again(0)
        job.wait()
    (dead,) = job.past
    assert (dead.log.count(LOGGED), times_logged(job, 0), times_logged(job, 1)) == (1, 0, 0)


def returns_the_variable(rank: Rank) -> list[str | None]:
    train = Wrapper(**SETTINGS)(lambda: os.environ.get(VARIABLE))
    return [train(), os.environ.get(VARIABLE)]


@pytest.mark.parametrize(
    ("env", "found"),
    [
        (UNSET, ["0", None]),
        ({**UNSET, VARIABLE: "1"}, ["1", "1"]),
        ({**UNSET, VARIABLE[6:]: "2"}, [None, None]),
    ],
    ids=["unset", "the user's", "by its old name"],
)
def test_the_watchdog_leaves_errors_to_the_restart(job: Job, env: Any, found: list[str | None]) -> None:
    job.start(1, returns_the_variable, env=env)
    assert job.wait() == [found]
    assert not any(times_logged(job, slot) for slot in job.ranks)
