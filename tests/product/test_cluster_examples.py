"""The examples for clusters, as far as that can be tried on a machine that is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ft_wrapper.agent.node_check import NodeCheck
from ft_wrapper.testing.etcd_server import free_port

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
TIMEOUT = 240.0

SCONTROL = """#!/bin/sh
[ "$1" != requeue ] || { echo "requeued $2"; exit; }
[ "$*" = "show hostnames node[0-1]" ] || exit 9
echo localhost
seq -f node%g 20000  # more than a pipe holds: one who reads the first line alone ends this with SIGPIPE
"""

# Runs the command once for each node, all on this machine, as a step of SLURM's would.
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
first = next(number for number, word in enumerate(sys.argv) if number and not word.startswith("--"))
tasks = [
    subprocess.Popen(sys.argv[first:], env={{**os.environ, "SLURM_PROCID": number, "SLURM_STEP_ID": "0"}})
    for number in map(str, range(int(os.environ["SLURM_JOB_NUM_NODES"])))
]
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH with stand-ins for SLURM's commands."""
    for name, script in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    return os.pathsep.join([str(tmp_path), sysconfig.get_path("scripts"), os.environ["PATH"]])


def run_script(folder: Path, path: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the script for SLURM in a folder."""
    job = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "4711"}
    return subprocess.run(
        ["bash", str(CLUSTER / "slurm.sbatch"), *words],
        env={**os.environ, "PATH": path, **job, **env},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


@pytest.mark.nightly("two nodes of ftrun meet in tests/process/agent/test_nodes.py always")
def test_the_slurm_script_runs_a_job_on_all_nodes(path: str, tmp_path: Path) -> None:
    (folder := tmp_path / "submitted").mkdir()
    minimal = str(ROOT / "examples" / "minimal.py")
    ended = run_script(folder, path, minimal, RANKS_PER_NODE="1", PORT=str(free_port()))
    assert ended.returncode == 0, ended.stderr
    # Two nodes write to one stdout, and unbuffered Python writes the ends of lines by themselves.
    assert ended.stdout.count("the last sum is 18.0") == 2, ended.stderr
    assert ended.stdout.replace("the last sum is 18.0", "").strip() == "attempt 4711-0 ends with 0"
    assert "4711-0: node 1 (localhost) has group rank 1 of 2" in ended.stderr
    assert not any(folder.iterdir())


@pytest.mark.parametrize(
    ("codes", "env", "code", "is_requeued"),
    [
        (("75", "75"), {}, 75, True),
        (("", "75"), {"PATIENCE": "0.1"}, 75, True),  # task 0 was killed, with the verdict
        (("0", "143"), {}, 0, False),
        (("1", "75"), {}, 1, False),
        (("75", "75"), {"STATE": "CANCELLED"}, 75, False),
        (("75", "75"), {"SLURM_RESTART_COUNT": "20"}, 75, False),
        (("75", "75"), {"SLURM_RESTART_COUNT": "2", "MAX_REQUEUES": "3"}, 75, True),
    ],
)
def test_the_slurm_script_requeues_a_job_that_may_succeed_then(
    path: str, tmp_path: Path, codes: tuple[str, str], env: dict[str, str], code: int, is_requeued: bool
) -> None:
    """Each task's ftrun ends with a code of its own, or is killed: that of task 0 is the job's."""
    ftrun = f"""case $SLURM_PROCID in 0) code={codes[0]};; 1) code={codes[1]};; esac
[ "$code" ] || kill -KILL $$
printf '{{"exit_code": %d, "why": ""}}' "$code" >"$2"
exit "$code"
"""
    patience = f'shift; exec {shutil.which("timeout")} "${{PATIENCE:-60}}" "$@"'
    squeue = 'echo "${STATE:-RUNNING}"'
    for name, script in (("ftrun", ftrun), ("squeue", squeue), ("timeout", patience)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (folder := tmp_path / "submitted").mkdir()
    ended = run_script(folder, path, "train.py", **env)
    assert ended.returncode == code, ended.stderr
    assert ("requeued 4711" in ended.stdout) == is_requeued
    assert not any(folder.iterdir())


def test_the_slurm_script_says_what_it_needs(path: str, tmp_path: Path) -> None:
    ended = run_script(tmp_path, path)
    assert ended.returncode == 2
    assert ended.stderr == "usage: sbatch --nodes N slurm.sbatch [OPTION]... SCRIPT [ARGUMENT]...\n"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_has_no_complaint() -> None:
    for name in ("slurm.sbatch", "node_check.sh"):
        subprocess.run(["shellcheck", str(CLUSTER / name)], check=True, timeout=TIMEOUT)


@pytest.mark.parametrize(
    ("gpus", "diag", "free", "why"),
    [
        (8, 0, 16384, ""),
        (7, 0, 16384, "--node-check: 7 of 8 GPUs (exit status 1)"),
        (8, 3, 16384, "--node-check: dcgmi diag has failed: see {}/node_check.{}.log (exit status 1)"),
        (8, 0, 16383, "--node-check: less than 16 MiB free in {} (exit status 1)"),
    ],
)
def test_the_node_check_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, diag: int, free: int, why: str
) -> None:
    for name, script in (
        ("nvidia-smi", f"seq -f 'GPU %g: NVIDIA H100' 0 {gpus - 1}"),
        ("dcgmi", f'[ "$*" = "diag -r 1" ] || exit 9; echo what it says; exit {diag}'),
        ("df", f"echo Filesystem 1024-blocks Used Available; echo tmpfs 65536 0 {free} 0% $2"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    said = NodeCheck(f"sh {CLUSTER / 'node_check.sh'} 8", TIMEOUT).failure()
    assert said == why.format(tmp_path, os.getuid())
