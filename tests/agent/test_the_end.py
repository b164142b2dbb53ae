"""Nothing is left of a job, whatever ends ftrun."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path

import pytest
from agent_job import TIMEOUT, FtRun, all_gone

JOB = """
    import os, time
    from ft_wrapper import CallWrapper, Wrapper

    @Wrapper(use_global_iteration=True)
    def train(call_wrapper: CallWrapper = None):
        open(f"in.{os.environ['RANK']}.{call_wrapper.iteration}", "w").close()
        while True:
            time.sleep(0.05)

    train()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_nothing_is_left(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "job"
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(JOB))
    signum = signal.Signals[name]
    with FtRun(folder, "--nproc-per-node", "2", str(script)) as job:
        for rank in range(2):
            job.await_file(folder / f"in.{rank}.0")
        family = job.family()
        # Two ranks, each with a monitor, and the template.
        assert len(family) >= 5
        job.process.send_signal(signum)
        left = all_gone(family, TIMEOUT)
        assert left == [], job.said
        assert job.end() == (-signum if signum == signal.SIGKILL else 128 + signum)
        assert "ranks failed" not in job.said
