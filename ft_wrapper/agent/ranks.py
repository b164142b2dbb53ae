"""The rank processes of a node, each on its own: one that dies takes nobody along.

One thread waits for all of them and for signals at once; nothing is polled. Log files, tailing and error
files are torch's own. Its process contexts are not used, because they end all ranks when one has failed, nor
is its `SubprocessHandler`: its arguments differ between torch's versions, it cannot tie a rank's life to
ours, and closing its files sends a signal to a process that may be gone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from .. import events
from .failure import Failure, in_order, read_failure
from .signals import SignalQueue, signal_name

log = logging.getLogger(__name__)

# Seconds that a process may take to vanish after SIGKILL. One that is stuck in the kernel never does.
KILL_TIMEOUT = 10.0

_PR_SET_PDEATHSIG = 1
# Looked up before any fork: between fork and exec that would not be safe.
_prctl = ctypes.CDLL(None).prctl


@dataclasses.dataclass(frozen=True)
class Rank:
    """One rank process.

    Args:
        rank: its local rank.
        process: the process; it leads a session and a process group of its own.
        pidfd: becomes readable when the process has ended.
        error_file: where ``torch.distributed.elastic``'s ``record`` writes its exception.
        logs: the files that its streams go to, stdout first.
    """

    rank: int
    process: subprocess.Popen[bytes]
    pidfd: int
    error_file: str
    logs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class End:
    """How the ranks ended.

    Args:
        failures: what failed of its own accord, in the order of happening.
        signum: the signal that ended the job, or None.
    """

    failures: list[Failure]
    signum: int | None


class Ranks:
    """The rank processes, from their start to the last one's end; for use in the main thread.

    A context manager: leaving it ends what still runs, and closes what was opened.

    Args:
        shutdown_timeout: seconds from a forwarded signal to SIGKILL.
    """

    def __init__(self, shutdown_timeout: float) -> None:
        self._shutdown_timeout = shutdown_timeout
        self._running: dict[int, Rank] = {}
        self._cleanup = ExitStack()
        self._selector = self._cleanup.enter_context(selectors.DefaultSelector())

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._running:
                self._kill()
        finally:
            self._cleanup.close()

    def start(
        self,
        command: Sequence[str],
        environments: Mapping[int, dict[str, str]],
        logs_specs: LogsSpecs,
        role: str,
    ) -> None:
        """Starts all ranks.

        Args:
            command: program and arguments, the same for all.
            environments: by local rank, what each finds in its environment beside what we have in ours.
            logs_specs: where their streams and errors go.
            role: what the ranks are called in tailed lines.

        Raises:
            OSError: one cannot be started. Those that were end with the context.
        """
        # Once for all ranks: it empties the directory that it finds.
        logs = logs_specs.reify(dict(environments))
        for rank, environment in environments.items():
            stdout, stderr = logs.stdouts[rank], logs.stderrs[rank]
            process = _start(command, environment, stdout, stderr)
            pidfd = os.pidfd_open(process.pid)
            self._cleanup.callback(os.close, pidfd)
            files = tuple(file for file in (stdout, stderr) if file not in ("", os.devnull))
            self._running[rank] = Rank(rank, process, pidfd, logs.error_files[rank], files)
            self._selector.register(pidfd, selectors.EVENT_READ, self._running[rank])
            events.emit("rank_started", rank=rank, child=process.pid)
        # They are threads, so not before the last fork.
        for files_to_tail, console in ((logs.tee_stdouts, sys.stdout), (logs.tee_stderrs, sys.stderr)):
            self._cleanup.callback(TailLog(role, files_to_tail, console).start().stop)

    def wait(self, signals: SignalQueue) -> End:
        """Waits until all ranks have ended.

        A signal is forwarded to all that live; those that still do after ``shutdown_timeout`` are killed.

        Args:
            signals: what is to be forwarded.
        """
        failures: list[Failure] = []
        signum: int | None = None
        deadline: float | None = None
        self._selector.register(signals.fd, selectors.EVENT_READ)
        while self._running:
            timeout = None if deadline is None else deadline - time.monotonic()
            if timeout is not None and timeout <= 0:
                log.warning("%s: still there %g s after the signal", self._names(), self._shutdown_timeout)
                self._kill()
                break
            for rank in self._select(timeout):
                failure = self._reap(rank)
                # What a forwarded signal ended did not fail of its own accord.
                if failure is not None and signum is None:
                    failures.append(failure)
                    log.warning(
                        "rank %d (pid %d): %s%s", rank.rank, failure.pid, failure.how(), self._others()
                    )
            for arrived in signals.read():
                log.warning("%s: forwarded to %s", signal_name(arrived), self._names())
                self._send(arrived)
                if deadline is None:
                    signum, deadline = arrived, time.monotonic() + self._shutdown_timeout
        self._selector.unregister(signals.fd)
        return End(in_order(failures), signum)

    def _send(self, signum: int) -> None:
        for rank in self._running.values():
            # The number cannot have passed on to a stranger: nobody has waited for the process yet.
            os.killpg(rank.process.pid, signum)

    def _kill(self) -> None:
        self._send(signal.SIGKILL)
        deadline = time.monotonic() + KILL_TIMEOUT
        while self._running and (timeout := deadline - time.monotonic()) > 0:
            for rank in self._select(timeout):
                self._reap(rank)
        if self._running:
            log.error("%s: still there %g s after SIGKILL, left behind", self._names(), KILL_TIMEOUT)
            self._running.clear()

    def _select(self, timeout: float | None) -> list[Rank]:
        """Waits for the end of a rank, or a signal; returns the ranks that have ended, in that order."""
        return [key.data for key, _ in self._selector.select(timeout) if isinstance(key.data, Rank)]

    def _reap(self, rank: Rank) -> Failure | None:
        self._selector.unregister(rank.pidfd)
        del self._running[rank.rank]
        status = os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED | os.WNOWAIT)
        if status is not None and (status.si_code != os.CLD_EXITED or status.si_status != 0):
            # Its helpers, data loaders for instance, would hold memory, ports and devices. Done before it is
            # waited for, so that the number is its own still. What a successful rank leaves may stay.
            os.killpg(rank.process.pid, signal.SIGKILL)
        exitcode = rank.process.wait()
        events.emit("rank_ended", rank=rank.rank, child=rank.process.pid, exitcode=exitcode)
        if exitcode == 0:
            return None
        return read_failure(rank.rank, rank.process.pid, exitcode, rank.error_file, rank.logs)

    def _names(self) -> str:
        return "ranks " + ", ".join(map(str, self._running)) if self._running else "no rank"

    def _others(self) -> str:
        return f"; {len(self._running)} still running" if self._running else ""


def _start(
    command: Sequence[str], environment: Mapping[str, str], stdout: str, stderr: str
) -> subprocess.Popen[bytes]:
    with ExitStack() as files:
        return subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=files.enter_context(open(stdout, "wb")) if stdout else None,
            stderr=files.enter_context(open(stderr, "wb")) if stderr else None,
            start_new_session=True,
            # Safe here: no other thread runs Python yet, and it takes no lock and looks nothing up.
            preexec_fn=functools.partial(_die_with, os.getpid()),
        )


def _die_with(parent: int) -> None:
    """Between fork and exec: this process is killed when the parent dies, however it dies."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
