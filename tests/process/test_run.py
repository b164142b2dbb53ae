"""ftrun with real processes: plain scripts and programs that use no wrapper, each started by exec.

Ranks that are forked from a template, replaced or restarted are in ``tests/process/agent``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import psutil
import pytest
import torch
from support.ends import ENDS
from support.warm_ftrun import run_python, start_python

from ft_wrapper.agent import process as agent_process
from ft_wrapper.agent.rounds import Failure, in_order
from ft_wrapper.run import main
from ft_wrapper.store import TCPStore
from ft_wrapper.testing.etcd_server import free_port

TIMEOUT = 120.0
# The others go on when a rank fails.
ALONE = ("--restart-policy", "rank", "--max-rank-restarts", "0")

# A rank that does as it is told: it says who it is over a socket, then obeys line by line.
OBEDIENT = """
import os, signal, socket, subprocess, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
lines = connection.makefile("rw", buffering=1)
def say(*words): print(*words, file=lines)
def note(signum, frame):
    say("got", signal.Signals(signum).name)
    raise SystemExit(0)
say(os.environ["RANK"], os.getpid())
for line in lines:
    order, *arguments = line.split()
    if order == "ping": say("pong")
    elif order == "exit": sys.exit(int(arguments[0]))
    elif order == "handle": signal.signal(signal.Signals[arguments[0]], note); say("done")
    elif order == "note":
        signal.signal(signal.Signals[arguments[0]], lambda *_: connection.sendall(b"noted\\n"))
        say("done")
    elif order == "ignore": signal.signal(signal.Signals[arguments[0]], signal.SIG_IGN); say("done")
    elif order == "helper": say(subprocess.Popen(["sleep", "1000"]).pid)
"""


@dataclasses.dataclass
class Obedient:
    """The test's end of a rank that does as it is told."""

    pid: int
    lines: TextIO

    def tell(self, order: str) -> None:
        self.lines.write(order + "\n")
        self.lines.flush()

    def ask(self, order: str) -> str:
        self.tell(order)
        return self.lines.readline().strip()


class Job:
    """A running ftrun, and its ranks."""

    def __init__(self, process: subprocess.Popen[str], listener: socket.socket, nproc: int) -> None:
        self.process = process
        self.ranks: dict[int, Obedient] = {}
        self._connections: list[socket.socket] = []
        pidfd = os.pidfd_open(process.pid)
        try:
            for _ in range(nproc):
                self._accept(listener, pidfd)
        finally:
            os.close(pidfd)

    def _accept(self, listener: socket.socket, pidfd: int) -> None:
        ready, _, _ = select.select([listener.fileno(), pidfd], [], [], TIMEOUT)
        assert listener.fileno() in ready, f"ftrun ended or did not start: {self.process.poll()}"
        connection, _ = listener.accept()
        connection.settimeout(TIMEOUT)
        self._connections.append(connection)
        lines = connection.makefile("rw")
        rank, pid = lines.readline().split()
        self.ranks[int(rank)] = Obedient(int(pid), lines)

    def read_until(self, text: str) -> str:
        """Reads what ftrun says until a line has the text in it."""
        assert self.process.stderr is not None
        said = ""
        for line in self.process.stderr:
            said += line
            if text in line:
                return said
        raise AssertionError(f"ftrun never said {text!r}, but:\n{said}")

    def end(self) -> tuple[int, str]:
        """Waits for ftrun; returns exit code and the rest of what it said."""
        _, said = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, said

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=TIMEOUT)
        for rank in self.ranks.values():
            rank.lines.close()
        for connection in self._connections:
            connection.close()


Launch = Callable[..., Job]


@pytest.fixture(autouse=True)
def no_standby(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most scripts here use no torch, and are started faster than it could be imported."""
    monkeypatch.setenv("PET_NO_FORK", "1")


@pytest.fixture(autouse=True)
def temporary_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Log directories of jobs that failed stay; here, not in the real place."""
    directory = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr("tempfile.tempdir", None)
    return directory


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts an ftrun with obedient ranks."""
    jobs: list[Job] = []
    script = tmp_path / "obedient.py"
    script.write_text(OBEDIENT)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT)

        def start(nproc: int, *options: str, program: tuple[str, str] = ("-m", "ft_wrapper.run")) -> Job:
            words = [*program, "--nproc-per-node", str(nproc), *options]
            words += [str(script), str(listener.getsockname()[1])]
            process = start_python(words, stdout=subprocess.DEVNULL)
            try:
                jobs.append(Job(process, listener, nproc))
            except BaseException:
                process.kill()
                process.communicate(timeout=TIMEOUT)
                raise
            return jobs[-1]

        yield start
        for job in jobs:
            job.close()


def run_with_standby(*arguments: str) -> subprocess.CompletedProcess[str]:
    """For scripts with torch: their ranks are forked from ftrun's standby process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PET_NO_FORK")
        return run_python(["-m", "ft_wrapper.run", *arguments], TIMEOUT)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes a script and returns its path."""

    def write(source: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write


def ended(pidfd: int) -> bool:
    """Waits for the end of a process."""
    return bool(select.select([pidfd], [], [], TIMEOUT)[0])


# What a rank finds ---------------------------------------------------------------------------------------


def test_environment(
    tmp_path: Path,
    script: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    dump = script("""
        import json, os, sys
        with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
            json.dump([dict(os.environ), sys.argv, os.getsid(0) == os.getpid()], file)
    """)
    caplog.set_level(logging.INFO)
    assert main(["--nproc-per-node", "3", dump, str(tmp_path), "--nproc-per-node", "--x"]) == 0
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for rank, (environment, argv, leads_session) in enumerate(ranks):
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": "3",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "FT_WRAPPER_STORE": f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}",
            "TORCHELASTIC_RUN_ID": ranks[0][0]["TORCHELASTIC_RUN_ID"],
            "MASTER_PORT": ranks[0][0]["MASTER_PORT"],
        }
        assert {name: environment.get(name) for name in expected} == expected
        assert environment["TORCHELASTIC_RUN_ID"]
        assert environment["TORCHELASTIC_ERROR_FILE"].endswith(f"/{rank}/error.json")
        assert argv == [dump, str(tmp_path), "--nproc-per-node", "--x"]
        assert leads_session
    assert sum("OMP_NUM_THREADS" in message for message in caplog.messages) == 1


def test_threads_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in agent_process.Job(1, "default", "id", 0).shared_environment()
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS" not in agent_process.Job(2, "default", "id", 0).shared_environment()


# How it ends ---------------------------------------------------------------------------------------------


def test_all_succeed(capfd: pytest.CaptureFixture[str]) -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    assert main(["--nproc-per-node", "2", "--no-python", "true"]) == 0
    assert capfd.readouterr() == ("", "")
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_the_others_live_on_when_ranks_fail(launch: Launch) -> None:
    job = launch(3, *ALONE)
    environment = Path("/proc", str(job.ranks[1].pid), "environ").read_bytes().split(b"\0")
    (address,) = (v.partition(b"=")[2].decode() for v in environment if v.startswith(b"FT_WRAPPER_STORE="))
    helper = os.pidfd_open(int(job.ranks[1].ask("helper")))
    try:
        os.kill(job.ranks[1].pid, signal.SIGKILL)
        job.read_until("killed by SIGKILL; 2 still running")
        assert ended(helper)
    finally:
        os.close(helper)
    assert [job.ranks[rank].ask("ping") for rank in (0, 2)] == ["pong"] * 2
    host, _, port = address.rpartition(":")
    with contextlib.closing(TCPStore(host, int(port))) as store:
        assert store.add("counter", 1) == 1, "the store outlives every rank"
    job.ranks[0].tell("exit 5")
    job.read_until("exit code 5; 1 still running")
    job.ranks[2].tell("exit 0")
    code, said = job.end()
    assert code == 75
    first, second = said[said.index("2 of 3 ranks failed") :].splitlines()[2:4]
    assert first.split()[:2] == ["1", str(job.ranks[1].pid)] and "killed by SIGKILL" in first
    assert second.split()[:2] == ["0", str(job.ranks[0].pid)] and "exit code 5" in second


def test_ranks_meet_at_the_port_that_is_given(script: Callable[[str], str], tmp_path: Path) -> None:
    """Also in the round after a failure."""
    port = free_port()
    meet = script(f"""
        import os, sys
        import torch, torch.distributed as dist
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        assert os.environ["MASTER_PORT"] == "{port}"
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        met = torch.ones(1)
        dist.all_reduce(met)
        assert met.item() == size
        dist.destroy_process_group()
        sys.exit(rank if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
    """)
    arguments = ["--nproc-per-node", "2", "--max-restarts", "1", "--master-port", str(port)]
    ended = run_with_standby(*arguments, meet)
    assert ended.returncode == 0, ended.stderr


RECORDED = """
    import os, time
    from torch.distributed.elastic.multiprocessing.errors import record
    @record
    def main():
        if os.environ["RANK"] == "1":
            raise ValueError('no such thing')
        time.sleep(1000)
    main()
"""


def test_a_recorded_error_is_shown_and_written_to_its_own_error_file(
    script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a platform reads of the root cause: rank 1's; rank 0 is only ended."""
    own = tmp_path / "own.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(own))
    logs = ("--nproc-per-node", "2", "--log-dir", str(tmp_path / "logs"))
    ended = run_with_standby(*logs, script(RECORDED))
    assert ended.returncode == 1
    assert "exit code 1" in ended.stderr and "ValueError: no such thing  " in ended.stderr
    (error_file,) = (tmp_path / "logs").rglob("error.json")
    assert str(error_file) in ended.stderr
    recorded, handed_on = json.loads(error_file.read_text()), json.loads(own.read_text())
    assert handed_on["message"]["message"] == recorded["message"]["message"] == "ValueError: no such thing"
    assert handed_on["message"]["extraInfo"] == recorded["message"]["extraInfo"]


def test_its_own_error_file_when_it_cannot_start(
    script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", "http")
    assert main([script("raise AssertionError")]) == 2
    assert "TORCHELASTIC_HEALTH_CHECK_PORT=http" in json.loads(file.read_text())["message"]["message"]


@pytest.mark.parametrize(
    ("text", "end", "code", "words"),
    [
        ('{"message": {"mess', "kill -SEGV $$", 75, "killed by SIGSEGV"),
        ('{"message": "out of luck", "timestamp": 1}', "exit 1", 1, "out of luck"),
    ],
)
def test_an_error_file_that_is_broken_or_another_handlers(
    text: str,
    end: str,
    code: int,
    words: str,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "own.json"))
    program = f"echo -n '{text}' > $TORCHELASTIC_ERROR_FILE; {end}"
    assert main(["--no-python", "sh", "-c", program]) == code
    assert words in caplog.text and "Traceback" not in caplog.text
    assert (tmp_path / "own.json").exists() == (code == 1)


WITHOUT_TORCH = """
    import contextlib, io, sys
    from ft_wrapper.run import main

    torch_version = sys.argv[1]

    def ends(*words):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            try:
                code = main(words)
            except SystemExit as end:
                code = end.code
        assert "torch" not in sys.modules, words
        return code, out.getvalue()

    assert ends("stauts") == (
        2, "ftrun: error: stauts: no such command or file; did you mean 'status'?\\n"
    )
    said_of_versions = ends("--version")
    for command in ("status", "report"):
        code, said = ends(command, "--help")
        assert (code, f"usage: ftrun {command}" in said) == (0, True), said
        code, said = ends(command, "--colour", "nowhere")
        assert (code, "--colour" in said) == (2, True), said
    for endpoint in ("nowhere", "127.0.0.1:1", "etcd://127.0.0.1:1/job"):
        code, said = ends("status", endpoint)
        assert (code, endpoint in said) == (2, True), said
    code, said = ends("report", "nowhere.jsonl")
    assert (code, "nowhere.jsonl" in said) == (2, True), said

    from ft_wrapper import __version__
    assert said_of_versions == (0, f"ftrun {__version__}, torch {torch_version}\\n")
"""


def test_what_starts_no_job_needs_no_torch(script: Callable[[str], str]) -> None:
    ended = subprocess.run(
        [sys.executable, script(WITHOUT_TORCH), torch.__version__],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert ended.returncode == 0, ended.stderr


def test_a_file_with_a_name_like_a_commands_is_started(
    script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = Path(script("print('it ran')"))
    monkeypatch.chdir(path.parent)
    path.rename("stauts")
    assert main(["stauts"]) == 0
    assert "it ran" in capfd.readouterr().out


def test_order_of_failures() -> None:
    def failure(rank: int, when: float) -> Failure:
        return Failure(rank, 100 + rank, 1, when, "", "")

    # The record of an exception has whole seconds; the end of a process that left none is seen exactly.
    assert [f.rank for f in in_order([failure(3, 10.9), failure(1, 10.0), failure(2, 9.5)])] == [2, 3, 1]


# Signals -------------------------------------------------------------------------------------------------


def test_a_signal_ends_all(launch: Launch) -> None:
    """Ranks that handle it with 0, and their helpers; those that ignore it; one has failed before."""
    job = launch(4, "--shutdown-timeout", "2", *ALONE)  # long enough for the others to end
    job.ranks[3].tell("exit 7")
    job.read_until("exit code 7")
    helper = os.pidfd_open(int(job.ranks[0].ask("helper")))
    try:
        assert [job.ranks[rank].ask("handle SIGTERM") for rank in (0, 1)] == ["done"] * 2
        assert job.ranks[2].ask("ignore SIGTERM") == "done"
        job.process.send_signal(signal.SIGTERM)
        for rank in (0, 1):
            assert job.ranks[rank].lines.readline() == "got SIGTERM\n"
        assert ended(helper)
    finally:
        os.close(helper)
    code, said = job.end()
    assert code == 128 + signal.SIGTERM
    assert "rank 2: still there 2 s after the signal, killed" in said
    assert "1 of 4 ranks failed" in said


def test_a_signal_that_is_asked_for_ends_all(launch: Launch) -> None:
    """SIGUSR1 is a notice otherwise."""
    job = launch(2, "--signals-to-handle", "SIGUSR1,SIGTERM")
    assert [rank.ask("handle SIGUSR1") for rank in job.ranks.values()] == ["done"] * 2
    job.process.send_signal(signal.SIGUSR1)
    assert [rank.lines.readline() for rank in job.ranks.values()] == ["got SIGUSR1\n"] * 2
    code, said = job.end()
    assert code == 128 + signal.SIGUSR1
    assert "ranks failed" not in said


@pytest.mark.parametrize(
    ("name", "policy", "standby"), [("SIGUSR1", "rank", True), ("SIGUSR2", "group", False)]
)
def test_notices_reach_who_handles_them_and_end_nothing(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, name: str, policy: str, standby: bool
) -> None:
    signum = signal.Signals[name]
    if standby:
        monkeypatch.delenv("PET_NO_FORK")
    job = launch(2, "--restart-policy", policy)
    assert job.ranks[0].ask(f"note {name}") == "done"
    for _ in range(2):
        job.process.send_signal(signum)
        assert job.ranks[0].lines.readline() == "noted\n"
    # As SLURM does: each process of a step gets it, whether it handles it or not.
    for process in psutil.Process(job.process.pid).children(recursive=True):
        if process.pid != job.ranks[0].pid:
            with contextlib.suppress(psutil.NoSuchProcess):  # what a fork passes through
                process.send_signal(signum)
    assert job.ranks[1].ask("ping") == "pong"
    for rank in job.ranks.values():
        rank.tell("exit 0")
    code, said = job.end()
    assert code == 0
    assert said.count(f"{name}: handed to rank 0; no other running rank of this node has a handler") == 2
    assert "standby process" not in said


def test_a_notice_does_not_end_another_program(tmp_path: Path) -> None:
    body = f"echo there >&2; until [ -e {tmp_path}/end ]; do sleep 0.05; done"
    words = ["-m", "ft_wrapper.run", "--no-python", "sh", "-c", body]
    with start_python(words, stdout=subprocess.DEVNULL) as process:
        try:
            assert process.stderr is not None
            assert any("there" in line for line in process.stderr)
            process.send_signal(signal.SIGUSR1)
            assert any("SIGUSR1: handed to no rank" in line for line in process.stderr)
            (tmp_path / "end").touch()
            process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()
    assert process.returncode == 0


def test_notices_end_nothing_before_the_nodes_meet_and_when_all_is_over() -> None:
    """They come in one after the other, from the beginning to the end of the process."""
    code = "from ft_wrapper.cli import main as cli; main = cli.main"
    code += "; cli.main = lambda: print('runs', flush=True) or main()"
    words = ["-c", f"{code}; cli.command()", "--no-python", "true"]
    with start_python(words, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "runs\n"
            deadline = time.monotonic() + TIMEOUT
            while process.poll() is None and time.monotonic() < deadline:
                process.send_signal(signal.SIGUSR1)
                process.send_signal(signal.SIGUSR2)
        finally:
            process.kill()
    assert process.wait(TIMEOUT) == 0


def test_signals_that_are_ignored_stay_so(launch: Launch) -> None:
    """As under nohup."""
    ignore = "import signal; [signal.signal(each, signal.SIG_IGN) for each in (1, signal.SIGUSR1)]"
    job = launch(1, program=("-c", f"{ignore}; from ft_wrapper.cli.main import command; command()"))
    for pid in (job.process.pid, job.ranks[0].pid):
        status = Path("/proc", str(pid), "status").read_text()
        (ignored,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn"))
        assert ignored & 1 << (signal.SIGHUP - 1)
    assert job.ranks[0].ask("note SIGUSR1") == "done"
    for signum in (signal.SIGHUP, signal.SIGUSR1):
        job.process.send_signal(signum)
    assert job.ranks[0].ask("ping") == "pong"
    job.ranks[0].tell("exit 0")
    code, said = job.end()
    assert (code, "SIGUSR1" in said) == (0, False)


def test_ranks_die_with_ftrun(launch: Launch) -> None:
    job = launch(2)
    assert job.ranks[1].ask("ignore SIGTERM") == "done"
    pidfds = [os.pidfd_open(rank.pid) for rank in job.ranks.values()]
    try:
        job.process.kill()
        assert all(ended(pidfd) for pidfd in pidfds)
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


# What is run, and where its output goes ------------------------------------------------------------------

TALK = ["--no-python", "sh", "-c", "echo out $RANK; echo err $RANK >&2"]


def log_files(directory: Path) -> dict[str, str]:
    return {f"{file.parent.name}/{file.name}": file.read_text() for file in directory.rglob("*.log")}


def test_redirects_by_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--nproc_per_node", "2", "-r", "0:1,1:2", "--log_dir", str(tmp_path), *TALK]) == 0
    assert log_files(tmp_path) == {"0/stdout.log": "out 0\n", "1/stderr.log": "err 1\n"}
    assert capfd.readouterr() == ("out 1\n", "err 0\n")


def test_tee(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--nproc-per-node=3", "-t", "3", "--role", "worker", "--local-ranks-filter", "0,2"]
    assert main([*options, "--log-dir", str(tmp_path), *TALK]) == 0
    assert log_files(tmp_path) == {
        f"{rank}/std{name}.log": f"{name} {rank}\n" for rank in range(3) for name in ("out", "err")
    }
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[worker0]:out 0", "[worker2]:out 2"]
    assert sorted(err.splitlines()) == ["[worker0]:err 0", "[worker2]:err 2"]


def test_temporary_log_directory(temporary_directory: Path) -> None:
    assert main(["--no-python", "true"]) == 0
    assert main(["--no-python", "false"]) == 1
    assert list(temporary_directory.glob("ftrun_*")) == []
    assert main(["-r", "1", *TALK]) == 0
    assert log_files(temporary_directory) == {"0/stdout.log": "out 0\n"}


def test_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pack" / "age").mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").write_text("import sys; assert 'pytest' not in sys.modules")
    (tmp_path / "pack" / "age" / "__main__.py").write_text("import sys; print('main', sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    for option in ("-m", "--module"):
        assert main([option, "pack.age", "-m", "x"]) == 0
        assert capfd.readouterr().out == "main ['-m', 'x']\n"
    assert "pack" not in sys.modules


def test_console_script() -> None:
    command = Path(sys.executable).with_name("ftrun")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=TIMEOUT)
    assert (done.returncode, done.stdout.startswith("ftrun ")) == (0, True)


# Bad input -----------------------------------------------------------------------------------------------


def test_what_cannot_be_executed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF no, not really")
    program.chmod(0o755)
    assert main(["--nproc-per-node", "2", "--no-python", str(program)]) == 2
    assert "cannot start" in capfd.readouterr().err


def test_result_files_that_cannot_be_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "other")
    for wrong in (tmp_path, tmp_path / "nowhere" / "result", pipe, link, Path("/dev/null")):
        with pytest.raises(SystemExit, match="2"):
            main(["--result-file", str(wrong), "--no-python", "true"])
        said = capfd.readouterr().err
        assert f"--result-file {wrong}: name a file" in said
        assert said.count("\n") == 1
    pipe.unlink()
    link.unlink()
    late = tmp_path / "late"
    assert main(["--result-file", str(late), "--no-python", "mkdir", str(late)]) == 0
    assert f"--result-file {late} cannot be written" in caplog.text
    assert list(tmp_path.iterdir()) == [late]


def test_nothing_is_shown_where_there_is_no_console(tmp_path: Path) -> None:
    closed = "import os, sys; os.close(1); os.close(2); sys.stdout = sys.stderr = None"  # as by >&- 2>&-
    code = f"{closed}; from ft_wrapper.cli.main import command; command()"
    words = ["-c", code, "--tee", "3", "--no-python", "echo", "hello"]
    assert run_python(words, TIMEOUT, {ENDS: "whole"}, tmp_path).returncode == 0


WAITS = """
    import threading
    from datetime import timedelta
    from ft_wrapper.cli import main as cli
    from ft_wrapper.store.tcp import serve
    from torch.distributed import TCPStore

    def main():
        server = serve("127.0.0.1", 0, timedelta(seconds=100))
        client = TCPStore("127.0.0.1", server.port, is_master=False)
        threading.Thread(target=lambda: client.wait(["never"], timedelta(seconds=100)), daemon=True).start()
        client.clone().set("the other thread", "waits by now, or will")
        del server  # torch takes its time to say where the wait was when that was lost
        print("said", end="")
        return 7

    cli.main = main
    cli.command()
"""


def test_a_thread_that_waits_for_a_store_does_not_abort_the_end(script: Callable[[str], str]) -> None:
    """The server goes as Python ends, and the wait with it."""
    for _ in range(3):
        ended = run_python([script(WAITS)], TIMEOUT, {ENDS: "whole"})
        assert (ended.returncode, ended.stdout) == (7, "said"), ended.stderr


def test_a_reader_that_has_read_enough_ends_a_command_quietly() -> None:
    """`ftrun report … | head` said where in Python the pipe had broken."""
    code = """
        from ft_wrapper.cli import main as cli

        def much(argv):
            for number in range(100_000):
                print("line", number)
            return 0

        cli.COMMANDS["report"] = "__main__:much"
        cli.command()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), "report"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"line 0\n"
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read().decode()
        assert (process.wait(60), said) == (128 + signal.SIGPIPE, "")
