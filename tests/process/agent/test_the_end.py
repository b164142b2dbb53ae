"""Nothing is left of a job, whatever ends ftrun."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest
from agent_job import TIMEOUT, FtRun, all_gone, await_that, write_script
from support.nightly import at_night
from test_nodes import LONG_CALL, WRAPPED, Cluster

WITHIN = 10.0
"""Seconds within which all that an agent has started is gone; the shutdown timeout is half of that."""

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


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("trains", "SIGKILL"),
        ("is stuck", "SIGTERM"),
        *at_night(
            "each of both runs always", [("trains", "SIGTERM"), ("trains", "SIGINT"), ("is stuck", "SIGKILL")]
        ),
    ],
)
def test_nothing_is_left(tmp_path: Path, source: str, name: str) -> None:
    """Also of ranks that are stuck and ignore signals."""
    signum = signal.Signals[name]
    folder, script = tmp_path / "job", write_script(tmp_path, {"trains": JOB, "is stuck": STUCK}[source])
    with FtRun(folder, "--nproc-per-node", "2", script) as job:
        for rank in range(2):
            job.await_file(folder / f"in.{rank}.0")
        family = job.family()
        # Two ranks and the template; their monitors are inside ftrun.
        assert len(family) >= 3
        job.process.send_signal(signum)
        assert all_gone(family, WITHIN) == [], job.said
        assert job.end() == (-signum if signum == signal.SIGKILL else 128 + signum)
        assert source == "is stuck" or "ranks failed" not in job.said


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
    folder, script = tmp_path / "job", write_script(tmp_path, NOTING)
    with FtRun(folder, "--shutdown-timeout", "60", script, name) as job:
        job.await_file(folder / "there")
        signum = signal.Signals[name]
        if to_all:  # while ftrun stands still: on a busy machine they may come too late to be one sender's
            job.process.send_signal(signal.SIGSTOP)
            template = os.pidfd_open(job.template().pid)
            for process in job.family():
                process.send_signal(signum)
            assert select.select([template], [], [], TIMEOUT)[0]
            os.close(template)
        job.process.send_signal(signum)
        job.process.send_signal(signal.SIGCONT)
        job.await_file(folder / "noted")
        if to_all:
            await_that(lambda: "signalled each rank" in job.said, job)
        (folder / "end").touch()
        assert job.end() == 128 + signum
        assert (folder / "noted").read_text() == f"{name} ", job.said


# On the node that stays all is well; on the other one a rank is stuck.
STUCK_ON_ONE = WRAPPED.replace(
    """        while not os.path""",
    """        if os.environ["RANK"] == "3":
            import signal
            from ft_wrapper.testing.inject_fault import FaultKind, inject_fault
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            inject_fault(FaultKind.GIL)
        while not os.path""",
)


def test_nothing_is_left_on_one_of_two_nodes_and_the_other_goes_on(tmp_path: Path) -> None:
    with Cluster(tmp_path, STUCK_ON_ONE, nnodes="1:2", nproc=2) as cluster:
        last_call = ("--rdzv-conf", LONG_CALL)
        stays, goes = cluster.start("0", *last_call), cluster.start("1", *last_call)
        before = cluster.await_inside(4, stays, goes)
        await_that(lambda: "a job has formed" in stays.said, stays)
        family = goes.family()
        goes.process.kill()
        assert all_gone(family, WITHIN) == [], goes.said
        assert goes.end() == -signal.SIGKILL
        left = cluster.await_inside(2, stays)
        assert [rank["pid"] for rank in left] == [rank["pid"] for rank in before[:2]]
        cluster.finish(stays)
