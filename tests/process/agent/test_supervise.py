"""``ftrun --supervise``: a killed agent comes back in its place; signals and exit codes pass through."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import psutil
import pytest
from agent_job import TIMEOUT, FtRun, all_gone, await_that, write_script
from test_nodes import WRAPPED, Cluster, pids_of, places
from training import Training

from ft_wrapper.agent import options
from ft_wrapper.cli.main import main
from ft_wrapper.rendezvous.node_ids import NODE_ID_ENV
from ft_wrapper.testing import EtcdServer

STANDS_IN = Path(__file__).with_name("supervised.py")
BY_EXEC = ("env",)
"""In front of ftrun, so that it is started as ever: a supervisor without torch."""
SLEEPS = "import pathlib, time; pathlib.Path('in').touch(); time.sleep(1000)"


# Which command it is --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "is_wanted"),
    [
        ("--supervise train.py --x", True),
        ("--nnodes 2 --supervise -m train --supervise", True),
        ("-t3 -r 1 --standalone --nproc_per_node=2 --superv train.py", True),
        ("train.py --supervise", False),
        ("--nnodes 2 train.py --supervise", False),
        ("-m --virtual-local nowhere --supervise", False),
    ],
)
def test_the_option_is_found_before_the_script(
    words: str, is_wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(sys, "argv", ["ftrun", *words.split()])
    monkeypatch.setattr(os, "execv", mock.Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError if is_wanted else SystemExit):  # there is no such script
        options.parse_args(words.split())
    assert (NODE_ID_ENV in os.environ) == is_wanted


@pytest.mark.parametrize("index", [None, "1"])
def test_the_index_of_a_scheduler_is_none_that_the_user_gives(
    index: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent with an index waits for a living one, which a second job step has perhaps."""
    monkeypatch.setenv(NODE_ID_ENV, index or "host-1")
    if index is not None:
        monkeypatch.setenv("JOB_COMPLETION_INDEX", index)
    words = ["--supervise", "--nnodes", "2", "--rdzv-endpoint", "a:1", write_script(tmp_path, "")]
    parameters = options.parse_args(words).rendezvous
    assert parameters is not None and parameters.config.get("node_id") == (None if index else "host-1")


def test_a_variable_asks_for_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_SUPERVISE", "1")
    monkeypatch.setenv(NODE_ID_ENV, "3")
    monkeypatch.setattr(os, "execv", mock.Mock(side_effect=InterruptedError))
    with pytest.raises(SystemExit):  # it is supervised already; there is no such script
        options.parse_args(["train.py"])
    assert NODE_ID_ENV not in os.environ, "its ranks may start a job of their own"
    monkeypatch.setattr(sys, "argv", ["ftrun", "train.py"])
    with pytest.raises(InterruptedError):
        options.parse_args(["train.py"])


def test_a_program_that_calls_main_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--supervise", "train.py"])
    assert "use the command ftrun" in capsys.readouterr().err


def test_it_imports_no_torch() -> None:
    code = "import sys, ft_wrapper.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT).returncode == 0


# The end of the agent -------------------------------------------------------------------------------------


def run_stand_in(*does: object) -> subprocess.CompletedProcess[str]:
    """Runs a supervisor whose agent does something, to its end."""
    command = [sys.executable, str(STANDS_IN), "--supervise", *map(str, does)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)


def test_exit_codes_pass_through() -> None:
    draw = random.Random(7)
    for code in (0, 1, 2, 75, 76, *draw.sample(range(3, 256), 8)):
        done = run_stand_in("exit", code)
        assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_the_third_death_is_the_last(signum: signal.Signals) -> None:
    done = run_stand_in("die", int(signum))
    assert done.returncode == 128 + signum
    first, second, third = done.stderr.splitlines()
    killed = rf"ftrun \(pid \d+\) was killed by {signum.name} after \d+ s; "
    assert re.search(killed + r"starting it again \(1 of 2 within 10 min\)$", first)
    assert re.search(killed + r"starting it again \(2 of 2 within 10 min\)$", second)
    ago = ", ".join([rf"{signum.name} \d+ s ago"] * 3)
    assert re.search(killed + f"it is not started again: 3 deaths within 10 min, by {ago}$", third)


# Signals --------------------------------------------------------------------------------------------------


class StandIn:
    """A supervisor that runs, with an agent that listens; they have a terminal of their own.

    Args:
        does: what the agent does.
        before: what to put in front of the command; a program that starts it as its child.
    """

    def __init__(self, does: str, before: Sequence[str] = ()) -> None:
        pid, self._terminal = pty.fork()
        if pid == 0:
            command = [*before, sys.executable, str(STANDS_IN), "--supervise", does]
            os.execvp(command[0], command)
        self._process, self._said = psutil.Process(pid), ""
        self.await_starts(1)
        self.supervisor = self._process.children()[0] if before else self._process

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.supervisor.kill()  # its agent dies with it
        self._process.wait(TIMEOUT)
        os.close(self._terminal)

    def _read_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert select.select([self._terminal], [], [], TIMEOUT)[0], f"it has said only: {self._said}"
            self._said += os.read(self._terminal, 4096).decode()

    def press_ctrl_c(self) -> None:
        """The terminal signals the process group."""
        os.write(self._terminal, b"\x03")

    def signal(self, signum: signal.Signals = signal.SIGINT) -> None:
        """Signals the supervisor alone, as Kubernetes does."""
        self.supervisor.send_signal(signum)

    def signal_all(self) -> None:
        """Signals every process, as SLURM does."""
        for process in [self.supervisor, *self.supervisor.children()]:
            process.send_signal(signal.SIGINT)

    def signal_all_from_below(self) -> None:
        """The same, the agent first."""
        for process in [*self.supervisor.children(), self.supervisor]:
            process.send_signal(signal.SIGINT)

    def got(self) -> list[str]:
        """The signals that the agent has read so far."""
        return re.findall(r"got (\w+)", self._said)

    def await_starts(self, count: int) -> None:
        """Waits until so many agents have been started, and listen."""
        self._read_until(lambda: self._said.count("listens") >= count)

    def await_signals(self, count: int) -> None:
        """Waits until the agent has read so many."""
        self._read_until(lambda: len(self.got()) >= count)

    def end(self) -> int:
        """Ends it by SIGTERM, which is the last signal that the agent reads; returns the exit code."""
        self.signal(signal.SIGTERM)
        self._read_until(lambda: "SIGTERM" in self.got())
        return self.await_end()

    def await_end(self) -> int:
        """Waits for the end of the supervisor; returns the exit code."""
        return int(self._process.wait(TIMEOUT))


@pytest.mark.parametrize(
    "send", [StandIn.press_ctrl_c, StandIn.signal, StandIn.signal_all, StandIn.signal_all_from_below]
)
def test_the_agent_gets_each_signal_once(send: Callable[[StandIn], None]) -> None:
    """It is signalled by the terminal or SLURM, and by its supervisor; or by its supervisor alone."""
    with StandIn("listen") as running:
        for count in (1, 2, 3):
            send(running)
            running.await_signals(count)
        assert running.end() == 0
    assert running.got() == ["SIGINT", "SIGINT", "SIGINT", "SIGTERM"]


def test_an_agent_that_is_killed_after_a_notice_comes_back_and_after_another_signal_it_does_not() -> None:
    with StandIn("listen") as running:
        for count, signum in enumerate((signal.SIGUSR1, signal.SIGINT), 1):
            running.await_starts(count)
            running.signal(signum)
            running.await_signals(count)
            running.supervisor.children()[0].kill()
        assert running.await_end() == 128 + signal.SIGKILL
    assert running.got() == ["SIGUSR1", "SIGINT"]


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a namespace of processes, which takes root")
def test_as_first_process_of_a_container_it_forwards_and_reaps() -> None:
    container = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    with StandIn("orphan", container) as running:
        await_that(lambda: len(running.supervisor.children(recursive=True)) == 1)
        running.signal(signal.SIGUSR1)
        running.await_signals(1)
        running.signal()
        running.await_signals(2)
        assert running.end() == 0
    assert running.got() == ["SIGUSR1", "SIGINT", "SIGTERM"]


# Whole jobs -----------------------------------------------------------------------------------------------


def agent_of(node: FtRun) -> psutil.Process:
    """The agent of a supervised node."""
    (agent,) = psutil.Process(node.process.pid).children()
    return agent


def kill_agent(node: FtRun) -> None:
    """Kills it; returns once another one runs."""
    killed = agent_of(node)
    killed.kill()
    await_that(lambda: [c for c in psutil.Process(node.process.pid).children() if c != killed] != [], node)


@pytest.mark.parametrize("by", ["user", "SLURM", "none"])
def test_a_killed_agent_takes_its_old_place(
    by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an id from the user, from SLURM, or from the supervisor."""
    result = tmp_path / "result"
    with Cluster(tmp_path, WRAPPED, nnodes="1:2") as cluster:
        cluster.host_store()
        # Longer than an agent takes to start: it has to take the place of one that is not lost yet.
        cluster._conf = cluster._conf.replace("max_attempt=10", "max_attempt=120")
        a = cluster.start("0")
        began = cluster.await_inside(1, a)
        environment = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"} if by == "SLURM" else {}
        b = cluster.start(
            "1" if by == "user" else "",
            "--supervise",
            "--result-file",
            str(result),
            before=BY_EXEC,
            environment=environment,
        )
        before = cluster.await_inside(2, a, b)
        where = places(cluster, capsys)
        kill_agent(b)
        after = cluster.await_inside(2, a, b)
        assert places(cluster, capsys) == where
        assert after[0]["pid"] == before[0]["pid"] == began[0]["pid"]
        assert pids_of(b) == {1: [before[1]["pid"], after[1]["pid"]]}
        cluster.finish(a, b)
    assert "was killed by SIGKILL after" in b.said and "starting it again (1 of 2 within 10 min)" in b.said
    assert "is in use" not in b.said, "it waited for its own old place"
    assert "no heartbeat from" not in a.said, "the old place was lost before"
    assert json.loads(result.read_text())["verdict"] == "done"


def test_no_step_is_lost_with_an_agent_and_the_job_ends_well(tmp_path: Path) -> None:
    """On etcd, where no agent hosts a store: the first one may be killed, too."""
    with EtcdServer() as etcd, Training(tmp_path, etcd.endpoints, nnodes="2") as cluster:
        nodes = [cluster.start(str(number), "--supervise", before=BY_EXEC) for number in range(2)]
        for node in nodes:
            iteration = cluster.await_active([0, 1, 2, 3], *nodes)
            cluster.go_on(*nodes)
            kill_agent(node)
            await_that(lambda: cluster.trained()[0] > iteration, *nodes)  # noqa: B023
        cluster.go_on(*nodes)
        cluster.finish(*nodes)
    assert [len(pids) for node in nodes for pids in pids_of(node).values()] == [2] * 4


def test_a_signal_to_the_supervisor_ends_the_job_and_starts_nothing(tmp_path: Path) -> None:
    script = write_script(tmp_path, SLEEPS)
    with FtRun(tmp_path / "job", "--supervise", "--nproc-per-node", "2", script, before=BY_EXEC) as job:
        job.await_file(tmp_path / "job" / "in")
        family = job.family()
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 128 + signal.SIGTERM, job.said
        assert all_gone(family, TIMEOUT) == []
    assert job.said.count("SIGTERM: forwarded to") == 1
    assert "starting it again" not in job.said


def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    script = write_script(tmp_path, SLEEPS)
    with FtRun(tmp_path / "job", "--supervise", script, before=BY_EXEC) as job:
        job.await_file(tmp_path / "job" / "in")
        family = job.family()
        assert len(family) >= 3, "the agent, its template and the rank"
        job.process.kill()
        assert all_gone(family, TIMEOUT) == []


def test_exit_codes_and_lines_of_a_job_pass_through(tmp_path: Path) -> None:
    done = {}
    for words in (
        "--nproc-per-node 0 x.py",
        "--node-check false --node-check-retries 0 script.py",
        "script.py",
    ):
        script = write_script(tmp_path, "import sys; sys.exit(3)")
        arguments = words.replace("script.py", script).split(" ", 4)
        with FtRun(tmp_path / "job", *arguments, before=BY_EXEC, environment={"PET_SUPERVISE": "1"}) as job:
            done[words] = job.end()
    assert list(done.values()) == [2, 76, 1], job.said
