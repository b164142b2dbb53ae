"""A spare steps in though the killed rank's next process is back first, and that one is the next spare."""

from __future__ import annotations

import re
from pathlib import Path

from agent_job import FtRun

RANK = str(Path(__file__).parent / "warm_rank.py")
STEPS = 30


def train(folder: Path, *faults: str) -> tuple[FtRun, set[str]]:
    with FtRun(folder, "--nproc-per-node", "3", RANK, str(STEPS), *faults) as job:
        assert job.end() == 0, job.said
    return job, set(re.findall(r"weights (\w+)", job.said))


def test_the_warm_one_steps_in(tmp_path: Path) -> None:
    job, weights = train(tmp_path / "faulty", "1:10", "2:20")
    entered = set(re.findall(r"in (\d) slot (\d) rank (\d) of 2", job.said))
    assert entered == {
        *[("0", "0", "0"), ("0", "1", "1")],
        *[("1", "0", "0"), ("1", "2", "1")],
        *[("2", "0", "0"), ("2", "1", "1")],  # and the process that came in the meantime
    }
    first, second = (record["line"] for record in job.events("restarted"))
    assert "; slot 1 joined; spare slot 2 took over as rank 1; 2 active + 1 spare rank" in first
    assert "; slot 2 joined; spare slot 1 took over as rank 1; 2 active + 1 spare rank" in second
    did = [int(step) for step in re.findall(r"did (\d+) slot \d rank 0", job.said)]
    assert did == sorted(set(did))  # none of them again
    # It may have done the steps of the kills in the recovery, without saying so.
    assert {*range(STEPS)} - {10, 20} <= {*did}
    assert weights == train(tmp_path / "clean")[1] and len(weights) == 1
