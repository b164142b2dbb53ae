"""What a rank raises may be longer than the store takes, and hold what no store takes."""

from __future__ import annotations

from typing import Any

import pytest
from rank_harness import SETTINGS, Job, Rank

from ft_wrapper import CallWrapper, Wrapper
from ft_wrapper.exception import JobAbort

MESSAGES = ["x" * 9_000_000, "\ud800"]  # longer than a store takes; a lone surrogate


def raises(rank: Rank, last: int) -> Any:
    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> int:
        n = call_wrapper.iteration
        if rank.slot == 1:
            rank.hear()
            if n == 2:
                raise JobAbort(MESSAGES[last])
            raise ValueError(MESSAGES[n])
        rank.say("in", n=n)
        return rank.hang()

    return train()


@pytest.mark.parametrize("last", [0, 1], ids=["long", "surrogate"])
def test_exceptions_with_such_messages_restart_all_ranks_and_a_job_abort_ends_the_job(
    job: Job, last: int
) -> None:
    job.start(2, raises, last)
    for n in range(3):
        job.expect("in", 0, n=n)
        job.tell("raise", 1)
    job.wait_for_end(leftovers=False)
    assert [job[slot].error for slot in range(2)] == ["JobEnded", "JobAbort"]
    lines = [line for one in job.ranks.values() for line in one.log.splitlines()]
    for n in (1, 2):
        (line,) = (line for line in lines if f" restart {n}: " in line)
        assert "rank 1 (slot 1 on " in line and "raised ValueError: " in line and len(line) < 3000
