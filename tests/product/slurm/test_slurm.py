"""Jobs under a real SLURM, started by the script of ``examples/cluster``: what each fault costs.

`cluster.py` makes the SLURM; without its programs, or without root, the tests are skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cluster import PROGRAMS, Job, Slurm, until

FOLDER = Path(__file__).parent
SCRIPT = FOLDER.parents[2] / "examples" / "cluster" / "slurm.sbatch"
PROGRAM = FOLDER / "job.py"
PORT = 29400
DONE = "COMPLETED 0:0"

pytestmark = [
    pytest.mark.nightly("a stand-in for srun runs the script in tests/product/test_cluster_examples.py"),
    pytest.mark.slurm("it starts a SLURM"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """A SLURM of three nodes, for all cases."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and SLURM: {', '.join(missing) or 'not root'}")
    with Slurm(3) as slurm:
        yield slurm


class Training:
    """Starts jobs of three nodes with one rank each, in a folder of their own."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm, self.folder, self.jobs = slurm, folder, list[Job]()

    def start(self, *options: str, sbatch: tuple[str, ...] = (), steps: int = 100, **env: str) -> Job:
        """Submits one.

        Args:
            options: of ftrun.
            sbatch: options of sbatch, before the script.
            steps: how many there are, of 0.1 s.
            env: variables of the job.
        """
        script = (str(SCRIPT), "--events", self.events, *options)
        return self.submit("--nodes=3", *sbatch, *script, steps=steps, RANKS_PER_NODE="1", MIN_NODES="2", **env)

    def submit(self, *words: str, steps: int = 100, **env: str) -> Job:
        """Submits a job of another script."""
        work = (str(PROGRAM), str(self.folder / "checkpoints"), str(steps), "0.1")
        job = self.slurm.submit("--output=ft-%j-batch.log", *words, *work, folder=self.folder, **env)
        self.jobs.append(job)
        return job

    @property
    def events(self) -> str:
        """The folder of the events."""
        return str(self.folder / "events")

    def report(self) -> str:
        """What ``ftrun report`` says afterwards."""
        return self.slurm.call("ftrun", "report", self.events)

    def call(self, job: Job, command: str, *words: str) -> str:
        """Runs a command of ftrun for a job, from the controller's machine."""
        secret = (self.folder / f"ft-{job.number}.secret").read_text()
        where = f"{self.slurm.nodes[0]}:{PORT}"
        return self.slurm.call("ftrun", command, *words, where, env={"FT_WRAPPER_SECRET": secret})


@pytest.fixture
def training(slurm: Slurm, tmp_path: Path) -> Iterator[Training]:
    """Starts jobs; none of them leaves anything on a node."""
    training = Training(slurm, tmp_path)
    yield training
    for job in training.jobs:
        slurm.run("scancel", "--quiet", job.number)
    try:
        slurm.until_empty()
    finally:
        slurm.repair()


def lost(job: Job) -> int:
    """How many steps were done more than once."""
    return len({step for (step, _), times in job.steps.items() if times > 1})


def results(job: Job) -> set[str]:
    """What the ranks returned, each the digest of its weights."""
    return {line.rpartition(" ")[2] for line in job.said.splitlines() if line.startswith("RESULT")}


def test_a_clean_run(training: Training) -> None:
    job = training.start(steps=40)
    assert job.end() == DONE, job.describe()
    assert len(results(job)) == 1 and job.said.count("RESULT") == 3, job.describe()
    assert lost(job) == 0
    print(training.report(), job.describe())


def test_a_killed_rank(training: Training) -> None:
    job = training.start()
    job.until_said("STEP 20 rank 1")
    os.kill(pid := job.pid(1), signal.SIGKILL)
    assert job.end() == DONE, job.describe()
    assert lost(job) == 0
    assert len(results(job)) == 1 and job.said.count("RESULT") == 3, job.describe()
    print(pid, training.report(), job.describe())


def test_a_killed_ftrun(training: Training, slurm: Slurm) -> None:
    job = training.start()
    job.until_said("STEP 20 rank 1")
    job.task(slurm.nodes[1]).kill()
    assert job.end() == DONE, job.describe()
    assert lost(job) == 0
    assert len(results(job)) == 1 and job.said.count("RESULT") == 2, job.describe()
    print(training.report(), job.describe())


def test_a_killed_slurmstepd(training: Training, slurm: Slurm) -> None:
    job = training.start()
    job.until_said("STEP 20 rank 1")
    stepd = job.task(slurm.nodes[1]).parents()[1]
    stepd.kill()
    print(job.end(), job.shown())
    print(training.report(), job.describe(), lost(job))


def test_a_later_node_loses_its_power(training: Training, slurm: Slurm) -> None:
    job = training.start(steps=300)
    job.until_said("STEP 20 rank 2")
    slurm.power_off(slurm.nodes[2])
    print(job.end(), job.shown())
    print(training.report(), job.describe(), lost(job))


def test_the_first_node_loses_its_power(training: Training, slurm: Slurm) -> None:
    job = training.start(steps=200)
    job.until_said("STEP 30 rank 2")
    tasks = [job.task(node) for node in slurm.nodes[1:]]
    slurm.power_off(slurm.nodes[0])
    gone, alive = psutil.wait_procs(tasks, timeout=90)
    print(gone, alive, job.state)
    until(lambda: job.shown()["Restarts"]=="1", "requeued", 150, lambda: (slurm._root/"slurmctld.log").read_text()[-3000:])
    print(job.shown(), slurm.call("sinfo"))
    slurm.power_on(slurm.nodes[0])
    slurm.call("scontrol", "update", f"jobid={job.number}", "starttime=now")
    print(job.end(), job.shown())
    print(training.report(), job.describe(), lost(job))


def test_a_node_is_set_down(training: Training, slurm: Slurm) -> None:
    job = training.start()
    job.until_said("STEP 20 rank 2")
    slurm.call("scontrol", "update", f"nodename={slurm.nodes[2]}", "state=down", "reason=test")
    print(job.end(), job.shown())
    print(training.report(), job.describe(), lost(job))


def test_a_bad_node_is_kept_out_until_it_is_repaired(training: Training, slurm: Slurm) -> None:
    broken = training.folder / f"broken-{slurm.nodes[1]}"
    broken.touch()
    check = f"test ! -e {training.folder}/broken-$(hostname) || {{ echo a broken link; exit 1; }}"
    job = training.start("--node-check", check, "--rdzv-conf", "last_call_timeout=3", steps=200)
    job.until_said("STEP 20 rank 1")
    status = training.call(job, "status")
    print(status)
    broken.unlink()
    job.until_said("joined")
    print(training.call(job, "status"))
    print(job.end(), job.shown())
    print(training.report(), job.describe(), lost(job))


def test_a_drained_node(training: Training, slurm: Slurm) -> None:
    job = training.start(steps=200)
    job.until_said("STEP 20 rank 2")
    training.call(job, "drain", "node:2")
    print(job.end(), job.shown())
    print(training.report(), job.describe(), lost(job))


def step_of_ones_own(training: Training, job: Job, node: str, *options: str) -> subprocess.Popen[str]:
    """Starts an ftrun for a job in a second step of it."""
    slurm = training.slurm
    attempt = f"{job.number}-0"
    return slurm.start(
        "srun", f"--jobid={job.number}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}",
        *("ftrun", "--nnodes", "2:3", "--nproc-per-node", "1", "--rdzv-endpoint", f"{slurm.nodes[0]}:{PORT}"),
        *("--rdzv-id", attempt, "--job-secret-file", str(training.folder / f"ft-{job.number}.secret")),
        *options, str(PROGRAM), str(training.folder / "checkpoints"), "300", "0.1",
    )


def test_a_second_step_takes_a_lost_nodes_place(training: Training, slurm: Slurm) -> None:
    job = training.start(steps=300)
    job.until_said("STEP 20 rank 2")
    with step_of_ones_own(training, job, slurm.nodes[2]) as step:
        said, _ = step.communicate(timeout=120)
    print(step.returncode, said)
    job.task(slurm.nodes[2]).kill()
    with step_of_ones_own(training, job, slurm.nodes[2], "--node-id", "2") as step:
        said, _ = step.communicate(timeout=120)
    print(step.returncode, said)
    print(job.end(), job.shown())
    print(training.report(), job.describe(), lost(job))


EACH_RANK = """#!/bin/bash
#SBATCH --ntasks=3 --ntasks-per-node=1 --no-kill
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1) MASTER_PORT=29500
srun --wait=0 --kill-on-bad-exit=0 --no-kill --output=ft-%j-%N.log bash -c '
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
    exec python "$@"' rank "$@"
"""


def test_a_task_for_each_rank(training: Training, slurm: Slurm) -> None:
    script = training.folder / "ranks.sbatch"
    script.write_text(EACH_RANK)
    job = training.submit("--nodes=3", str(script), FT_WRAPPER_EVENTS=str(training.folder / "events-%h"))
    job.until_said("STEP 20 rank 1")
    os.kill(job.pid(1), signal.SIGKILL)
    print(job.end(), job.shown())
    print(job.describe(), lost(job), os.listdir(training.folder))
    print(slurm.call("sh", "-c", f"ftrun report {training.folder}/events-*"))


def test_out_of_memory(training: Training, slurm: Slurm) -> None:
    job = training.start(sbatch=("--mem=1500",), HUNGRY="1")
    print(job.end(), job.shown())
    print(training.report(), job.describe(), lost(job))


def test_a_notice_ends_nothing(training: Training, slurm: Slurm) -> None:
    job = training.start()
    job.until_said("STEP 22 rank 1")
    slurm.call("scancel", "--signal=USR1", f"{job.number}.0")
    print(job.end(), job.shown())
    print(training.report(), job.describe(), lost(job), job.said.count("SAVED"))


def test_sigterm(training: Training, slurm: Slurm) -> None:
    job = training.start(steps=150)
    job.until_said("STEP 22 rank 1")
    slurm.call("scancel", "--signal=TERM", f"{job.number}.0")
    job.run_again()
    print(job.end(), job.shown())
    print(training.report(), job.describe(), lost(job), re.findall("(?m)^SAVED.*", job.said))


def test_the_time_limit(training: Training, slurm: Slurm) -> None:
    job = training.start(steps=300, sbatch=("--time=1", "--signal=B:USR1@25"))
    job.run_again()
    job.run_again()
    print(job.end(), job.shown())
    print(training.report(), job.describe(), lost(job), re.findall("(?m)^SAVED.*", job.said))


def test_preemption(training: Training, slurm: Slurm) -> None:
    job = training.start(steps=150)
    job.until_said("STEP 22 rank 1")
    other = slurm.submit("--partition=high", "--nodes=3", "--output=other.log", "--wrap=srun sleep 1; echo over", folder=training.folder)
    training.jobs.append(other)
    print(other.end(), job.state)
    job.run_again()
    print(job.end(), job.shown())
    print(training.report(), job.describe(), lost(job), re.findall("(?m)^SAVED.*", job.said))
