"""A rank that the kernel has killed for lack of memory, as far as the agent can tell."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ft_wrapper.agent import loop
from ft_wrapper.agent.outputs import Failure, count_kernel_kills
from ft_wrapper.run import main


@pytest.mark.parametrize(
    ("text", "kills"),
    [("low 0\nhigh 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 0\n", 2), ("low 0\n", 0), ("?", 0), ("", 0)],
)
def test_what_the_cgroup_counts(tmp_path: Path, text: str, kills: int) -> None:
    path = tmp_path / "memory.events"
    assert count_kernel_kills(path) == 0
    path.write_text(text)
    assert count_kernel_kills(path) == kills


def test_only_a_sigkill_may_be_the_kernels() -> None:
    def how(exitcode: int, kernel_kills: int) -> str:
        return Failure(0, 17, exitcode, 0.0, "", "", kernel_kills=kernel_kills).how()

    assert how(-signal.SIGKILL, 0) == "killed by SIGKILL"
    assert how(-signal.SIGKILL, 2) == "killed by SIGKILL (out of memory? the kernel has killed 2 meanwhile)"
    assert how(-signal.SIGSEGV, 2) == "killed by SIGSEGV"
    assert how(1, 2) == "exit code 1"


@pytest.mark.parametrize("kills", [0, 1])
def test_the_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kills: int
) -> None:
    before = count_kernel_kills()
    monkeypatch.setattr(loop, "count_kernel_kills", lambda: before + kills)
    script = tmp_path / "script.py"
    script.write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert main(["--no-standby", str(script)]) == 1
    lines = [record.getMessage() for record in caplog.records if "killed by SIGKILL" in record.getMessage()]
    assert lines and all(("out of memory?" in line) == bool(kills) for line in lines)
