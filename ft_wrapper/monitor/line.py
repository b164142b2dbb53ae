"""A rank's line to its monitor, wherever that runs: in a process of its own, or inside the agent.

The rank says ``join`` (who it is), ``view`` (the iteration it is in), ``serve`` (open the store of an
iteration; answered with its port), ``between`` (it has left a call, and may come to another one; answered
once the monitor looks at the shared memory no more), ``bye`` (it leaves in order). What the monitor does with
it is in `loop`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from ..exception import InternalError, StoreError
from ..store import Decision, Member, StorePlan, View
from . import wire
from .settings import MonitorSettings
from .shared_memory import RankMemory

log = logging.getLogger(__name__)

_ANSWER_TIMEOUT = 60.0  # seconds: the monitor only opens a port
_HELLO_TIMEOUT = 10.0  # seconds that the agent may take to look at who is there

_CREDENTIALS = struct.Struct("3i")


class MonitorLine:
    """Owns the socket to the monitor, and a thread that waits for the monitor's end.

    Args:
        line: the socket.
        pid: the process that the monitor runs in.
        name: what to call the monitor in messages.
        log_of: where to look for what has happened to it.
        on_lost: called, in a thread of its own, if the monitor ends without having been told to.
        heart: the heart that beats for this rank as for others; None if it gets one of its own.
    """

    def __init__(
        self,
        line: socket.socket,
        pid: int,
        name: str,
        log_of: str,
        on_lost: Callable[[], None],
        heart: str | None = None,
    ) -> None:
        self.pid = pid
        self.heart = heart
        self._line = line
        self.name = name
        self.log_of = log_of
        self._on_lost: Callable[[], None] | None = on_lost
        self._leaving = False
        self._stop_watching = os.eventfd(0, os.EFD_CLOEXEC)
        self._line.settimeout(_ANSWER_TIMEOUT)
        self._watcher: threading.Thread | None = threading.Thread(
            target=self._watch, name="ft_wrapper-monitor-watch", daemon=True
        )
        self._watcher.start()

    def join(self, member: Member) -> None:
        """Says who the rank is; from then on the monitor sends its heartbeat."""
        self._send({"type": "join", "member": str(member)})

    def enter(self, view: View, decision: Decision | None) -> None:
        """Says which iteration the rank is in; which it is there stands in the shared memory.

        Args:
            view: the iteration.
            decision: what changed since the last one said; None to say it all.
        """
        message: dict[str, Any] = {"type": "view", "nonce": view.nonce}
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

    def between(self) -> bool:
        """Says that the rank has left a call in order, and may take its time until the next one.

        From then on the monitor sends the heartbeat and waits for the process's end, and that is all. The
        rank keeps the socket, to be closed with `close` once another monitor has joined, and nothing else.
        No shared memory is needed any more.

        Returns:
            Whether the monitor does so; False if it has ended.
        """
        self._leaving = True
        try:
            self._send({"type": "between"})
            self._answer("keep watch between two calls")
        except (InternalError, OSError) as error:
            log.debug("no monitor keeps watch between two calls: %s", error)
            return False
        finally:
            self._stop_watcher()
        return True

    def close(self, timeout: float) -> None:
        """Lets the monitor end, after the others' last words if it hosts the store; ends it if it does not.

        Args:
            timeout: seconds to wait for it.
        """
        self._say_bye()
        self._has_ended(timeout)
        self.kill()

    def detach(self) -> None:
        """Lets the monitor go on alone: the rank fails, but the others need the store that it hosts."""
        self._say_bye()
        self._hang_up()

    def kill(self) -> None:
        """Ends the line, whatever the monitor does."""
        self._leaving = True
        self._hang_up()

    def _hang_up(self) -> None:
        self._stop_watcher()
        self._line.close()

    def _stop_watcher(self) -> None:
        if self._watcher is not None:
            os.eventfd_write(self._stop_watching, 1)
            self._watcher.join(_ANSWER_TIMEOUT)
            os.close(self._stop_watching)
            self._watcher = None
        self._on_lost = None  # it refers to the call, which refers to this line

    def _has_ended(self, seconds: float = 0.0) -> bool:
        """Waits for the monitor's end; whether it has come."""
        poll = select.poll()
        poll.register(self._line, select.POLLRDHUP)
        return bool(poll.poll(seconds * 1000))

    def _say_bye(self) -> None:
        self._leaving = True
        try:
            self._send({"type": "bye"})
        except InternalError:
            log.debug("the %s (%d) ended before it was told to", self.name, self.pid)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            wire.send(self._line, message)
        except OSError as error:
            raise InternalError(f"this rank's {self.name} ({self.pid}) ended; see {self.log_of}") from error

    def _answer(self, what: str) -> dict[str, Any]:
        try:
            answer = wire.receive(self._line)
        except (EOFError, ConnectionError) as error:
            raise InternalError(
                f"the {self.name} ({self.pid}) ended when it was to {what}; see {self.log_of}"
            ) from error
        if "error" in answer:
            raise StoreError(answer["error"])
        return answer

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._line, select.POLLRDHUP)
        poll.register(self._stop_watching, select.POLLIN)
        poll.poll()
        if not self._leaving:
            log.error(
                "this rank's %s (%d) ended: its faults would go unnoticed, so it leaves the job",
                self.name,
                self.pid,
            )
            if self._on_lost is not None:
                self._on_lost()


def line_to_agent(
    settings: MonitorSettings, plan: StorePlan, memory: RankMemory, on_lost: Callable[[], None]
) -> MonitorLine | None:
    """Asks the agent that has started this process, if there is one, to run the monitor.

    Args:
        settings: the timeouts that the monitor keeps.
        plan: how it gets at the store.
        memory: shared with it; the caller holds its life mutex.
        on_lost: as for `MonitorLine`.

    Returns:
        The line; None if there is no agent, or it will not: then the rank needs a monitor process.
    """
    name = os.environ.get(wire.AGENT_ENV)
    if not name or plan.plain is None:
        return None
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.settimeout(_HELLO_TIMEOUT)
        line.connect(f"\0{name}")
        hello = {"version": wire.VERSION, "settings": dataclasses.asdict(settings), "store": plan.plain}
        wire.send_hello(line, hello, memory.fd)
        answer = wire.receive(line)
        agent = peer(line)[0]
    except (OSError, EOFError, ValueError) as error:
        answer = {"refused": str(error) or repr(error)}
    refused, heart = answer.get("refused"), answer.get("heart")
    if refused is not None:
        log.debug("no monitor inside the agent: %s", refused)
        line.close()
        return None
    return MonitorLine(line, agent, "monitor inside the agent", "what ftrun says", on_lost, heart)


def peer(line: socket.socket) -> tuple[int, int]:
    """Who has connected, or listens, at the other end of a Unix socket: process and effective user."""
    data = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid
