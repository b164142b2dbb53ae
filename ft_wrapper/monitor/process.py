"""A monitor process, forked from its rank before CUDA: it outlives the rank and a held GIL."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn

from .._files import owners_only
from ..exception import StoreError
from ..settings import Limits
from ..store import StorePlan, TCPStoreServer
from .line import MonitorLine, send
from .shared_memory import RankMemory
from .watch import RankWatch, Stage, step_back_for_good

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class MonitorFiles:
    """Files of a monitor process; None for none.

    Args:
        logfile: where it logs to.
        pidfile: where it writes its process id.
    """

    logfile: str | None = None
    pidfile: str | None = None


def fork_monitor(
    limits: Limits,
    plan: StorePlan,
    *,
    hosts: bool,
    memory: RankMemory,
    files: MonitorFiles,
    on_lost: Callable[[], None],
) -> MonitorLine:
    """Forks a monitor process for the calling one, which is a rank.

    Args:
        limits: the timeouts it keeps.
        plan: how it gets at the store.
        hosts: whether it hosts the store's server as well.
        memory: shared with the rank; the caller holds its life mutex.
        files: its log and pid file.
        on_lost: called, in a thread of its own, if the monitor ends without having been told to.

    Returns:
        The line to it; closing that ends and reaps the process.

    Raises:
        StoreError: the port to host is taken.
    """
    ours, theirs = socket.socketpair()
    rank_pid = os.getpid()
    with warnings.catch_warnings():
        # Python warns of forking with threads: the child takes no lock that a thread of ours may hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _run(limits, plan, hosts, memory, files, theirs, rank_pid)
    theirs.close()
    line = MonitorLine(ours, pid, on_lost, is_child=True, replaced=limits.replaced)
    try:
        line.await_start()
    except BaseException:
        line.kill()
        raise
    return line


def _run(
    limits: Limits,
    plan: StorePlan,
    hosts: bool,
    memory: RankMemory,
    files: MonitorFiles,
    line: socket.socket,
    rank_pid: int,
) -> NoReturn:
    """All of a forked monitor. Never returns into the rank's code, never drops what it inherited."""
    status = 1
    try:
        # Launchers kill by process group; and a collection here would destroy torch objects of the rank.
        gc.disable()
        os.setsid()
        _reset_signals()
        _close_inherited({line.fileno(), memory.fd})
        _redirect(files)
        server = _host(plan, line) if hosts else None
        watch = RankWatch(limits, plan.connect, memory, line, rank_pid, os.pidfd_open(rank_pid))
        send(line, {})
        died = watch.run()
        if died:
            _tell_others(watch)
        if server is not None:
            watch.await_goodbyes()
            server.close()  # not left to the exit: the next call's host takes the port once this has ended
        if died:
            # Freeing this process's memory takes a CPU for as long as freeing the rank's.
            watch.await_freed(limits.termination_grace_time)
            step_back_for_good()
        status = 0
    except BaseException:
        log.critical("the monitor of process %d failed, so the rank leaves the job", rank_pid, exc_info=True)
    finally:
        os._exit(status)


def _tell_others(watch: RankWatch) -> None:
    """Tells the others of the rank's death. Outside of a call there may be neither others nor a store."""
    try:
        watch.tell_others()
    except StoreError as error:
        if watch.stage is not Stage.BETWEEN:
            raise
        log.debug("cannot tell the other ranks that this one ended outside of a call: %s", error)


def _host(plan: StorePlan, line: socket.socket) -> TCPStoreServer:
    """Hosts the coordination store from now on; tells the rank if the port is taken."""
    assert plan.port is not None
    try:
        return plan.open_server()
    except StoreError as error:
        send(line, {"error": str(error)})
        raise


def _reset_signals() -> None:
    """The rank's handlers are not for this process, and a terminal's Ctrl-C is meant for the rank."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _close_inherited(keep: set[int]) -> None:
    """Closes every file that is the rank's: peers would see its sockets open until this process ends."""
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd > 2 and fd not in keep:
            try:
                os.close(fd)
            except OSError:
                pass


def _redirect(files: MonitorFiles) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    out = null
    if files.logfile is not None:
        out = os.open(files.logfile, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if files.pidfile is not None:
        with open(files.pidfile, "w", encoding="utf-8", opener=owners_only) as pidfile:
            pidfile.write(f"{os.getpid()}\n")
    root = logging.getLogger()
    for logger in (root, *(logging.getLogger(name) for name in root.manager.loggerDict)):
        logger.handlers = []
    handler = logging.StreamHandler(os.fdopen(os.dup(2), "w", buffering=1))
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    sys.stderr = sys.stdout = handler.stream
