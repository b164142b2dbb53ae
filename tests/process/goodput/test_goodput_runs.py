"""What the time of real jobs went to: the numbers are those that the ranks have noted beside the events."""

from __future__ import annotations

from pathlib import Path

import pytest
from goodput_runs import random_faults, run_job

from ft_wrapper import events

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("warm_process")]


def test_known_steps_that_are_done_again_are_counted_exactly(tmp_path: Path) -> None:
    """Checkpoints each 10 steps: from 17 back to 10, from 28 back to 20, from 45 back to 40."""
    folder = tmp_path / "job"
    faults = "exception:17,sigkill:28,hang:45"
    run = run_job(folder, faults, processes=3, active=2, steps=60, every=10)
    time = run.report.time
    assert (time.steps, time.steps_again) == (60, 7 + 8 + 5) == (run.steps, run.again)
    assert sum(time.buckets.values()) == pytest.approx(time.seat_seconds)
    assert time.seconds <= run.wall
    assert {"useful_steps", "wasted_progress", "training_prep", "detection", "idle_spare"} < set(time.buckets)
    assert "steps_unknown" not in time.buckets
    # The step that hung was noticed at soft_timeout, by both ranks that train.
    assert time.buckets["detection"] >= 2 * 1.0
    # Two ranks have loaded four times, which takes 0.05 s at least.
    assert time.buckets["training_prep"] >= 8 * 0.05
    told = [record for record in events.load(str(folder / "events")) if record["event"] == "step"]
    # The first step of each rank in each iteration, and at most one a second.
    assert len(told) <= 2 * 4 + 2 * (run.wall + 1)


def test_the_last_step_of_a_rank_that_was_killed_alone_is_known(tmp_path: Path) -> None:
    """No other rank was in that step: its monitor reads it from the memory that they share."""
    faults = "sigkill:18,sigkill:29"
    run = run_job(tmp_path / "job", faults, processes=2, active=1, faulty=0, steps=40, every=10)
    time = run.report.time
    assert (time.steps, time.steps_again) == (40, 8 + 9) == (run.steps, run.again)


def test_a_job_that_tells_no_steps_says_so(tmp_path: Path) -> None:
    run = run_job(tmp_path / "job", "exception:5", processes=2, active=2, steps=12, untold=True)
    assert run.report.goodput is None
    assert "useful_steps" not in run.report.time.buckets and run.report.time.buckets["steps_unknown"] > 0
    assert "the function told no steps, see call_wrapper.ping(step)" in run.report.to_text()


@pytest.mark.nightly("jobs of 45 s; the numbers are held against what ranks note in a short one always")
@pytest.mark.alone("beside others ftrun takes more than 1 % of that to start and to end")
@pytest.mark.parametrize("seed", [1, 2])
def test_buckets_add_up_to_the_wall_time_through_random_faults(tmp_path: Path, seed: int) -> None:
    faults = random_faults(seed, 800)
    run = run_job(tmp_path / "job", faults, steps=800, step_seconds=0.04, every=100)
    assert not run.wrong, f"{faults}: {run.wrong}"
