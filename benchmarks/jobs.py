"""Jobs of the benchmarks: several processes started together, and ended together whatever happens."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

JOB_ENV = "FT_WRAPPER_BENCHMARK_JOB"  # tells which job a process belongs to, also a monitor that it forked
PR_SET_CHILD_SUBREAPER = 36


def own_all_descendants() -> None:
    """Makes this process the parent of whatever a job leaves behind, and SIGTERM an ordinary exit.

    Monitor processes detach from their rank: without this they could not be found, measured and ended.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))


def free_port_pair() -> int:
    """Returns a port that is free, the next one being free too: a wrapper hosts its store there.

    Raises:
        RuntimeError: none was found.
    """
    # Below the range that the kernel hands out by itself, so that no other process gets it meanwhile.
    for port in random.SystemRandom().sample(range(20000, 30000, 2), 100):
        with contextlib.ExitStack() as stack:
            try:
                for number in (port, port + 1):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", number))
            except OSError:
                continue
            return port
    raise RuntimeError("no two neighbouring ports are free between 20000 and 30000")


@dataclasses.dataclass
class Job:
    """Processes that belong together.

    Args:
        folder: where the job's files are.
        name: unique; stands in the environment of each of its processes.
        started: the processes that the driver itself started.
    """

    folder: Path
    name: str
    started: list[subprocess.Popen[bytes]] = dataclasses.field(default_factory=list)

    @property
    def log(self) -> Path:
        """The file that workers append their stamps to."""
        return self.folder / "log.jsonl"

    @property
    def events(self) -> Path:
        """The file that ft_wrapper appends its events to."""
        return self.folder / "events.jsonl"

    @property
    def output(self) -> Path:
        """What the processes print."""
        return self.folder / "output.txt"

    def start(self, command: list[str], events: bool = False, **environment: str) -> subprocess.Popen[bytes]:
        """Starts one process of the job.

        Args:
            command: program and arguments.
            events: whether ft_wrapper writes its events, which takes time.
            environment: what is set in its environment besides the driver's own.
        """
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
        common = {
            JOB_ENV: self.name,
            # The same for everybody: one thread a process, and groups on the loopback device.
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONUNBUFFERED": "1",
        }
        if events:
            common["FT_WRAPPER_EVENTS"] = str(self.events)
        with open(self.output, "ab") as output:
            process = subprocess.Popen(
                command,
                env={**inherited, **common, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.started.append(process)
        return process

    def start_ranks(
        self, command: list[str], world_size: int, events: bool = False, **environment: str
    ) -> None:
        """Starts one process a rank, with the environment variables that a launcher sets, and others."""
        port = str(free_port_pair())
        for rank in range(world_size):
            self.start(
                command,
                events,
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(world_size),
                LOCAL_WORLD_SIZE=str(world_size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                **environment,
            )

    def processes(self) -> list[psutil.Process]:
        """Returns what lives of the job: also what its processes have forked."""
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.environ().get(JOB_ENV) == self.name:
                    found.append(process)
        return found

    def helpers(self) -> list[psutil.Process]:
        """Returns the living processes that the driver did not start itself."""
        own = {process.pid for process in self.started}
        return [process for process in self.processes() if process.pid not in own]

    def records(self) -> list[dict[str, Any]]:
        """Returns the workers' stamps so far."""
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def complaint(self, lines: int = 6) -> str:
        """Returns the end of what the job printed, without Python's warnings and with long lines cut."""
        text = self.output.read_text(errors="replace") if self.output.exists() else ""
        told = [
            line for line in text.splitlines() if "Warning: " not in line and "warnings.warn(" not in line
        ]
        return "\n".join("    " + line[:120] for line in told[-lines:])

    def stop(self, timeout: float = 30.0) -> None:
        """Ends every process of the job.

        Args:
            timeout: seconds that they have to be gone after SIGKILL.

        Raises:
            RuntimeError: some are still there.
        """
        deadline = time.monotonic() + timeout
        while processes := self.processes():  # again, should one have forked meanwhile
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=max(0.0, deadline - time.monotonic()))
            if time.monotonic() > deadline:
                raise RuntimeError(f"still alive after SIGKILL: {[process.pid for process in processes]}")
        for process in self.started:
            process.wait(timeout=max(1.0, deadline - time.monotonic()))


@contextlib.contextmanager
def job(parent: Path) -> Iterator[Job]:
    """Gives a job with a folder of its own below ``parent``; ends all of its processes."""
    name = uuid.uuid4().hex
    folder = parent / name
    folder.mkdir(parents=True)
    new = Job(folder, name)
    try:
        yield new
    finally:
        new.stop()
