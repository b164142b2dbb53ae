"""A user without rights on the host at a job's store: nothing of theirs is run, and the job goes on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import stranger
from agent_job import FtRun

HERE = Path(__file__).parent
TIMEOUT = 60.0
UNDISTURBED = 1  # the iteration in which the job ends: rank 1 raises once
SILENT = {"by_command", "ask_the_agent", "connect_to_ranks", "race_for_gloo", "wake_for_nothing"}
"""Attacks that write nothing which the job would read."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which takes root")


@needs_root
@pytest.mark.parametrize("attack", stranger.ATTACKS)
def test_the_job_goes_on(attack: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)  # so that nothing but the job's own checks keeps what a stranger runs from it
    with FtRun(
        tmp_path / "job", "--nproc-per-node", "2", str(HERE / "attacked_rank.py"), str(tmp_path)
    ) as job:
        job.await_file(tmp_path / "half")
        port = re.search(r"ftrun status \S+:(\d+)", job.said)
        assert port is not None
        command = [sys.executable, str(HERE / "stranger.py"), port[1], attack, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        assert "received 0" in done.stdout, done.stderr
        (tmp_path / "go_on").touch()
        assert job.process.wait(TIMEOUT) == 0, job.said
    assert not (tmp_path / "ran_code").exists()
    ended = re.findall(r"rank (\d) done in iteration (\d+): (\S+)", job.said)
    assert [(rank, n) for rank, n, _ in sorted(ended)] == [("0", str(UNDISTURBED)), ("1", str(UNDISTURBED))]
    assert ("was not written with this job's secret" in job.said) == (attack not in SILENT), job.said
