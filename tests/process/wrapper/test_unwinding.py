"""How an interrupted function leaves: the grace of its clean-up, and the handlers that it leaves behind."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from rank_harness import SETTINGS, Job, Rank, with_limits

from ft_wrapper import CallWrapper, Wrapper


def cleans_up(rank: Rank, grace: float | None, seconds: float) -> Any:
    settings = SETTINGS if grace is None else {**SETTINGS, "cleanup_timeout": grace}
    cleaned = []

    @Wrapper(**with_limits(**settings))
    def train(call_wrapper: CallWrapper) -> int:
        if call_wrapper.iteration == 0:
            if rank.slot == 1:
                rank.hear()
                raise ValueError
            try:
                rank.say("in")
                rank.train()
            finally:
                time.sleep(seconds)
                cleaned.append("finally")
        return len(cleaned)

    return train()


@pytest.mark.parametrize(("grace", "seconds", "cleaned"), [(15.0, 1.5, 1), (None, 1000.0, 0)])
def test_a_clean_up_gets_its_grace(job: Job, grace: float | None, seconds: float, cleaned: int) -> None:
    job.start(2, cleans_up, grace, seconds)
    job.expect("in", 0)
    job.tell("fail", 1)
    assert job.wait() == [cleaned, 0]


def leaves_handlers(rank: Rank, ends: str) -> Any:
    def before(*_: object) -> None:
        rank.say("before")

    def nests(signum: int) -> None:
        """As a framework does."""
        previous = signal.getsignal(signum)
        depth.append(getattr(previous, "depth", 0) + 1)

        def handler(*_: object) -> None:
            rank.say("left behind")

        handler.depth = depth[-1]  # type: ignore[attr-defined]
        signal.signal(signum, handler)

    depth: list[int] = []
    previous = [signal.signal(signal.SIGUSR1, before), signal.getsignal(signal.SIGHUP)]

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> None:
        nests(signal.SIGHUP)
        nests(signal.SIGUSR1)
        if call_wrapper.iteration < 2:
            rank.say("in")
            if rank.slot == 1:
                rank.hear()
                raise ValueError
            rank.train()
        if ends == "error":
            raise SystemExit(3)

    try:
        train()
    finally:
        found = [signal.getsignal(signal.SIGUSR1) is before, signal.getsignal(signal.SIGHUP) == previous[1]]
        os.kill(os.getpid(), signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, previous[0])
        rank.say("found", depth=depth, found=found)


@pytest.mark.parametrize("ends", ["return", "error"])
def test_handlers_that_the_function_leaves_are_put_back(job: Job, ends: str) -> None:
    job.start(2, leaves_handlers, ends)
    for _ in range(2):
        job.expect("in", 0, 1)
        job.tell("fail", 1)
    job.expect("found", depth=[1] * 6, found=[True, True])
    job.wait_for_end()
    assert [len(job[slot].said("before")) for slot in (0, 1)] == [1, 1]
    assert not job[0].said("left behind")
