"""A rank is lost in the middle of a restart, at every point of it; and the spare is lost.

At each step of it: tests/simulation/protocol/test_crash_at_every_step.py.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from fault_job import SPARE, WORLD, check, start
from faulty_restart import trains_through_a_bad_restart, trains_with_a_lost_spare
from rank_harness import Job, await_end
from support.nightly import at_night

ALWAYS = [
    ("sigkill", "abort", 0),
    ("sigkill", "arrived", 2),
    ("sigkill", "decided", 0),
    ("sigkill", "assignment", 2),
    ("sigstop", "decided", 0),
]
NIGHTLY = [
    ("sigkill", "assignment", SPARE),
    ("sigstop", "abort", 2),
    ("sigstop", "arrived", 0),
    ("sigstop", "assignment", SPARE),
]


@pytest.mark.parametrize(
    ("kind", "point", "victim"), [*ALWAYS, *at_night("a rank is lost at each point always", NIGHTLY)]
)
def test_a_rank_that_is_restarting(job: Job, tmp_path: Path, kind: str, point: str, victim: int) -> None:
    start(job, tmp_path, trains_through_a_bad_restart, kind, point, victim, str(tmp_path))
    if point == "arrived":
        job.expect("arrived", victim)
        if kind == "sigkill":
            job.wait_for_end(victim)
        job.tell("arrive", *{*range(WORLD)} - {victim})
    job.wait_for_end()
    check(job, tmp_path, gone={victim}, faults=2)


@pytest.mark.parametrize(
    ("number", "faults"), [(signal.SIGKILL, ""), (signal.SIGSTOP, "sigkill:rank=0:step=3")]
)
def test_a_waiting_spare_is_lost(job: Job, tmp_path: Path, number: signal.Signals, faults: str) -> None:
    start(job, tmp_path, trains_with_a_lost_spare, faults, str(tmp_path))
    job.expect("waiting", 0, 1, 2)
    job.expect("ready", SPARE)
    monitor = job.monitors()[SPARE]
    job.send_signal(SPARE, number)
    await_end(monitor)  # it has told the others
    job.tell("go on", 0, 1, 2)
    job.wait_for_end()
    restarts = check(job, tmp_path, gone={0, SPARE} if faults else {SPARE}, faults=1 if faults else 0)
    assert restarts == (1 if faults else 0)
