"""One process of a rank: how it is started, signalled and reaped. Each stands for one incarnation."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from .logs import RankFiles

_PR_SET_PDEATHSIG = 1
# Looked up before any fork: between fork and exec that would not be safe.
_prctl = ctypes.CDLL(None).prctl


@dataclasses.dataclass(frozen=True)
class RankProcess:
    """A process that runs, or has ended and was not reaped yet. Its pid cannot be another's until then.

    Args:
        rank: its local rank.
        incarnation: which process in a row of this rank, in this round.
        pid: the process, a child of ours; it leads a session and a process group of its own.
        pidfd: becomes readable when the process has ended, and all its memory is free.
        files: where its streams and its error go.
        popen: what started it, if it was started by exec.
        started: when, in monotonic seconds.
    """

    rank: int
    incarnation: int
    pid: int
    pidfd: int
    files: RankFiles
    popen: subprocess.Popen[bytes] | None = None
    started: float = dataclasses.field(default_factory=time.monotonic)

    def send(self, signum: int) -> None:
        """Sends a signal to the process group."""
        try:
            os.killpg(self.pid, signum)
        except ProcessLookupError:  # just forked: it has no group of its own yet
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signum)

    def has_ended(self) -> bool:
        """Whether its end has come; it may not have been reaped yet."""
        return os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def reap(self) -> int:
        """Takes note of the end, which has come; ends the helpers of a process that failed; closes the pidfd.

        Returns:
            The exit code, or minus the number of the signal that ended it.
        """
        status = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert status is not None
        exitcode = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        if exitcode != 0:
            # Its helpers, data loaders for instance, would hold memory, ports and devices. Done before it is
            # reaped, so that the number is its own still. What a successful rank leaves may stay.
            self.send(signal.SIGKILL)
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        os.close(self.pidfd)
        if self.popen is not None:
            self.popen.returncode = exitcode  # there is nothing left for it to wait for
        return exitcode


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    stdout: int | None = None,
    stderr: int | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Starts a program in a session of its own; it is killed when this process dies, however that happens.

    Args:
        command: program and arguments.
        environment: all of its environment.
        stdout: where its output goes; where ours goes when None.
        stderr: the same.
        pass_fds: further descriptors that it inherits.

    Raises:
        OSError: it cannot be started.
    """
    return subprocess.Popen(
        command,
        env=environment,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        start_new_session=True,
        # Nothing in it can meet a lock that another thread held at the fork: it looks nothing up, imports
        # nothing and logs nothing.
        preexec_fn=functools.partial(die_with, os.getpid()),
    )


def die_with(parent: int) -> None:
    """This process is killed when its parent dies, also while it holds the GIL; at once if it has died.

    Args:
        parent: the process that is our parent, if it lives.
    """
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def await_adoption(parent: int) -> None:
    """Waits until this process, whose own parent is about to exit, is a child of another one.

    Args:
        parent: that other one, the nearest subreaper. It is not waited for if it has died.
    """
    own = os.getppid()
    if own == parent:
        return
    try:
        pidfd = os.pidfd_open(own)
    except ProcessLookupError:
        return
    try:
        # The kernel hands children over before it says that a process has ended.
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll()
    finally:
        os.close(pidfd)
