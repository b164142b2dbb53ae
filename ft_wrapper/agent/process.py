"""One process of a rank: its program, its environment, its start, signals, its end.

Torch's process contexts are not used: they end all ranks when one has failed. Nor is its `SubprocessHandler`:
its arguments differ between torch's versions, it cannot tie a rank's life to ours, and closing its files
sends a signal to a process that may be gone.
"""

import contextlib
import ctypes
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from multiprocessing import connection

import psutil

from .. import log_lines
from ..state import ACTIVE_WORLD_SIZE_ENV, FORMATION_SIZE_ENV
from ..store.address import split_host_port
from ..store.plan import ANNOUNCED
from ..torch_groups.device import DEVICES_ENV
from .outputs import RankFiles, count_kernel_kills
from .rounds import Round
from .signals import NOTICES, die_with, prctl

INCARNATION_ENV = "FT_WRAPPER_INCARNATION"
TIMER_FILE_ENV = "TORCHELASTIC_TIMER_FILE"
_CPP_LOG_LEVEL_ENV = "TORCH_CPP_LOG_LEVEL"  # torch's: read once, when it is imported
#: In an argument it stands for the local rank. It alone is substituted, so that a shell's ``$$`` stays.
LOCAL_RANK = "${local_rank}"

_PR_SET_CHILD_SUBREAPER = 36


# What a rank runs, and finds -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """What a rank runs.

    Args:
        command: program and arguments, for exec.
        script: the Python script or module; None if it is neither, or another Python must run it.
        arguments: the script's.
        is_module: whether it is a module.
    """

    command: tuple[str, ...]
    script: str | None = None
    arguments: tuple[str, ...] = ()
    is_module: bool = False


def python_program(
    script: str, arguments: Iterable[str], *, is_module: bool = False, python: str | None = None
) -> Program:
    """A script or module that Python runs; this Python when None."""
    flags = ("-u", "-m") if is_module else ("-u",)
    command = (python or sys.executable, *flags, script, *arguments)
    return Program(command, script, tuple(arguments), is_module)


def with_local_rank(arguments: Iterable[str], local_rank: str) -> list[str]:
    """Puts a rank's number into arguments, for each `LOCAL_RANK` in them."""
    return [argument.replace(LOCAL_RANK, local_rank) for argument in arguments]


@dataclasses.dataclass(frozen=True)
class Job:
    """What all ranks of this node have in common.

    Args:
        nproc: number of ranks.
        role: their name in log lines.
        run_id: of the job on all nodes.
        max_restarts: how often the whole group may be restarted.
        active_world_size: how many ranks call the function of a wrapped job; None: as the wrapper says.
        virtual_local_rank: whether each rank sees only its own GPU.
        signals: those that are forwarded to the ranks, and end them.
        devices: of this node, if it has more ranks and some are spares: active ones get one each; else 0.
        timer_file: the named pipe of the watchdog; empty if there is none.
        locks: the file by which ranks share the devices.
    """

    nproc: int
    role: str
    run_id: str
    max_restarts: int
    active_world_size: int | None = None
    virtual_local_rank: bool = False
    signals: tuple[signal.Signals, ...] = ()
    devices: int = 0
    timer_file: str = ""
    locks: str = ""

    def shared_environment(self) -> dict[str, str]:
        """What libraries read at import: it must be there before any rank is forked."""
        # Not TORCH_NCCL_ASYNC_ERROR_HANDLING, as torchrun does: 1 ends ranks that a restart would keep. Where
        # it is unset the wrapper sets it to 0, and without a wrapper torch's default ends a hang.
        variables = {
            "TORCHELASTIC_RUN_ID": self.run_id,
            # Ranks that wait for another one check on it now and then. At WARNING, c10d writes two lines for
            # each wait that such a check ends.
            _CPP_LOG_LEVEL_ENV: os.environ.get(_CPP_LOG_LEVEL_ENV, "ERROR"),
        }
        if self.shares_processor():
            variables["OMP_NUM_THREADS"] = "1"
        if self.signals:
            variables["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(each.name for each in self.signals)
        if (form := log_lines.chosen_format()) != os.environ.get(log_lines.FORMAT_ENV, log_lines.TEXT):
            variables[log_lines.FORMAT_ENV] = form
        if self.timer_file:
            variables[TIMER_FILE_ENV] = self.timer_file
        return variables

    def shares_processor(self) -> bool:
        """Whether each rank gets one thread, because there are several and the user did not say otherwise."""
        return self.nproc > 1 and "OMP_NUM_THREADS" not in os.environ

    def environment(self, local_rank: int, restarts: int, where: Round) -> dict[str, str]:
        """What a rank finds, in all of its incarnations.

        Args:
            local_rank: which one of this node.
            restarts: how often the group has been restarted.
            where: the round.
        """
        host, port = split_host_port(where.address)
        own: dict[str, str] = {}
        if self.active_world_size is not None:
            own[ACTIVE_WORLD_SIZE_ENV] = str(self.active_world_size)
        if self.virtual_local_rank:  # as torchrun has it: among the GPUs that this process may see
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            device = str(local_rank) if visible is None else visible.split(",")[local_rank].strip()
            own |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": device}
        if self.devices:
            own[DEVICES_ENV] = f"{self.locks}:{self.devices}"
            own["LOCAL_RANK"] = str(local_rank % self.devices)
        return {
            **self.shared_environment(),
            ANNOUNCED: where.store,
            FORMATION_SIZE_ENV: str(where.formation_size),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            # The store is already up: no rank may try to host it.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "RANK": str(where.rank(local_rank)),
            "LOCAL_RANK": str(local_rank),
            "ROLE_RANK": str(where.role_rank + local_rank),
            "GROUP_RANK": str(where.group_rank),
            "WORLD_SIZE": str(where.world_size),
            "LOCAL_WORLD_SIZE": str(self.nproc),
            "ROLE_WORLD_SIZE": str(where.role_world_size),
            "GROUP_WORLD_SIZE": str(where.group_world_size),
            "ROLE_NAME": self.role,
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            **own,
        }


# The process -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Request:
    """A rank that was asked for.

    Args:
        rank: its local rank.
        incarnation: number of this process of the rank in this round, from 0.
        files: where its streams and its error go.
        environment: in addition to our own.
        is_replaced: whether another one is started if it dies.
        asked: when, in monotonic seconds.
        kernel_kills: how many processes the kernel had killed by then for lack of memory.
    """

    rank: int
    incarnation: int
    files: RankFiles
    environment: Mapping[str, str]
    is_replaced: bool
    asked: float = dataclasses.field(default_factory=time.monotonic)
    kernel_kills: int = dataclasses.field(default_factory=count_kernel_kills)


@dataclasses.dataclass(frozen=True)
class RankProcess:
    """A process that runs, or has ended and was not reaped yet. Its pid cannot be another's until then.

    Args:
        request: what was asked for.
        pid: the process, a child of ours; it leads a session and a process group of its own.
        pidfd: becomes readable when the process has ended, and all its memory is free.
    """

    request: Request
    pid: int
    pidfd: int

    def send(self, signum: int) -> None:
        """Sends a signal to the process group."""
        try:
            os.killpg(self.pid, signum)
        except ProcessLookupError:  # just forked: it has no group of its own yet
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signum)

    def reap(self) -> int:
        """Reaps the ended process; ends its helpers if it failed; closes the pidfd.

        Returns:
            The exit code, or minus the number of the signal that ended it.
        """
        status = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert status is not None
        exitcode = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        if exitcode != 0:
            # Its helpers, data loaders for instance, would hold memory, ports and devices. Done before it is
            # reaped, so that the pid is still its own. Helpers of a successful rank may stay.
            self.send(signal.SIGKILL)
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        os.close(self.pidfd)
        return exitcode


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    stdout: int | None = None,
    stderr: int | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Starts a program in a session of its own; it is killed when this process dies, however that happens.

    A Python program ignores `NOTICES` until the script handles them, so that they do not end it earlier.

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
        # nothing and logs nothing. Notices: Python can handle them later, which a shell cannot.
        preexec_fn=functools.partial(die_with, os.getpid(), NOTICES if command[0] == sys.executable else ()),
    )


# Orphans ---------------------------------------------------------------------------------------------------


def await_adoption(parent: int) -> None:
    """Waits until this process is the child of another one: of the nearest subreaper, or of init.

    Args:
        parent: whose child it has been so far, and which is about to exit.
    """
    if os.getppid() == parent:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(parent)
            connection.wait([pidfd])  # the kernel hands children over before it reports a process's end
            os.close(pidfd)


@contextlib.contextmanager
def adopted() -> Iterator[Callable[[Collection[int]], None]]:
    """Within it, this process is a subreaper: it adopts what its descendants leave behind.

    So the ranks that its template forks become its own children. Then it also gets what the ranks leave
    behind, data loaders for instance, and has to wait for these.

    Returns:
        A context: a function that reaps ended orphans, without blocking. It takes the children that the
        caller reaps itself: the first of them that has ended, and was not reaped yet, hides all behind it.
        Call it again then.

    Raises:
        OSError: the kernel refuses.
    """
    # Children that something else in this process has started, and waits for.
    others = {child.pid for child in psutil.Process().children()}

    def reap(ours: Collection[int]) -> None:
        with contextlib.suppress(ChildProcessError):  # also if no child is left
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in ours:
                return
            # Each by its pid: a zombie that other code here does not wait for would hide all behind it.
            for pid in {child.pid for child in psutil.Process().children()}.difference(others, ours):
                os.waitpid(pid, os.WNOHANG)

    if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    try:
        yield reap
        reap(())
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
