"""A rank's handle on its monitor process: forked before CUDA, it outlives the rank and a held GIL."""

from __future__ import annotations

import os
import signal
import socket
import warnings
from collections.abc import Callable

from ..store import StorePlan
from .line import MonitorLine
from .process_main import MonitorFiles, monitor_main
from .settings import MonitorSettings
from .shared_memory import RankMemory


class MonitorProcess(MonitorLine):
    """Owns the monitor process, and the line to it.

    Args:
        settings: the timeouts it keeps.
        plan: how it gets at the store.
        hosts: whether it hosts the store's server as well.
        memory: shared with the rank; the caller holds its life mutex.
        files: its log and pid file.
        on_lost: called, in a thread of its own, if the monitor ends without having been told to.

    Raises:
        StoreError: the port to host is taken.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        plan: StorePlan,
        *,
        hosts: bool,
        memory: RankMemory,
        files: MonitorFiles,
        on_lost: Callable[[], None],
    ) -> None:
        ours, theirs = socket.socketpair()
        rank_pid = os.getpid()
        with warnings.catch_warnings():
            # Python warns of forking with threads: the child takes no lock that a thread of ours may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            monitor_main(settings, plan, hosts, memory, files, theirs, rank_pid)
        theirs.close()
        super().__init__(ours, pid, "monitor process", "monitor_process_logfile", on_lost)
        try:
            self._answer("start")
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Ends the process, whatever it does, and reaps it."""
        self._leaving = True
        try:
            if not self._has_ended():  # else somebody else may have reaped it, and its number be another's
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        super().kill()
