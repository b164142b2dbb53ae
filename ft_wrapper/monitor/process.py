"""A rank's handle on its monitor process: forked before CUDA is touched, it outlives the rank and a held GIL.

The rank talks to it over a socket pair, one JSON object a line: ``join`` (who the rank is), ``view`` (the
iteration it is in), ``serve`` (open the store of an iteration; answered with its port), ``bye`` (the rank
leaves in order). What the monitor does with it is in `process_main`.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import threading
import warnings
from collections.abc import Callable
from typing import Any

from ..exception import InternalError, StoreError
from ..store import Decision, Member, StorePlan, View
from .process_main import MonitorFiles, monitor_main
from .settings import MonitorSettings
from .shared_memory import RankMemory

log = logging.getLogger(__name__)

_ANSWER_TIMEOUT = 60.0  # seconds: the monitor only opens a port


class MonitorProcess:
    """Owns the monitor process, the socket to it, and a thread that waits for its end.

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
        self._socket, theirs = socket.socketpair()
        self._lifeline, held = os.pipe()  # ends with the monitor
        rank_pid = os.getpid()
        with warnings.catch_warnings():
            # Python warns of forking with threads: the child takes no lock that a thread of ours may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            monitor_main(settings, plan, hosts, memory, files, theirs, held, rank_pid)
        theirs.close()
        os.close(held)
        self._stop_watching = os.eventfd(0, os.EFD_CLOEXEC)
        self._leaving = False
        self._on_lost = on_lost
        self._socket.settimeout(_ANSWER_TIMEOUT)
        self._watcher = threading.Thread(target=self._watch, name="ft_wrapper-monitor-watch", daemon=True)
        self._watcher.start()
        try:
            self._answer("start")
        except BaseException:
            self.kill()
            raise

    def join(self, member: Member) -> None:
        """Says who the rank is; from then on the monitor sends its heartbeat."""
        self._send({"type": "join", "member": str(member)})

    def enter(self, view: View, decision: Decision | None, rank: int | None) -> None:
        """Says which iteration the rank is in.

        Args:
            view: the iteration.
            decision: what changed since the last one said; None to say it all.
            rank: the rank in it.
        """
        message: dict[str, Any] = {"type": "view", "rank": rank, "nonce": view.nonce}
        if decision is None:
            message["view"] = [view.call, view.n, view.first, view.min_world_size]
            message["members"] = [str(member) for member in view.members]
        else:
            message["decision"] = decision.to_json()
        self._send(message)

    def serve(self, host: str) -> int:
        """Has the monitor open the store that ``torch.distributed`` uses in one iteration.

        In the monitor, so that peers whose clients come when this rank has died find a server: a client
        without one tries again for its whole timeout, and nothing frees it.

        Args:
            host: this host, as the other ranks reach it.

        Returns:
            The store's port. It serves until the next one does, or the monitor ends.

        Raises:
            StoreError: no store could be opened.
        """
        self._send({"type": "serve", "host": host})
        port = self._answer("open a store")["port"]
        assert isinstance(port, int)
        return port

    def close(self, timeout: float) -> None:
        """Lets the monitor end, after the others' last words if it hosts the store; ends it if it does not.

        Args:
            timeout: seconds to wait for it.
        """
        self._say_bye()
        self._watcher.join(timeout)
        self.kill()

    def detach(self) -> None:
        """Lets the monitor go on alone: the rank fails, but the others need the store that it hosts."""
        self._say_bye()
        os.eventfd_write(self._stop_watching, 1)
        self._close()

    def kill(self) -> None:
        """Ends the monitor, whatever it does, and reaps it."""
        self._leaving = True
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        self._close()

    def _close(self) -> None:
        self._watcher.join(_ANSWER_TIMEOUT)
        os.close(self._stop_watching)
        self._socket.close()

    def _say_bye(self) -> None:
        self._leaving = True
        try:
            self._send({"type": "bye"})
        except InternalError:
            log.debug("the monitor process %d ended before it was told to", self.pid)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise InternalError(
                f"the monitor process {self.pid} of this rank ended; see monitor_process_logfile"
            ) from error

    def _answer(self, what: str) -> dict[str, Any]:
        line = b""
        while not line.endswith(b"\n") and (part := self._socket.recv(4096)):
            line += part
        if not line:
            raise InternalError(
                f"the monitor process {self.pid} ended when it was to {what}; see monitor_process_logfile"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise StoreError(answer["error"])
        return answer

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._lifeline, select.POLLIN)
        poll.register(self._stop_watching, select.POLLIN)
        try:
            poll.poll()
        finally:
            os.close(self._lifeline)
        if not self._leaving:
            log.error("the monitor process %d of this rank ended: its faults would go unnoticed", self.pid)
            self._on_lost()
