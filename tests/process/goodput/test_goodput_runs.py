"""What the time of real jobs went to: the numbers are those that the ranks have noted beside the events.

The wall time is measured here, from the start of ftrun to its end, and not taken from the events.
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from support import warm_ftrun

from ft_wrapper import events
from ft_wrapper.report import Report, make_reports

JOB = Path(__file__).resolve().parent / "goodput_job.py"
LIMIT = 240.0
"""Seconds that a run may take."""

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("warm_process")]


def count_steps(folder: Path, steps: int) -> tuple[int, int]:
    """Steps done and steps done again, by what the ranks have noted; all were done in the end."""
    begun: dict[int, list[int]] = defaultdict(list)
    for path in folder.glob("begun-*"):
        for line in path.read_text().splitlines():
            iteration, step = map(int, line.split())
            begun[iteration].append(step)
    done: set[int] = set()
    again = 0
    last = max(begun)
    for iteration in sorted(begun):
        end = steps if iteration == last else max(begun[iteration])
        here = set(range(min(begun[iteration]), end))
        again += len(here & done)
        done |= here
    return len(done), again


def run_job(folder: Path, faults: str, processes: int, **options: Any) -> tuple[Report, float]:
    """Runs a job to its end; returns what the events say, and the seconds that it took.

    Args:
        folder: for its files.
        faults: see `goodput_job`.
        processes: how many ranks.
        options: of the job, such as ``steps``.
    """
    words = ["--nproc-per-node", processes, "--max-rank-restarts", 100, JOB, folder, "--faults", faults]
    for name, value in options.items():
        words += [f"--{name}", value]
    environment = {"TMPDIR": str(folder), events.ENV: str(folder / "events")}
    began = time.monotonic()
    with open(folder / "output", "wb") as output:
        ftrun = warm_ftrun.start_ftrun([str(word) for word in words], output.fileno(), folder, environment)
    try:
        code = ftrun.wait(LIMIT)
    finally:
        seconds = time.monotonic() - began
        ftrun.kill()
        ftrun.wait()
    assert code == 0, (folder / "output").read_text()[-4000:]
    (report,) = make_reports(events.load(str(folder / "events")))
    return report, seconds


def test_known_steps_that_are_done_again_are_counted_exactly(tmp_path: Path) -> None:
    """Checkpoints each 10 steps: from 17 back to 10, from 28 back to 20, from 45 back to 40."""
    report, wall = run_job(tmp_path, "exception:17,sigkill:28,hang:45", 3, active=2, steps=60, every=10)
    spent = report.time
    assert (spent.steps, spent.steps_again) == (60, 7 + 8 + 5) == count_steps(tmp_path, 60)
    assert sum(spent.buckets.values()) == pytest.approx(spent.seat_seconds)
    assert spent.seconds <= wall
    assert {"useful_steps", "wasted_progress", "training_prep", "idle_spare"} < set(spent.buckets)
    assert "steps_unknown" not in spent.buckets
    # The step that hung was noticed at soft_timeout, by both ranks that train.
    assert spent.buckets["detection"] >= 2 * 1.0
    # Two ranks have loaded four times, which takes 0.05 s at least.
    assert spent.buckets["training_prep"] >= 8 * 0.05
    told = [record for record in events.load(str(tmp_path / "events")) if record["event"] == "step"]
    # The first step of each rank in each iteration, and at most one a second.
    assert len(told) <= 2 * 4 + 2 * (wall + 1)


def test_the_last_step_of_a_rank_that_was_killed_alone_is_known(tmp_path: Path) -> None:
    """No other rank was in that step: its monitor reads it from the memory that they share."""
    report, _ = run_job(tmp_path, "sigkill:18,sigkill:29", 2, active=1, faulty=0, steps=40, every=10)
    assert (report.time.steps, report.time.steps_again) == (40, 8 + 9) == count_steps(tmp_path, 40)
