"""What runs in a monitor process: a monitor's loop, and all that comes of being a forked process."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import signal
import socket
import sys
from typing import NoReturn

from .._files import owners_only
from ..exception import StoreError
from ..store import StorePlan, TCPStoreServer
from . import wire
from .loop import MonitorLoop
from .settings import MonitorSettings
from .shared_memory import RankMemory
from .stepping_back import step_back_for_good

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


def monitor_main(
    settings: MonitorSettings,
    plan: StorePlan,
    hosts: bool,
    memory: RankMemory,
    files: MonitorFiles,
    line: socket.socket,
    rank_pid: int,
) -> NoReturn:
    """All of a forked monitor. Never returns into the rank's code, never drops what it inherited.

    Args:
        settings: the timeouts to keep.
        plan: how to get at the store.
        hosts: whether to host its server.
        memory: shared with the rank.
        files: log and pid file.
        line: what the rank says comes here.
        rank_pid: the rank's process.
    """
    status = 1
    try:
        # Launchers kill by process group; and a collection here would destroy torch objects of the rank.
        gc.disable()
        os.setsid()
        _reset_signals()
        _close_inherited({line.fileno(), memory.fd})
        _redirect(files)
        server = _host(plan, line) if hosts else None
        loop = MonitorLoop(settings, plan.connect, memory, line, rank_pid, os.pidfd_open(rank_pid))
        wire.send(line, {})
        died = loop.run()
        if died:
            _tell_others(loop)
        if server is not None:
            loop.await_goodbyes()
        if died:
            # Freeing this process's memory takes a CPU for as long as freeing the rank's.
            loop.await_freed(settings.termination_grace_time)
            step_back_for_good()
        status = 0
    except BaseException:
        log.critical("the monitor of process %d failed: its rank leaves the job", rank_pid, exc_info=True)
    finally:
        os._exit(status)


def _tell_others(loop: MonitorLoop) -> None:
    """Tells the others of the rank's death. Outside of a call there may be neither others nor a store."""
    try:
        loop.tell_others()
    except StoreError as error:
        if not loop.is_between:
            raise
        log.debug("the others could not be told that the rank ended outside of a call: %s", error)


def _host(plan: StorePlan, line: socket.socket) -> TCPStoreServer:
    """Hosts the coordination store from now on; tells the rank if the port is taken."""
    assert plan.port is not None
    try:
        return plan.open_server()
    except StoreError as error:
        wire.send(line, {"error": str(error)})
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
