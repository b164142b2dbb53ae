"""A killed process is started again and takes part again: real processes, a real store, real signals."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_harness import Job
from rejoin_job import Training, training


@pytest.fixture
def run(job: Job, tmp_path: Path) -> Iterator[Training]:
    """A training that nothing has been started of."""
    with training(job, tmp_path) as run:
        yield run


# ---- ranks 0 to 2 active, rank 3 spare


@pytest.mark.parametrize("victims", [[1], [0], [0, 1]])
def test_killed_ranks_come_back_after_the_others_have_gone_on(
    run: Training, job: Job, victims: list[int]
) -> None:
    run.start(4, active_world_size=3, on_join="now", join_window=0.3)
    job.expect("in", 0, 1, 2, n=0)
    # Held, so that two deaths make one restart.
    job.send_signal(2, signal.SIGSTOP)
    run.abort(*victims)
    job.send_signal(2, signal.SIGCONT)
    left = [slot for slot in range(4) if slot not in victims]
    job.expect("in", *left, n=1, world=len(left))
    job.start_again(*victims)
    # They have their predecessors' places again, and the spare is a spare.
    job.expect("in", 0, 1, 2, n=2, world=3)
    run.finish()
    run.check(2, dict.fromkeys(victims, 2))
    assert [job[slot].value for slot in range(4)] == [[2, 0, 3], [2, 1, 3], [2, 2, 3], None]


@pytest.mark.parametrize("victims", [[1], [0], [0, 1]])
def test_killed_ranks_come_back_before_the_others_go_on(run: Training, job: Job, victims: list[int]) -> None:
    run.start(4, active_world_size=3)
    job.expect("in", 0, 1, 2, n=0)
    job.send_signal(2, signal.SIGSTOP)
    run.abort(*victims)
    job.start_again(*victims)
    run.await_join(0, *victims)
    job.send_signal(2, signal.SIGCONT)
    job.expect("in", 0, 1, 2, n=1, world=3)
    run.finish()
    run.check(1, dict.fromkeys(victims, 1))
    assert [job[slot].value for slot in range(4)] == [[1, 0, 3], [1, 1, 3], [1, 2, 3], None]
