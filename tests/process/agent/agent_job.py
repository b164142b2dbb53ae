"""An ftrun of the tests: its words, its events and its processes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from support.ended import has_ended
from support.warm_ftrun import start_ftrun

from ft_wrapper import events

TIMEOUT = 120.0
ROOT = Path(__file__).resolve().parents[3]


FTRUN = "ft_wrapper.run"


class FtRun:
    """A running ftrun. A context manager: it does not outlive the block, and neither does what it started.

    Args:
        folder: for its files.
        arguments: of ftrun.
        before: what to put in front of the command.
        environment: what it finds in its environment beside what we have in ours.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        before: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._events = folder / "events"
        self._output = folder / "output"
        own = {events.ENV: str(self._events), "TMPDIR": str(folder)}
        with open(self._output, "wb") as output:
            own.update(environment or {})
            self.process = start_ftrun(arguments, output.fileno(), folder, own, before)

    def __enter__(self) -> FtRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT)

    @property
    def said(self) -> str:
        """What it and the ranks have printed so far."""
        return self._output.read_text(errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of that name so far."""
        if not self._events.exists():
            return []
        return [record for record in events.load(str(self._events)) if record["event"] == name]

    def pids(self, rank: int) -> list[int]:
        """The processes that a rank has had, in order."""
        return [record["child"] for record in self.events("rank_started") if record["rank"] == rank]

    def end(self) -> int:
        """Waits for its end; returns the exit code, shown with all that was said if it is not expected."""
        return self.process.wait(TIMEOUT)

    def await_file(self, path: Path) -> None:
        """Waits until one of its ranks has made a file; by a look now and then."""
        deadline = time.monotonic() + TIMEOUT
        pidfd = os.pidfd_open(self.process.pid)
        try:
            while not path.exists():
                ended = select.select([pidfd], [], [], 0.02)[0]
                if ended or time.monotonic() >= deadline:  # the file may appear just before the exit
                    assert path.exists(), f"there is no {path.name}:\n{self.said}"
        finally:
            os.close(pidfd)

    def family(self) -> list[psutil.Process]:
        """The processes below it: ranks, what they have started, the template and what was forked ahead."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in below if not has_ended(process)]

    def template(self) -> psutil.Process:
        """The template process: the only child that ftrun started by exec."""
        (found,) = (
            child
            for child in psutil.Process(self.process.pid).children()
            if "ft_wrapper.agent.standby" in " ".join(child.cmdline())
            and child.pid not in [record["child"] for record in self.events("rank_started")]
            and child.children() == []
            and child.create_time()
            == min(c.create_time() for c in psutil.Process(self.process.pid).children())
        )
        return found


def write_script(folder: Path, source: str) -> str:
    """Writes a script, whose lines may be indented; returns its path."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(source))
    return str(path)


def await_that(condition: Callable[[], bool], *jobs: FtRun) -> None:
    """Waits until something holds, by a look now and then, while all of these run."""
    deadline = time.monotonic() + TIMEOUT
    pidfds = [os.pidfd_open(job.process.pid) for job in jobs]
    try:
        while not condition():
            ended = select.select(pidfds, [], [], 0.02)[0]
            if ended or time.monotonic() >= deadline:
                assert condition(), "it never came to that:\n" + "\n---\n".join(job.said for job in jobs)
                return
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def all_gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Waits for the end of processes; returns those that are still there then."""
    _, left = psutil.wait_procs(processes, timeout=seconds)
    return [process for process in left if not has_ended(process)]


def lose(node: FtRun) -> None:
    """Loses a machine: no one is left there who could tell anything."""
    family = node.family()
    node.process.send_signal(signal.SIGSTOP)
    for process in family:
        with contextlib.suppress(Exception):
            process.kill()
    node.process.kill()
    node.process.wait()
    assert all_gone(family, TIMEOUT) == []


def send(pid: int, signum: signal.Signals) -> None:
    """Sends a signal, if the process is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
