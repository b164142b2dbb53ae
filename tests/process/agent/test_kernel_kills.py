"""A rank that the kernel has killed for lack of memory, as far as the agent can tell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ft_wrapper.agent import agent
from ft_wrapper.agent.outputs import count_kernel_kills, describe_exit, kills_file
from ft_wrapper.agent.rounds import INFRASTRUCTURE, PROGRAM
from ft_wrapper.report import command
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


V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
V2 = "low 0\noom 5\noom_kill 4\n"


@pytest.mark.parametrize(
    ("groups", "files", "kills"),
    [
        ("0::/a:b\n", {"a:b/memory.events": V2}, 4),
        ("0::/a/b\n", {"memory.events": V2}, 4),  # a container's own name
        ("4:memory:/a/b\n3:cpu:/\n", {"memory/a/b/memory.oom_control": V1}, 3),
        ("4:memory:/a\n", {"memory/a/memory.oom_control": V1, "memory/memory.oom_control": V2}, 3),
        ("9:name=systemd:/\n4:memory:/a\n0::/\n", {"memory/a/memory.oom_control": V1}, 3),
        ("0::/a\n4:memory:/a\n", {"memory/a/memory.oom_control": V1}, 3),
        ("0::/../x\n", {"memory.events": V2}, 4),  # outside of the namespace
        ("3:cpu:/a\n", {"memory/a/memory.oom_control": V1}, 0),
        ("?\n", {}, 0),
        (None, {}, 0),
    ],
)
def test_the_nearest_cgroup_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str | None, files: dict[str, str], kills: int
) -> None:
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if groups is not None:
        (tmp_path / "cgroup").write_text(groups)
    found = kills_file(tmp_path / "cgroup", tmp_path / "fs")
    assert (found is None) == (kills == 0)
    assert found is None or count_kernel_kills(found) == kills


V1_MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.mark.nightly("what the cgroup counts is read always")
@pytest.mark.skipif(
    not os.access(V1_MEMORY / "cgroup.procs", os.W_OK), reason="no cgroups v1 to be made here"
)
def test_a_real_kill_in_a_cgroup_of_version_1(tmp_path: Path) -> None:
    group = V1_MEMORY / f"ft_wrapper_test_{os.getpid()}"
    group.mkdir()
    script = tmp_path / "greedy.py"
    script.write_text("data = b'x' * (1 << 32)\nprint(len(data))")
    try:
        (group / "memory.limit_in_bytes").write_text(str(1 << 30))
        join = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        words = ["-m", "ft_wrapper.run", "--no-fork", str(script)]
        done = subprocess.run(
            ["sh", "-c", join, "sh", sys.executable, *words], capture_output=True, text=True, timeout=120
        )
        assert done.returncode != 0
        assert "killed by SIGKILL (out of memory? the kernel has killed 1 meanwhile)" in done.stderr
    finally:
        group.rmdir()


def test_only_a_sigkill_may_be_the_kernels() -> None:
    assert describe_exit(-signal.SIGKILL, 0) == "killed by SIGKILL"
    assert (
        describe_exit(-signal.SIGKILL, 2)
        == "killed by SIGKILL (out of memory? the kernel has killed 2 meanwhile)"
    )
    assert describe_exit(-signal.SIGSEGV, 2) == "killed by SIGSEGV"
    assert describe_exit(1, 2) == "exit code 1"


@pytest.mark.parametrize("kills", [0, 1])
def test_the_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kills: int
) -> None:
    before = count_kernel_kills()
    monkeypatch.setattr(agent, "count_kernel_kills", lambda: before + kills)
    script = tmp_path / "script.py"
    script.write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert main(["--no-fork", str(script)]) == INFRASTRUCTURE
    lines = [record.getMessage() for record in caplog.records if "killed by SIGKILL" in record.getMessage()]
    assert lines and all(("out of memory?" in line) == bool(kills) for line in lines)


WRAPPED = """
import os, signal, sys, time
from ft_wrapper import Wrapper

@Wrapper(rejoin=True)
def train(call_wrapper):
    if call_wrapper.iteration == 0 and os.environ["RANK"] == "1":
        open(sys.argv[1], "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if call_wrapper.iteration and os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGUSR1)
    while not (call_wrapper.iteration and call_wrapper.notice):
        call_wrapper.ping()
        time.sleep(0.01)  # a rank sees a notice only by looking

train()
sys.exit(3)
"""


def test_the_report_says_so_and_names_notices_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script, killed, events = (tmp_path / name for name in ("script.py", "killed", "events"))
    script.write_text(WRAPPED)
    monkeypatch.setattr(agent, "count_kernel_kills", lambda: int(killed.exists()))
    assert main(["--nproc-per-node", "2", "--events", str(events), str(script), str(killed)]) == PROGRAM
    assert command.main([str(events)]) == 0
    report = " ".join(capfd.readouterr().out.split())
    assert ") died (out of memory? the kernel has killed 1)" in report
    assert "notice from ftrun: SIGUSR1" in report
    assert "exit code 1 (program): rank" in report
