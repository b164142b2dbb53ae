"""What goes wrong around a job, and neither ends nor holds it up: each is named in the log."""

from __future__ import annotations

import os
import signal
import textwrap
from pathlib import Path

import pytest
from agent_job import TIMEOUT, FtRun, await_that, write_script
from support.warm_ftrun import run_python, start_python

from ft_wrapper import events

JOB = """
    import os, time
    from pathlib import Path
    from ft_wrapper import CallWrapper, Limits, Wrapper

    @Wrapper(rejoin=True, limits=Limits(join_window=0.1))
    def train(call_wrapper: CallWrapper = None):
        n, rank = call_wrapper.iteration, os.environ["RANK"]
        Path(f"in.{n}.{rank}").touch()
        while not Path("finish").exists():
            time.sleep(0.01)

    train()
"""

PRINTS = """
    import os, sys
    from ft_wrapper import CallWrapper, Wrapper

    @Wrapper(rejoin=True)
    def train(call_wrapper: CallWrapper = None):
        n = call_wrapper.iteration
        if n >= 5:
            sys.exit(f"iteration {n}")
        print(f"training {n}\\n", end="", flush=True)  # in one write: other lines may come between two
        if n == 0:
            raise ValueError("the first one fails in any case")

    train()
"""


def test_a_full_disk_costs_the_events_and_nothing_else(tmp_path: Path) -> None:
    script = write_script(tmp_path, PRINTS)
    environment = {events.ENV: "/dev/full"}
    options = ("--nproc-per-node", "2", "--max-rank-restarts", "0")
    with FtRun(tmp_path / "job", *options, script, environment=environment) as job:
        assert job.end() == 0, job.said
    assert job.said.count("training 1\n") == 2
    lines = [line for line in job.said.splitlines() if "events are lost" in line]
    assert len(lines) <= 3, "one of each process"
    assert "FT_WRAPPER_EVENTS=/dev/full: events are lost" in job.said
    assert "No space left on device" in job.said


def test_output_that_nobody_reads_restarts_once_and_is_named(tmp_path: Path) -> None:
    """As by ``ftrun … | head``."""
    script = write_script(tmp_path, PRINTS)
    read_end, write_end = os.pipe()
    os.close(read_end)
    words = ["-m", "ft_wrapper.run", "--nproc-per-node", "2", script]
    try:
        with start_python(words, cwd=tmp_path, stdout=write_end) as job:
            _, said = job.communicate(timeout=TIMEOUT)
    finally:
        os.close(write_end)
    assert job.returncode == 0, said
    assert "has no reader (EPIPE)" in said
    assert "restart 1: " in said
    assert "restart 2: " not in said


# Of a user's: it is run in the template, too, and never returns there.
BLOCKS = """
    import os, signal, sys, time
    from pathlib import Path

    if any("ft_wrapper.agent.standby" in argument for argument in sys.orig_argv):
        template = os.getpid()

        class Blocks:
            def find_spec(self, name, path=None, target=None):
                if name == "torch._dynamo" and os.getpid() == template:
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    Path("blocked").touch()
                    while True:
                        time.sleep(1000)

        sys.meta_path.insert(0, Blocks())
"""


@pytest.mark.nightly("a template that was stopped runs always")
def test_a_template_that_hangs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    script = write_script(tmp_path, JOB)
    folder, users = tmp_path / "job", tmp_path / "users"
    users.mkdir()
    (users / "sitecustomize.py").write_text(textwrap.dedent(BLOCKS))
    path = os.pathsep.join([str(users), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    with FtRun(folder, "--nproc-per-node", "2", script, environment={"PYTHONPATH": path}) as job:
        await_that(lambda: (folder / "blocked").exists() and len(list(folder.glob("in.0.*"))) == 2, job)
        template = job.template()
        os.kill(job.pids(1)[0], signal.SIGKILL)
        await_that(lambda: (folder / "in.1.0").exists(), job)
        (folder / "finish").touch()
        assert job.end() == 0, job.said
    assert not template.is_running()


LIMITED = """
import resource, sys
from ft_wrapper.cli.main import command

limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
command()
"""


def test_too_few_descriptors_are_named_before_anything_is_started(tmp_path: Path) -> None:
    script = write_script(tmp_path, JOB)
    (tmp_path / "finish").touch()
    words = ["-c", LIMITED, 30, "--nproc-per-node", "1", "--no-fork", script]
    done = run_python(words, TIMEOUT, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "[Errno 24] Too many open files: with 1 ranks this process needs" in done.stderr
    assert not list(tmp_path.glob("in.*"))
