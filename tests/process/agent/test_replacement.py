"""Ranks that are replaced alone, and groups that are started again, under ftrun."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_job import FtRun, write_script
from support.nightly import at_night

ALONE = ("--restart-policy", "rank")


def test_the_others_wait_for_a_replacement(tmp_path: Path) -> None:
    """They know that one is coming: no one else would keep them from going on at once, one fewer."""
    source = write_script(
        tmp_path,
        """
        import os, signal, time
        from ft_wrapper import CallWrapper, Limits, Wrapper
        from ft_wrapper.protocol import Agreement
        from ft_wrapper.store import TCPStore

        @Wrapper(rejoin=True, min_world_size=1, limits=Limits(rejoin_wait=60))
        def train(call_wrapper: CallWrapper = None):
            if call_wrapper.iteration > 0:
                print(f"{call_wrapper.iteration}: rank {call_wrapper.state.rank} "
                      f"of {call_wrapper.state.world_size}\\n", end="")
                return
            if os.environ["RANK"] == "1":
                host, _, port = os.environ["FT_WRAPPER_STORE"].rpartition(":")
                store = TCPStore(host, int(port))
                while Agreement(store).iterations.active_target() < 2:  # until then the target may be one
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                time.sleep(0.01)

        train()
        """,
    )
    with FtRun(tmp_path / "job", "--nproc-per-node", "2", source) as job:
        assert job.end() == 0, job.said
        assert "1: rank 0 of 2\n" in job.said
        assert "1: rank 1 of 2\n" in job.said
        assert [len(job.pids(rank)) for rank in range(2)] == [1, 2]


def test_a_job_that_nobody_can_join_goes_on_without_its_dead(tmp_path: Path) -> None:
    source = write_script(
        tmp_path,
        """
        import os, signal
        from ft_wrapper import CallWrapper, Wrapper

        @Wrapper(rejoin=False)
        def train(call_wrapper: CallWrapper = None):
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            while call_wrapper.iteration == 0:
                signal.sigtimedwait([], 0.01)

        train()
        """,
    )
    with FtRun(tmp_path / "job", "--nproc-per-node", "2", source) as job:
        assert job.end() == 0, job.said
        assert "joining a running job takes @Wrapper(rejoin=True)" in job.said
        assert len(job.pids(1)) == 1


CRASHES = """
    import os, sys
    incarnation = int(os.environ["FT_WRAPPER_INCARNATION"])
    print("incarnation", incarnation, file=sys.stderr)
    if os.environ["RANK"] == "1" and incarnation < int(sys.argv[1]):
        sys.exit(1 + incarnation)
"""


def test_a_budget_that_is_used_up(tmp_path: Path) -> None:
    options = ["--nproc-per-node", "2", *ALONE, "--max-rank-restarts", "2", "-r", "3"]
    logs = tmp_path / "logs"
    with FtRun(
        tmp_path / "job", *options, "--log-dir", str(logs), write_script(tmp_path, CRASHES), "9"
    ) as job:
        assert job.end() == 1
        ends = [(record["rank"], record["exitcode"]) for record in job.events("rank_ended")]
        assert sorted(ends) == [(0, 0), (1, 1), (1, 2), (1, 3)]
        assert "it is started again (1 of 2)" in job.said
        assert "it is started again in 0.5 s (2 of 2)" in job.said
        assert "not started again: --max-rank-restarts 2 within 60 min of running" in job.said
        table = job.said[job.said.index("1 of 2 ranks failed, 3 times in all") :].splitlines()
        assert [line.split()[0] for line in table[2:5]] == ["1", "1", "1"]
        assert table[4].endswith("/1/incarnation_2/stderr.log")
    (folder,) = logs.glob("*/attempt_0/1")
    assert (folder / "stderr.log").read_text() == "incarnation 0\n"
    assert (folder / "incarnation_2" / "stderr.log").read_text() == "incarnation 2\n"


@pytest.mark.parametrize("does", ["trains", *at_night("one that trains runs always", ["waits"])])
def test_a_rank_whose_abort_hangs_is_replaced(tmp_path: Path, does: str) -> None:
    """It would not come back by itself: its monitor ends it at hard_timeout, also if it makes progress."""
    source = write_script(
        tmp_path,
        """
        import os, sys, time
        import torch
        import torch.distributed as dist
        from ft_wrapper import CallWrapper, Limits, Wrapper
        from ft_wrapper.monitor import threads
        from ft_wrapper.testing import OnAbort, blocking_backend

        threads._ABORT_PATIENCE = 0.1

        @Wrapper(rejoin=True, min_world_size=2, soft_timeout=2, hard_timeout=3, heartbeat_timeout=30,
                 monitor_thread_interval=0.2, monitor_process_interval=0.2, progress_watchdog_interval=0.2,
                 heartbeat_interval=0.2, limits=Limits(rejoin_wait=60))
        def train(call_wrapper: CallWrapper = None):
            if call_wrapper.iteration > 0:
                print(f"{call_wrapper.iteration}: rank {call_wrapper.state.rank} "
                      f"of {call_wrapper.state.world_size}\\n", end="")
                return
            hangs = os.environ["RANK"] == "0"
            dist.init_process_group(blocking_backend(OnAbort.HANGS if hangs else OnAbort.RETURNS))
            group = dist.new_group(backend=blocking_backend())
            store = dist.distributed_c10d._get_default_store()
            if not hangs:
                store.wait(["rank 0 has its groups"])
                raise ValueError("as planned")
            store.set("rank 0 has its groups", "")
            while sys.argv[1] == "trains":
                call_wrapper.ping()
                time.sleep(0.01)
            dist.all_reduce(torch.ones(1), group=group)

        train()
        """,
    )
    with FtRun(tmp_path / "job", "--nproc-per-node", "2", source, does) as job:
        assert job.end() == 0, job.said
        assert "1: rank 0 of 2\n" in job.said
        assert "1: rank 1 of 2\n" in job.said
        assert "abort has not returned for 0.1 s (group 0 of blocking-hangs)" in job.said
        assert [len(job.pids(rank)) for rank in range(2)] == [2, 1]
