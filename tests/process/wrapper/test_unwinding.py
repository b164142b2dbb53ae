"""How an interrupted function leaves: the grace of its clean-up, and the handlers that it leaves behind."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from rank_harness import SETTINGS, Job, Rank, with_limits

from ft_wrapper import CallWrapper, Wrapper


def cleans_up(rank: Rank) -> Any:
    """The first clean-up is within its grace, the second one is not."""
    cleaned = []

    @Wrapper(**with_limits(**{**SETTINGS, "cleanup_timeout": 5.0}))
    def train(call_wrapper: CallWrapper) -> list[int]:
        n = call_wrapper.iteration
        if n < 2:
            if rank.slot == 1:
                rank.hear()
                raise ValueError
            try:
                rank.say("in")
                rank.train()
            finally:
                time.sleep((1.5, 1000.0)[n])
                cleaned.append(n)
        return cleaned

    return train()


def test_a_clean_up_gets_its_grace(job: Job) -> None:
    job.start(2, cleans_up)
    for _ in range(2):
        job.expect("in", 0)
        job.tell("fail", 1)
    assert job.wait() == [[0], []]


def leaves_handlers(rank: Rank) -> Any:
    """In the end slot 1 leaves with an error, and slot 0 returns."""

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
        if call_wrapper.iteration == 2 and rank.slot == 1:
            raise SystemExit(3)
        if call_wrapper.iteration == 2:
            rank.train()

    try:
        train()
    finally:
        found = [signal.getsignal(signal.SIGUSR1) is before, signal.getsignal(signal.SIGHUP) == previous[1]]
        os.kill(os.getpid(), signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, previous[0])
        rank.say("found", depth=depth, found=found)


def test_handlers_that_the_function_leaves_are_put_back(job: Job) -> None:
    job.start(2, leaves_handlers)
    for _ in range(2):
        job.expect("in", 0, 1)
        job.tell("fail", 1)
    job.expect("found", 1, depth=[1] * 6, found=[True, True])
    job.expect("found", 0, depth=[1] * 8, found=[True, True])
    job.wait_for_end()
    assert [len(job[slot].said("before")) for slot in (0, 1)] == [1, 1]
    assert not job[0].said("left behind")
