"""Jobs under a real SLURM, started by the script of ``examples/cluster``: what each fault costs.

`cluster.py` makes the SLURM; without its programs, or without root, the tests are skipped.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from cluster import PROGRAMS, Job, Slurm, until

FOLDER = Path(__file__).parent
SCRIPT = FOLDER.parents[2] / "examples" / "cluster" / "slurm.sbatch"
PROGRAM = FOLDER / "job.py"
PORT = 29400
STEPS = 100
EVERY = 20  # steps from one checkpoint to the next, of job.py
DONE = "COMPLETED 0:0"

pytestmark = [
    pytest.mark.nightly("a stand-in for srun runs the script in tests/product/test_cluster_examples.py"),
    pytest.mark.timeout(600),
]


class Training:
    """Starts jobs of three nodes with one rank each.

    Args:
        slurm: where.
        folder: of their own, in which they are submitted.
    """

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm, self.folder, self.jobs = slurm, folder, list[Job]()

    def start(
        self,
        *options: str,
        sbatch: tuple[str, ...] = (),
        steps: int = STEPS,
        pause: float = 0.2,
        hold: bool = False,
        **env: str,
    ) -> Job:
        """Submits a job of the script.

        Args:
            options: of ftrun.
            sbatch: options of sbatch.
            steps: how many there are.
            pause: how long each one takes.
            hold: whether it waits at step 60 until `Job.end`, so that it can be asked for its status.
            env: variables of the job.
        """
        if hold:
            (self.folder / "hold").touch()
        script = (str(SCRIPT), "--events", str(self.folder / "events"), *options)
        env = {"RANKS_PER_NODE": "1", "MIN_NODES": "2", **env}
        return self.submit("--nodes=3", *sbatch, *script, *self.work(steps, pause), **env)

    def submit(self, *words: str, **env: str) -> Job:
        """Submits any job."""
        job = self.slurm.submit("--output=ft-%j-batch.log", *words, folder=self.folder, **env)
        self.jobs.append(job)
        return job

    def work(self, steps: int = STEPS, pause: float = 0.2) -> tuple[str, ...]:
        """What ftrun runs."""
        return str(PROGRAM), str(self.folder / "checkpoints"), str(steps), str(pause)

    def call(self, job: Job, command: str, *words: str) -> str:
        """What a command of ftrun says of a job, in one line; it runs on the controller's machine."""
        secret = (self.folder / f"ft-{job.number}.secret").read_text()
        where = f"{self.slurm.nodes[0]}:{PORT}"
        return joined(self.slurm.call("ftrun", command, *words, where, env={"FT_WRAPPER_SECRET": secret}))

    def status(self, job: Job) -> str:
        """What ``ftrun status`` says of a job."""
        return self.call(job, "status")

    def watch(self, job: Job) -> subprocess.Popen[str]:
        """Starts ``ftrun status --watch``; returns once it has printed a status."""
        secret = (self.folder / f"ft-{job.number}.secret").read_text()
        words = ("status", "--watch", "--interval", "0.5", f"{self.slurm.nodes[0]}:{PORT}")
        watch = self.slurm.start("env", f"FT_WRAPPER_SECRET={secret}", "ftrun", *words)
        assert watch.stdout is not None
        assert watch.stdout.readline().startswith("running"), job.describe()
        return watch

    def report(self) -> str:
        """What ``ftrun report`` says afterwards, in one line."""
        return joined(self.slurm.call("ftrun", "report", str(self.folder / "events")))


def joined(text: str) -> str:
    """In one line."""
    return " ".join(text.split())


def lost(job: Job) -> int:
    """How many steps were done more than once."""
    return len({step for (step, _), times in job.steps.items() if times > 1})


def results(job: Job) -> list[str]:
    """What the ranks returned: the digest of their weights."""
    return [line.rpartition(" ")[2] for line in job.said.splitlines() if line.startswith("RESULT")]


def entries(job: Job) -> list[int]:
    """At which steps rank 0 has entered the function."""
    return [int(step) for step in re.findall(r"^ENTER rank 0 .* at step (\d+)", job.said, re.M)]


def saved(job: Job) -> list[int]:
    """The steps of the checkpoints that a notice asked for."""
    return [step for step in map(int, re.findall(r"^SAVED step (\d+)", job.said, re.M)) if step % EVERY]


def left_files(job: Job) -> list[str]:
    """What is left in the submit folder besides logs."""
    return [path.name for path in job.folder.glob("ft-*") if path.suffix != ".log"]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """A SLURM of three nodes, for all cases."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs SLURM and root: there is no {', '.join([*missing, 'root'])}")
    with Slurm(3) as slurm:
        yield slurm


@pytest.fixture
def training(slurm: Slurm, tmp_path: Path) -> Iterator[Training]:
    """Starts jobs; nothing of them is left on a node."""
    training = Training(slurm, tmp_path)
    yield training
    for job in training.jobs:
        slurm.run("scancel", "--quiet", job.number)
    try:
        slurm.until_empty()
    finally:
        slurm.repair()


#: Variables of jobs with live state, and without.
KINDS: dict[str, dict[str, str]] = {"live": {}, "plain": {"PLAIN": "1"}}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def clean(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Job]:
    """A job of a kind without faults, which has ended."""

    @functools.cache
    def run(kind: str) -> Job:
        job = Training(slurm, tmp_path_factory.mktemp(kind)).start(**KINDS[kind])
        assert job.end() == DONE, job.describe()
        return job

    return run


@pytest.fixture
def weights(clean: Callable[[str], Job], request: pytest.FixtureRequest) -> list[str]:
    """What the ranks return without faults."""
    return results(clean("plain" if "plain" in request.node.name else "live"))


@each_kind
def test_a_clean_run(kind: str, clean: Callable[[str], Job]) -> None:
    check_clean(clean(kind))


def check_clean(clean: Job) -> None:
    """Asserts that a job has done each step once, and left nothing behind."""
    assert len(results(clean)) == 3 and len(set(results(clean))) == 1, clean.describe()
    assert lost(clean) == 0
    assert len(clean.steps) == 3 * STEPS
    assert left_files(clean) == []


def test_a_killed_rank(training: Training, weights: list[str]) -> None:
    job = training.start(hold=True)
    job.until_said("STEP 22 rank 1")
    os.kill(job.pid(1), signal.SIGKILL)
    job.until_said(
        "restart 1: rank 1", "killed by SIGKILL; 1 still running on this node; it is started again"
    )
    cause = rf"rank 1 \(slot 1 on {training.slurm.nodes[1]} pid \d+\) died"
    assert re.search(f"last fault: {cause}", training.status(job))
    assert job.end() == DONE, job.describe()
    assert lost(job) == 0
    assert results(job) == weights
    assert re.search(cause, training.report())


def test_a_killed_ftrun(training: Training, slurm: Slurm) -> None:
    """Its supervisor starts it again, and its rank comes back. The rank may see its agent's end first."""
    job = training.start(hold=True)
    job.until_said("STEP 22 rank 1")
    with training.watch(job) as watch:
        job.agent(slurm.nodes[1]).kill()
        job.until_said("was killed by SIGKILL after", "restart 2: ")
        watch.terminate()
        statuses, _ = watch.communicate(timeout=60)
    where = rf"slot 1 (\(on|on) {slurm.nodes[1]} pid \d+\)"
    saw = "raised ft_wrapper.exception.InternalError: this rank's monitor inside the agent ended"
    cause = f"{where} (was lost: node 1 has been started again|{saw})"
    assert re.search(f"last fault: .*{cause}", statuses), statuses
    assert job.end() == DONE, job.describe()
    assert lost(job) == 0
    assert len(results(job)) == 3 and len(set(results(job))) == 1, job.describe()
    assert re.search(cause, training.report())


def test_a_killed_supervisor(training: Training, slurm: Slurm) -> None:
    """With it its ftrun and its ranks are gone; the other nodes go on."""
    job = training.start(hold=True)
    job.until_said("STEP 22 rank 1")
    job.task(slurm.nodes[1]).kill()
    job.until_said("restart 1: ")
    assert f"went down with node 1 ({slurm.nodes[1]})" in training.status(job)
    assert job.end() == DONE, job.describe()
    assert lost(job) == 0
    assert len(results(job)) == 2 and len(set(results(job))) == 1, job.describe()
    assert f"no heartbeat from node 1 ({slurm.nodes[1]}) for 15 s" in job.said
    assert f"went down with node 1 ({slurm.nodes[1]})" in training.report()


def test_a_killed_slurmstepd(training: Training, slurm: Slurm, weights: list[str]) -> None:
    """SLURM knows nothing of the task from then on; it ends with the job, which loses nothing."""
    job = training.start(hold=True)
    job.until_said("STEP 22 rank 1")
    job.task(slurm.nodes[1]).parents()[1].kill()
    job.until_said("STEP 40 rank 1")
    status = training.status(job)
    assert "running: iteration 0 of call 0, 3 of 3 ranks active" in status and "last fault" not in status
    assert job.end() == DONE, job.describe()
    assert lost(job) == 0
    assert results(job) == weights
    assert "0 restarts in" in training.report()
    assert "srun: error: " in job.said


def test_a_later_node_loses_its_power(training: Training, slurm: Slurm) -> None:
    job = training.start(hold=True)
    job.until_said("STEP 22 rank 2")
    slurm.power_off(slurm.nodes[2])
    job.until_said("restart 1: ")
    assert f"went down with node 2 ({slurm.nodes[2]})" in training.status(job)
    assert job.end() == DONE, job.describe()
    assert lost(job) == 0
    assert len(results(job)) == 2 and len(set(results(job))) == 1, job.describe()
    assert f"no heartbeat from node 2 ({slurm.nodes[2]}) for 15 s" in job.said
    assert f"went down with node 2 ({slurm.nodes[2]})" in training.report()


def test_the_first_node_loses_its_power(training: Training, slurm: Slurm, weights: list[str]) -> None:
    """The store and the batch shell are lost; the other nodes end, and one of them requeues the job."""
    job = training.start()
    job.until_said("STEP 32 rank 2")
    tasks = [job.task(node) for node in slurm.nodes[1:]]
    slurm.power_off(slurm.nodes[0])
    assert psutil.wait_procs(tasks, timeout=60)[1] == [], job.describe()
    assert f"(infrastructure): the rendezvous store is lost: store at {slurm.nodes[0]}" in job.said
    until(lambda: job.shown()["Restarts"] == "1", "the job is requeued", 60, job.describe)
    slurm.power_on(slurm.nodes[0])
    assert job.end() == DONE, job.describe()
    assert entries(job)[1] % EVERY == 0 < entries(job)[1]
    assert 0 < lost(job) <= EVERY
    assert results(job) == weights
    ends = f"job {job.number}-0: .* exit code 75 \\(infrastructure\\): the rendezvous store is lost: .*"
    assert re.search(f"{ends} job {job.number}-1: ", training.report())


def test_a_node_is_set_down(training: Training, slurm: Slurm) -> None:
    job = training.start(hold=True)
    job.until_said("STEP 22 rank 2")
    slurm.call("scontrol", "update", f"nodename={slurm.nodes[2]}", "state=down", "reason=test")
    job.until_said("restart 1: ")
    assert f"went down with node 2 ({slurm.nodes[2]})" in training.status(job)
    assert job.end() == DONE, job.describe()
    assert lost(job) == 0
    assert len(results(job)) == 2 and len(set(results(job))) == 1, job.describe()
    assert f"Node failure on {slurm.nodes[2]}" in job.said
    assert f"went down with node 2 ({slurm.nodes[2]})" in training.report()


def test_a_bad_node_is_kept_out_until_it_is_repaired(training: Training, slurm: Slurm) -> None:
    broken = training.folder / f"broken-{slurm.nodes[1]}"
    broken.touch()
    check = f"test ! -e {training.folder}/broken-$(hostname) || {{ echo a broken link; exit 1; }}"
    options = ("--node-check", check, "--rdzv-conf", "last_call_timeout=3")
    job = training.start(*options, hold=True)
    job.until_said("STEP 2 rank 1")
    status = training.status(job)
    assert re.search("node 1 is kept out since .*: --node-check: a broken link", status), status
    broken.unlink()
    job.until_said(f"node 1 ({slurm.nodes[1]}) has passed its check", "has group rank 2 of 3 in round 0")
    assert job.end() == DONE, job.describe()
    assert lost(job) == 0
    assert len(set(results(job)) - {"None"}) == 1, job.describe()
    assert f"node 1 ({slurm.nodes[1]}) was kept out: --node-check: a broken link" in training.report()


def test_a_drained_node(training: Training, slurm: Slurm) -> None:
    """Its task ends early; srun would end the step 5 s later, by WaitTime, if the script let it."""
    job = training.start(hold=True)
    job.until_said("STEP 22 rank 2")
    task = job.task(slurm.nodes[2])
    training.call(job, "drain", "node:2")
    assert psutil.wait_procs([task], timeout=60)[1] == [], job.describe()
    assert re.search(r"rank 2 \(slot 2 on \S+ pid \d+\) was drained", training.status(job))
    assert job.end() == DONE, job.describe()
    assert lost(job) == 0
    assert len(results(job)) == 2 and len(set(results(job))) == 1, job.describe()
    assert re.search(r"rank 2 \(slot 2 on \S+ pid \d+\) was drained", training.report())


@each_kind
def test_a_notice_ends_nothing(kind: str, training: Training, slurm: Slurm, weights: list[str]) -> None:
    job = training.start(hold=True, **KINDS[kind])
    job.until_said("STEP 22 rank 1")
    slurm.call("scancel", "--signal=USR1", f"{job.number}.0")
    job.until_said("notice from ")
    assert re.search(r"last notice: node \d: SIGUSR1", training.status(job))
    assert job.end() == DONE, job.describe()
    assert re.search(r"notice from node \d: SIGUSR1, \d+ s left", training.report())
    assert len(saved(job)) <= 1  # none where it came in a step that saves anyway
    assert lost(job) == 0 and entries(job) == [0]
    assert results(job) == weights


@each_kind
def test_sigterm(kind: str, training: Training, slurm: Slurm, weights: list[str]) -> None:
    job = training.start(**KINDS[kind])
    job.until_said("STEP 22 rank 1")
    slurm.call("scancel", "--signal=TERM", f"{job.number}.0")
    assert job.end() == DONE, job.describe()
    goes_on_where_it_was(job, weights)
    names_the_end(job, training)


def names_the_end(job: Job, training: Training) -> None:
    """Asserts that the report says how the first attempt ended, and has the second one."""
    notice = r"node \d: SIGTERM, \d+ s left; the job ends"
    ends = rf"job {job.number}-0: .* notice from {notice} exit code 75 \(preempted\): {notice} "
    assert re.search(f"{ends}.*job {job.number}-1: ", training.report())


def test_the_status_after_sigterm(training: Training, slurm: Slurm) -> None:
    """The job ends when its next step begins, which is so long that the status can be asked for before."""
    job = training.start(pause=8.0)
    job.until_said("STEP 2 rank 1")
    slurm.call("scancel", "--signal=TERM", f"{job.number}.0")
    job.until_said("; the job ends")
    status = training.status(job)
    assert re.search(r"last notice: node \d: SIGTERM; the job ends", status), status
    assert " leaving " in status


def goes_on_where_it_was(job: Job, weights: list[str]) -> None:
    """Asserts that an end was announced, and cost no step."""
    assert job.shown()["Restarts"] == str(job.said.count("ends with 75")) != "0"
    assert re.search(r"exit code 75 \(preempted\): node \d: SIGTERM", job.said)
    assert lost(job) == 0
    assert {0, *saved(job)} >= {step for step in entries(job) if step % EVERY}
    assert results(job) == weights


def test_the_time_limit(training: Training, weights: list[str]) -> None:
    job = training.start(sbatch=("--time=2", "--signal=B:USR1@25"), pause=0.8)
    assert job.end() == DONE, job.describe()
    goes_on_where_it_was(job, weights)
    names_the_end(job, training)


@each_kind
def test_preemption(kind: str, training: Training, slurm: Slurm, weights: list[str]) -> None:
    job = training.start(**KINDS[kind])
    job.until_said("STEP 22 rank 1")
    urgent = training.submit("--partition=high", "--nodes=3", "--wrap=srun hostname")
    assert urgent.end() == DONE, job.describe()
    assert job.end() == DONE, job.describe()
    goes_on_where_it_was(job, weights)
    names_the_end(job, training)


def test_a_chain_of_jobs(training: Training, slurm: Slurm, weights: list[str]) -> None:
    """Where jobs must not be requeued. While another job is queued, scancel signals a step twice."""
    first = training.start(sbatch=("--no-requeue",))
    second = training.start(sbatch=("--no-requeue", f"--dependency=afternotok:{first.number}"))
    first.until_said("STEP 22 rank 1")
    slurm.call("scancel", "--signal=TERM", f"{first.number}.0")
    assert first.end() == "FAILED 75:0", first.describe()
    assert second.end() == DONE, second.describe()
    assert lost(second) == 0  # of both: they write into one folder
    assert results(second) == weights
    assert re.search(rf"job {first.number}-0: .* exit code 75 \(preempted\): .*", training.report())


def test_a_cancelled_job_saves_and_is_not_requeued(training: Training, slurm: Slurm) -> None:
    job = training.start()
    job.until_said("STEP 22 rank 1")
    slurm.call("scancel", job.number)
    slurm.until_empty()
    assert job.state.startswith("CANCELLED"), job.describe()
    assert saved(job) or "SAVED step 40" in job.said, job.describe()
    assert job.shown()["Restarts"] == "0"
    assert left_files(job) == []
    assert re.search(r"exit code 75 \(preempted\): node \d: SIGTERM", training.report())


def test_a_second_step(training: Training, slurm: Slurm) -> None:
    """Its tasks count from 0 again, too: with an id of its own it comes in, without one it is refused."""
    job = training.start(hold=True)
    job.until_said("STEP 2 rank 2")
    with second_step(training, job) as refused:
        said, _ = refused.communicate(timeout=120)
    assert refused.returncode == 2, said
    assert "node id '0', from SLURM_PROCID or JOB_COMPLETION_INDEX, belongs to a live agent" in said
    status = training.status(job)
    assert "3 of 3 ranks active" in status and "last fault" not in status
    cause = r"slot 2 \(on \S+ pid \d+\) was lost: node 2 has been started again"
    with training.watch(job) as watch:
        job.task(slurm.nodes[2]).kill()
        with second_step(training, job, "--node-id", "2") as step:
            until(lambda: job.said.count("ENTER rank 0 of 3") == 2, "its rank is in", said=job.describe)
            watch.terminate()
            statuses, _ = watch.communicate(timeout=60)
            job.go_on()
            said, _ = step.communicate(timeout=180)
    assert re.search(f"last fault: {cause}", statuses), statuses
    assert step.returncode == 0, said
    assert "ENTER rank 2 of 3" in said
    assert job.end() == DONE, job.describe()
    assert lost(job) == 0
    assert [line.rpartition(" ")[2] for line in said.splitlines() if "RESULT" in line] == results(job)[:1]
    assert re.search(cause, training.report())


def second_step(training: Training, job: Job, *options: str) -> subprocess.Popen[str]:
    """Starts another ftrun on the third node."""
    slurm = training.slurm
    secret = str(training.folder / f"ft-{job.number}.secret")
    where = (f"--jobid={job.number}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={slurm.nodes[2]}")
    meeting = ("--rdzv-endpoint", f"{slurm.nodes[0]}:{PORT}", "--rdzv-id", f"{job.number}-0")
    ftrun = ("ftrun", "--nnodes", "2:3", "--nproc-per-node", "1", *meeting, "--job-secret-file", secret)
    return slurm.start("srun", *where, *ftrun, *options, *training.work())


A_TASK_A_RANK = """#!/bin/bash
#SBATCH --ntasks-per-node=1 --no-kill
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1) MASTER_PORT=29500
srun --wait=0 --kill-on-bad-exit=0 --no-kill --output=ft-%j-%N.log bash -c '
    export FT_WRAPPER_EVENTS=$PWD/events/events-$SLURMD_NODENAME.jsonl
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
    exec python "$@"' rank "$@"
"""


def test_a_task_for_each_rank(training: Training) -> None:
    """Without ftrun: no rank is started again, and the job ends with the exit code of the killed one."""
    script = training.folder / "ranks.sbatch"
    script.write_text(A_TASK_A_RANK)
    (training.folder / "events").mkdir()
    job = training.submit("--nodes=3", str(script), *training.work())
    job.until_said("STEP 22 rank 1")
    os.kill(job.pid(1), signal.SIGKILL)
    assert job.end() == "FAILED 137:0", job.describe()
    assert lost(job) == 0
    assert len(results(job)) == 2 and len(set(results(job))) == 1, job.describe()
    cause = r"rank 1 \(slot 1 on \S+ pid \d+\) died"
    assert re.search(f"restart 1: {cause}", job.said)
    assert re.search(cause, training.report())


def test_out_of_memory(training: Training, slurm: Slurm, weights: list[str]) -> None:
    """The kernel ends the rank that takes too much of its job's memory."""
    job = training.start(sbatch=("--mem=1500",), hold=True, HUNGRY="1")
    job.until_said("restart 1: ")
    where = rf"rank 1 \(slot 1 on {slurm.nodes[1]} pid \d+\)"
    cause = rf"{where} died \(out of memory\? the kernel has killed 1\)"
    assert re.search(f"last fault: {cause}", training.status(job))
    assert job.end() == DONE, job.describe()
    assert "killed by SIGKILL (out of memory? the kernel has killed 1 meanwhile)" in job.said
    assert lost(job) == 0
    assert results(job) == weights
    assert re.search(cause, training.report())
