"""A slot that fails too often is excluded: ``max_faults`` within ``fault_window``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rank_harness import Job, Rank
from test_on_restart import trains as until_told

from ft_wrapper.monitor.shared_memory import RankMemory
from ft_wrapper.restart import loop
from ft_wrapper.store import StoreMixin


def trains(rank: Rank, **settings: Any) -> int:
    """Slot 1 raises an error whenever it is told to; each ends at the word."""
    loop._FIRST_PAUSE = 0.0
    return until_told(rank, on_restart=None, rejoin=True, join_window=0.0, **settings)


def line(job: Job, words: str) -> str:
    (found,) = (each for one in job.ranks.values() for each in one.log.splitlines() if words in each)
    return found


def tells_whether_it_leaves(rank: Rank) -> int:
    """`trains`, and says what the agent reads in the end."""
    close = RankMemory.close

    def tell(memory: RankMemory) -> None:
        if memory.leave_requested:
            rank.say("leaves")
        close(memory)

    RankMemory.close = tell  # type: ignore[method-assign]
    settings = {"on_join": "now", "rejoin_wait": 0.0, "max_same_faults": None}
    return trains(rank, active_world_size=2, max_faults=3, **settings)


def test_a_slot_that_raises_three_times_leaves_and_a_spare_takes_over(job: Job) -> None:
    """The agent is told that it is not missed: nor is the next process of the slot."""
    job.start(3, tells_whether_it_leaves)
    for n in range(3):
        job.expect("in", 0, 1, n=n)
        job.tell("raise", 1)
    job.expect("leaves", 1)
    job.expect("in", 0, 2, n=3)
    job.wait_for_end(1)
    assert (job[1].error, job[1].text.partition(" on ")[0]) == ("RankExcluded", "slot 1")
    said = line(job, "restart 3: ")
    assert "slot 1 on " in said and "is excluded, after 3 faults within 3600 s (max_faults=3)" in said
    assert "spare slot 2 took over as rank 1" in said
    job.start_again(1)
    job.expect("leaves", 1)
    job.wait_for_end(1)
    assert job[1].error == "RankExcluded"
    job.tell("finish", 0, 2)
    job.wait_for_end()
    assert (job[0].value, job[2].value) == (3, 3)


def comes_later(rank: Rank, *, repaired: str) -> int:
    """`trains`, but once there is a file a process comes two hours later."""
    if Path(repaired).exists():
        StoreMixin.wall_clock = lambda store: time.time() + 7200.0
    return trains(rank, active_world_size=2, max_faults=2, on_join="now", rejoin_wait=0.0)


def test_a_slot_that_died_too_often_is_not_let_in_until_its_faults_do_not_count(
    job: Job, tmp_path: Path
) -> None:
    job.start(3, comes_later, repaired=str(tmp_path / "repaired"))
    # Slot 1 dies in iterations 0 and 2; the spare, slot 2, stands in for it.
    job.expect("in", 0, 1, n=0)
    job.kill(1)
    job.expect("in", 0, 2, n=1)
    job.start_again(1)
    job.expect("in", 0, 1, n=2)
    job.kill(1)
    job.expect("in", 0, 2, n=3)
    job.start_again(1)
    job.wait_for_end(1)
    assert (job[1].error, job[1].code) == ("RankExcluded", 1)
    (tmp_path / "repaired").touch()
    job.start_again(1)
    job.expect("in", 0, 1, n=4)
    job.tell("finish")
    job.wait_for_end()
    assert (job[0].value, job[1].value) == (4, 4)
