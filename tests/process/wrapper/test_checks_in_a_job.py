"""What the preflight finds, in the log of a job; and what is set for torch's watchdog meanwhile."""

from __future__ import annotations

import os
from typing import Any

from rank_harness import SETTINGS, Job, Rank

from ft_wrapper import CallWrapper, Wrapper

LOGGED = "GLOO_SOCKET_IFNAME=no-such0: there is no interface no-such0 here"
WRONG: dict[str, str | None] = {"GLOO_SOCKET_IFNAME": "no-such0"}
VARIABLES = [
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
]
OLD = "NCCL_ASYNC_ERROR_HANDLING"
UNSET: dict[str, str | None] = dict.fromkeys([*VARIABLES, OLD])


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
    @Wrapper(**SETTINGS, rejoin=True, min_world_size=2)
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


SET: list[tuple[dict[str, str], list[str | None], list[str | None]]] = [
    ({}, ["0"] * 4, [None] * 4),
    (dict.fromkeys(VARIABLES, "1"), ["1"] * 4, ["1"] * 4),
    ({VARIABLES[2]: "1"}, ["0", "0", "1", "0"], [None, None, "1", None]),
    ({OLD: "2"}, [None, "0", "0", "0"], [None] * 4),
]


def returns_the_variables(rank: Rank) -> list[Any]:
    """What there is of them in the function and after it, for what the user has set."""

    def train() -> list[str | None]:
        return [os.environ.get(name) for name in VARIABLES]

    seen = []
    for users, _, _ in SET:
        os.environ.update(users)
        seen.append([Wrapper(**SETTINGS)(train)(), train()])
        for name in users:
            del os.environ[name]
    return seen


def test_the_watchdog_leaves_errors_to_the_restart(job: Job) -> None:
    job.start(1, returns_the_variables, env=UNSET)
    assert job.wait() == [[[during, after] for _, during, after in SET]]
    assert not times_logged(job, 0)
