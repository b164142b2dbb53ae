"""A monitor process beside the rank: forked from the rank, or a new Python.

A fork takes milliseconds and shares the rank's memory. But a fork of a process that uses CUDA inherits the
device's mappings and descriptors. If the rank is killed, the device stays in use until the monitor ends. So a
rank with CUDA gets a new Python, which takes as long as importing torch.
"""

import contextlib
import dataclasses
import gc
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import torch

from .._files import check_own_file, owners_only
from ..exception import StoreError
from ..settings import AllLimits
from ..store.plan import StorePlan
from .heart import Heart
from .line import MonitorLine
from .messages import Reply, send
from .service import heart_name
from .shared_memory import RankMemory
from .watch import RESTART, RankWatch, await_exit

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Task:
    """What the monitor process needs; see the arguments of `start_monitor`."""

    limits: AllLimits
    plan: StorePlan
    hosts: bool
    logfile: str | None
    pidfile: str | None
    pid: int
    heart: str


def start_monitor(
    limits: AllLimits,
    plan: StorePlan,
    *,
    hosts: bool,
    memory: RankMemory,
    questions: socket.socket,
    logfile: str | None,
    pidfile: str | None,
    on_lost: Callable[[], None],
) -> MonitorLine:
    """Starts a monitor process for the calling process, a rank.

    Args:
        limits: the timeouts.
        plan: how the monitor connects to the store.
        hosts: whether the monitor also hosts the store's server.
        memory: the memory shared with the monitor; the caller holds its life mutex.
        questions: the monitor's end of the socket for questions to the rank.
        logfile: path of the monitor's log; None for no log.
        pidfile: path of a file for the monitor's process id; None for no file.
        on_lost: called, in its own thread, if the monitor ends unasked.

    Returns:
        The line to the monitor. Closing it ends and reaps the process.

    Raises:
        StoreError: the port to host is taken.
        OSError: a file belongs to another user, or cannot be opened; names the file.
        RuntimeError: CUDA is in use, and the plan cannot be sent to another Python.
    """
    for setting, path in (("monitor_process_logfile", logfile), ("monitor_process_pidfile", pidfile)):
        if path is not None:
            check_own_file(setting, path)
    task = _Task(limits, plan, hosts, logfile, pidfile, os.getpid(), heart_name())
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        with theirs:
            is_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            parts = theirs, questions, memory
            pid = _spawn(task, ours, *parts) if is_in_use else _fork(task, *parts)
        line = MonitorLine(ours, pid, on_lost, task.heart, is_child=True, replaced=limits.replaced)
        undo.callback(line.kill)
        line.await_start()
        undo.pop_all()
    return line


def _fork(task: _Task, line: socket.socket, questions: socket.socket, memory: RankMemory) -> int:
    with warnings.catch_warnings():
        # Python warns of forking with threads. The child takes no lock that one of our threads may hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            # A collection in the child would destroy the rank's torch objects. And launchers kill by process
            # group, so the child leaves the rank's.
            gc.disable()
            os.setsid()
            _reset_signals()
            status = _run(task, line, questions, memory)
        finally:
            os._exit(status)  # never returns into the rank's code, nor destroys inherited objects
    return pid


def _spawn(
    task: _Task, ours: socket.socket, line: socket.socket, questions: socket.socket, memory: RankMemory
) -> int:
    try:
        said = pickle.dumps(task)
    except Exception as error:
        raise RuntimeError(
            f"CUDA is already initialized in this process, so the monitor process cannot be forked, and "
            f"{task.plan.description} cannot be sent to a new one ({error}); define store_factory at the top "
            "of a module, call the wrapped function before anything that touches CUDA, or start the script "
            "with ftrun, which runs the monitor itself"
        ) from error
    fds = (line.fileno(), questions.fileno(), memory.fd)
    monitor = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import main; main()", *map(str, fds)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        pass_fds=fds,
        start_new_session=True,
    )
    # Not through its stdin: if this process has none, one of the descriptors is 0.
    with contextlib.suppress(OSError):  # the monitor has ended, which is noticed next
        ours.sendall(said)
    monitor.returncode = 0  # the line reaps it
    return monitor.pid


def main() -> None:
    """Runs the monitor, in the new Python that `start_monitor` has started."""
    line, questions = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:3])
    memory = RankMemory.from_fd(int(sys.argv[3]))
    task: _Task = pickle.load(line.makefile("rb"))
    gc.disable()  # as in a fork: all objects live as long as this process
    os._exit(_run(task, line, questions, memory))


def _run(task: _Task, line: socket.socket, questions: socket.socket, memory: RankMemory) -> int:
    """Runs the monitor, once signals are reset; returns the process's exit status."""
    try:
        _close_inherited({line.fileno(), questions.fileno(), memory.fd})
        _redirect(task.logfile, task.pidfile)
        _watch(task, line, questions, memory)
    except BaseException:
        log.critical("the monitor of process %d failed, so the rank leaves the job", task.pid, exc_info=True)
        return 1
    return 0


def _watch(task: _Task, line: socket.socket, questions: socket.socket, memory: RankMemory) -> None:
    limits, plan = task.limits, task.plan
    try:
        server = plan.open_server() if task.hosts else None
    except StoreError as error:
        send(line, vars(Reply(error=str(error))))
        raise
    pidfd = os.pidfd_open(task.pid)
    heart = Heart(plan.connect, task.heart, limits)
    watch = RankWatch(limits, plan.connect, memory, line, questions, task.pid, pidfd, heart)
    send(line, vars(Reply()))
    died = watch.run()
    if died:
        watch.tell_others()
    if server is not None:
        watch.await_goodbyes()
        server.close()  # before the exit, since the next call's host needs the port
    if died:
        # Freeing this process's memory occupies a CPU for as long as freeing the rank's. So this process ends
        # only after the other ranks have restarted.
        await_exit(pidfd, limits.termination_grace_time)
        time.sleep(RESTART)


def _reset_signals() -> None:
    """Drops the rank's handlers, and ignores a terminal's Ctrl-C, which is meant for the rank."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _close_inherited(keep: set[int]) -> None:
    """Closes the rank's files: its peers would see its sockets open until this process ends."""
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd > 2 and fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)


def _redirect(logfile: str | None, pidfile: str | None) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    out = owners_only(logfile, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if logfile is not None else null
    os.dup2(out, 1)
    os.dup2(out, 2)
    if pidfile is not None:
        with open(pidfile, "w", encoding="utf-8", opener=owners_only) as file:
            file.write(f"{os.getpid()}\n")
    root = logging.getLogger()
    for logger in (root, *(logging.getLogger(name) for name in root.manager.loggerDict)):
        logger.handlers = []
    handler = logging.StreamHandler(os.fdopen(os.dup(2), "w", buffering=1))
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    sys.stderr = sys.stdout = handler.stream
