"""The ranks of a job as processes that can be started again, one by one.

What `tests/soak/kill_and_rejoin.py` and `demo.py` do by this, an operator does by hand, or a cluster's
scheduler: when the process of a rank has ended, it is started again with the same environment, and joins the
running job. It needs no more than ``RANK``, ``WORLD_SIZE`` and the address of the store in
``FT_WRAPPER_STORE``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from ft_wrapper.store import TCPStoreServer

HOST = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process that has ended, wholly: nothing of it is left in memory.

    Args:
        rank: its rank.
        pid: the process.
        exitcode: of the process; -n if signal n ended it.
    """

    rank: int
    pid: int
    exitcode: int


class Launcher:
    """Hosts the store of a job, starts its ranks, and tells which of them have ended. A context manager.

    Args:
        command: program and arguments, the same for all ranks.
        size: number of ranks that the job begins with.
        environment: what the ranks find in their environment beside what we have in ours.
        on_line: called with each line that a rank prints.
    """

    def __init__(
        self,
        command: Sequence[str],
        size: int,
        environment: Mapping[str, str],
        on_line: Callable[[str], None],
    ) -> None:
        self.size = size
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self._command = list(command)
        self._on_line = on_line
        self._cleanup = contextlib.ExitStack()
        # Outside of the ranks: any of them may die.
        self._server = TCPStoreServer()
        self._cleanup.callback(self._server.close)
        self.port = self._server.port
        self._environment = {
            **os.environ,
            "FT_WRAPPER_STORE": f"{HOST}:{self.port}",
            "WORLD_SIZE": str(size),
            "TORCHELASTIC_RUN_ID": str(uuid.uuid4()),
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        self._selector = self._cleanup.enter_context(selectors.DefaultSelector())
        self._output, self._ranks_output = os.pipe()
        self._cleanup.callback(os.close, self._output)
        self._cleanup.callback(os.close, self._ranks_output)
        os.set_blocking(self._output, False)
        self._selector.register(self._output, selectors.EVENT_READ)
        self._unread = b""

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        with self._cleanup:
            for signum in (signal.SIGTERM, signal.SIGKILL):
                for process in self.running.values():
                    # Not yet waited for, so the number is its own still. One that is stopped has to go on.
                    os.killpg(process.pid, signum)
                    os.killpg(process.pid, signal.SIGCONT)
                deadline = time.monotonic() + 10
                while self.running and (left := deadline - time.monotonic()) > 0:
                    self.wait(left)

    def start(self, rank: int) -> int:
        """Starts the process of a rank, for the first time or again; returns its pid."""
        process = subprocess.Popen(
            self._command,
            env={**self._environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=self._ranks_output,
            stderr=self._ranks_output,
            start_new_session=True,  # Ctrl-C is meant for us
        )
        self.running[rank] = process
        pidfd = os.pidfd_open(process.pid)
        self._selector.register(pidfd, selectors.EVENT_READ, rank)
        return process.pid

    def wait(self, timeout: float | None) -> list[Ended]:
        """Waits until a process ends or prints something; returns those that have ended.

        Args:
            timeout: seconds to wait at the longest; for ever when None.
        """
        ended = []
        ready = self._selector.select(timeout)
        self._read()  # all that was printed by those that have ended
        for key, _ in ready:
            if key.fd == self._output:
                continue
            self._selector.unregister(key.fd)
            os.close(key.fd)
            process = self.running.pop(key.data)
            ended.append(Ended(key.data, process.pid, process.wait()))
        return ended

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                *lines, self._unread = (self._unread + os.read(self._output, 1 << 16)).split(b"\n")
                for line in lines:
                    self._on_line(line.decode(errors="replace"))


def no_core_dumps() -> None:
    """Keeps this process, and those that it starts, from leaving core dumps when a signal ends them."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def run_program(main: Callable[[], None]) -> None:
    """Runs a program whose ranks end with it: SIGTERM and Ctrl-C let it close what it has opened."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
