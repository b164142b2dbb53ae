"""What a rank raises may be longer than the store takes, and hold what no store takes."""

from __future__ import annotations

from typing import Any

from rank_harness import SETTINGS, Job, Rank

from ft_wrapper import CallWrapper, Wrapper
from ft_wrapper.exception import JobAbort

MESSAGES = ["x" * 9_000_000, "\ud800", "\ud800" + "x" * 9_000_000]  # a store takes none of them


def raises(rank: Rank) -> Any:
    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> int:
        n = call_wrapper.iteration
        if rank.slot == 1:
            rank.hear()
            raise (ValueError if n < 2 else JobAbort)(MESSAGES[n])
        rank.say("in", n=n)
        return rank.hang()

    return train()


def test_exceptions_with_such_messages_restart_all_ranks_and_a_job_abort_ends_the_job(job: Job) -> None:
    job.start(2, raises)
    for n in range(3):
        job.expect("in", 0, n=n)
        job.tell("raise", 1)
    job.wait_for_end(leftovers=False)
    assert [job[slot].error for slot in range(2)] == ["JobEnded", "JobAbort"]
    lines = [line for one in job.ranks.values() for line in one.log.splitlines()]
    for n in (1, 2):
        (line,) = (line for line in lines if f" restart {n}: " in line)
        assert "rank 1 (slot 1 on " in line and "raised ValueError: " in line and len(line) < 3000
