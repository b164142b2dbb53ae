"""DTensors under ftrun: three active ranks and a spare, rank 0 is killed, and the others move."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agent_job import FtRun

RANK = Path(__file__).with_name("dtensor_rank.py")


@pytest.mark.nightly("test_torch_over_restarts.py and torch_state have meshes over restarts always")
def test_every_ranks_rows_are_its_own_after_rank_0_was_killed(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    ranks = ["--nproc-per-node", "4", "--active-world-size", "3", "--max-rank-restarts", "0"]
    with FtRun(tmp_path / "job", *ranks, str(RANK), str(results)) as job:
        for rank in range(4):  # four processes import DTensor and dynamo: by far the longest part
            job.await_file(results / f"imported-{rank}")
        assert job.end() in (0, 1), job.said
        said = [json.loads((results / f"rank-{rank}.json").read_text()) for rank in range(3)]
        assert [one["rows"] for one in said] == [[4.0 * rank, 4.0 * rank + 2] for rank in range(3)]
        assert {one["iteration"] for one in said} == {1}, job.said
        started = {record["child"]: record["rank"] for record in job.events("rank_started")}
        # Those who were ranks 1 and 2 are 0 and 1 now, in their processes.
        assert [started[one["pid"]] for one in said] == [1, 2, 3]
