"""What a rank raises may be longer than the store takes, and hold what no store takes."""

from __future__ import annotations

from typing import Any

import pytest
from rank_harness import SETTINGS, Job, Rank

from ft_wrapper import CallWrapper, Wrapper
from ft_wrapper.exception import JobAbort

MESSAGES = {"longer than the store takes": "x" * 9_000_000, "a lone surrogate": "\ud800"}


def raises(rank: Rank, kind: str, message: str) -> Any:
    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> int:
        if call_wrapper.iteration == 0 and rank.slot == 1:
            raise {"error": ValueError, "end": JobAbort}[kind](MESSAGES[message])
        if call_wrapper.iteration == 0:
            rank.hang()
        return call_wrapper.iteration

    return train()


@pytest.mark.parametrize("message", MESSAGES)
def test_an_exception_with_such_a_message_restarts_all_ranks(job: Job, message: str) -> None:
    job.start(2, raises, "error", message)
    assert job.wait() == [1, 1]
    (line,) = (line for one in job.ranks.values() for line in one.log.splitlines() if " restart 1: " in line)
    assert "rank 1 (slot 1 on " in line and "raised ValueError: " in line and len(line) < 3000


@pytest.mark.parametrize("message", MESSAGES)
def test_a_job_abort_with_such_a_message_ends_the_job(job: Job, message: str) -> None:
    job.start(2, raises, "end", message)
    job.wait_for_end(leftovers=False)
    assert [job[slot].error for slot in range(2)] == ["JobEnded", "JobAbort"]
