"""Between two wrapped calls a rank may take its time; only its death, its end or its silence excludes it."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
from rank_harness import SETTINGS, Job, Rank

from ft_wrapper import CallWrapper, Wrapper
from ft_wrapper.protocol import keys

SHORT = {
    **SETTINGS,
    "soft_timeout": 2.0,
    "hard_timeout": 2.8,
    "heartbeat_timeout": 2.5,
    "barrier_timeout": 3.0,
}
# Nothing but a report of the end lets the others go on in time.
LONG = {**SETTINGS, "heartbeat_timeout": 60.0, "barrier_timeout": 90.0}


class Told(logging.Handler):
    """Tells the test for whom the next call waits."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "waits for slots" in text:
            self.rank.say("waits", text=text.partition(":")[0])


def calls_twice(rank: Rank, settings: dict[str, Any]) -> Any:
    logging.getLogger("ft_wrapper").addHandler(Told(rank))

    @Wrapper(**{**settings, **rank.store_settings}, rejoin=True)
    def train(call_wrapper: CallWrapper) -> list[int]:
        return [call_wrapper.iteration, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])]

    first = train()
    rank.say("between")
    if rank.slot == 1 and rank.hear() == "end":
        return [first]
    return [first, train()]


def test_a_rank_that_lives_may_take_longer_than_barrier_timeout(job: Job) -> None:
    with job.announced_store() as (store, address):
        job.start(3, calls_twice, SHORT, env={"FT_WRAPPER_STORE": address})
        job.expect("between")
        assert not store.check([keys.GOODBYES]), "no rank hosts the store: nobody reads them, or deletes them"
        for _ in range(2):
            job.expect("waits", 0, 2, text="call 1 waits for slots [1]")
        job.tell("go", 1)
        assert job.wait() == [[[0, slot, 3], [1, slot, 3]] for slot in range(3)]


@pytest.mark.parametrize("is_host_lost", [False, True])
def test_the_others_go_on_without_those_that_are_gone_between_two_calls(job: Job, is_host_lost: bool) -> None:
    """One has ended, and another one is killed; or its host is lost, of which nothing tells."""
    with job.announced_store() as (_, address):
        settings = {**SETTINGS, "heartbeat_timeout": 5.0} if is_host_lost else LONG
        job.start(4, calls_twice, settings, env={"FT_WRAPPER_STORE": address})
        job.expect("between")
        job.tell("end", 1)
        if is_host_lost:
            job.lose_hosts(3)
        else:
            job.kill(3)
        first, ended, second = job.wait(killed=(3,))
    assert ended == [[0, 1, 4]]
    assert [first, second] == [[[0, 0, 4], [1, 0, 2]], [[0, 2, 4], [1, 1, 2]]]
