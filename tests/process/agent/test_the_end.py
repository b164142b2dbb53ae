"""Nothing is left of a job, whatever ends ftrun."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path

import psutil
import pytest
from agent_job import FtRun, all_gone, await_that
from support.nightly import at_night
from test_nodes import LONG_CALL, WRAPPED, Cluster

WITHIN = 10.0
"""Seconds within which all that an agent has started is gone; the shutdown timeout is half of that."""

ON_ONE_NODE = [pytest.mark.nightly("test_nothing_is_left has this signal on one node")]

JOB = """
    import os, time
    from ft_wrapper import CallWrapper, Wrapper

    @Wrapper(rejoin=True)
    def train(call_wrapper: CallWrapper = None):
        open(f"in.{os.environ['RANK']}.{call_wrapper.iteration}", "w").close()
        while True:
            time.sleep(0.05)

    train()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL", *at_night("SIGTERM runs always", ["SIGINT"])])
def test_nothing_is_left(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "job"
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(JOB))
    signum = signal.Signals[name]
    with FtRun(folder, "--nproc-per-node", "2", str(script)) as job:
        for rank in range(2):
            job.await_file(folder / f"in.{rank}.0")
        family = job.family()
        # Two ranks and the template; their monitors are inside ftrun.
        assert len(family) >= 3
        job.process.send_signal(signum)
        left = all_gone(family, WITHIN)
        assert left == [], job.said
        assert job.end() == (-signum if signum == signal.SIGKILL else 128 + signum)
        assert "ranks failed" not in job.said


NOTING = """
    import os, signal, sys, time

    def note(signum, frame):
        with open("noted", "a") as file:
            file.write(signal.Signals(signum).name + " ")

    signal.signal(getattr(signal, sys.argv[1]), note)
    open("there", "w").close()
    while not os.path.exists("end"):
        time.sleep(0.02)
"""


@pytest.mark.parametrize(
    ("name", "to_all"),
    [
        ("SIGTERM", True),
        *at_night("SIGTERM to all runs always", [("SIGTERM", False), ("SIGHUP", True), ("SIGHUP", False)]),
    ],
)
def test_ranks_get_a_signal_once(tmp_path: Path, name: str, to_all: bool) -> None:
    """As a step of SLURM's: its signals go to each process."""
    folder, script = tmp_path / "job", tmp_path / "script.py"
    script.write_text(textwrap.dedent(NOTING))
    with FtRun(folder, "--shutdown-timeout", "60", str(script), name) as job:
        job.await_file(folder / "there")
        signum = signal.Signals[name]
        for process in [psutil.Process(job.process.pid), *(job.family() if to_all else [])]:
            process.send_signal(signum)
        job.await_file(folder / "noted")
        if to_all:
            await_that(lambda: "signalled each rank" in job.said, job)
        (folder / "end").touch()
        assert job.end() == 128 + signum
        assert (folder / "noted").read_text() == f"{name} ", job.said


# Nothing that a signal's handler could do, and no thread of this process, frees it.
STUCK = """
    import os, signal
    from ft_wrapper import CallWrapper, Wrapper
    from ft_wrapper.testing.inject_fault import FaultKind, inject_fault

    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    @Wrapper(rejoin=True)
    def train(call_wrapper: CallWrapper = None):
        open(f"in.{os.environ['RANK']}.{call_wrapper.iteration}", "w").close()
        inject_fault(FaultKind.GIL)

    train()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_nothing_is_left_of_ranks_that_are_stuck_and_ignore_signals(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "job"
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(STUCK))
    signum = signal.Signals[name]
    with FtRun(folder, "--nproc-per-node", "2", str(script)) as job:
        for rank in range(2):
            job.await_file(folder / f"in.{rank}.0")
        family = job.family()
        job.process.send_signal(signum)
        assert all_gone(family, WITHIN) == [], job.said
        assert job.end() == (-signum if signum == signal.SIGKILL else 128 + signum)


# On the node that stays all is well; on the other one a rank is stuck.
STUCK_ON_ONE = WRAPPED.replace(
    """        while not os.path""",
    """        if os.environ["RANK"] == "3" and "SIGINT" not in sys.argv:
            import signal
            from ft_wrapper.testing.inject_fault import FaultKind, inject_fault
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            inject_fault(FaultKind.GIL)
        while not os.path""",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("SIGINT", marks=ON_ONE_NODE),
        pytest.param("SIGTERM", marks=ON_ONE_NODE),
        "SIGKILL",
    ],
)
def test_nothing_is_left_on_one_of_two_nodes_and_the_other_goes_on(tmp_path: Path, name: str) -> None:
    signum = signal.Signals[name]
    with Cluster(tmp_path, STUCK_ON_ONE, nnodes="1:2", nproc=2) as cluster:
        cluster.arguments.append(name)
        last_call = ("--rdzv-conf", LONG_CALL)
        stays, goes = cluster.start("0", *last_call), cluster.start("1", *last_call)
        before = cluster.await_inside(4, stays, goes)
        await_that(lambda: "a job has formed" in stays.said, stays)
        family = goes.family()
        goes.process.send_signal(signum)
        assert all_gone(family, WITHIN) == [], goes.said
        assert goes.end() == (-signum if signum == signal.SIGKILL else 128 + signum)
        left = cluster.await_inside(2, stays)
        assert [rank["pid"] for rank in left] == [rank["pid"] for rank in before[:2]]
        cluster.finish(stays)
