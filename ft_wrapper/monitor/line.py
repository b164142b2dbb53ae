"""A rank's line to its monitor, wherever that runs: in a process of its own, or inside the agent.

One JSON object a line, over a stream socket. An agent hears hello first, with the memory's descriptor, and
answers which heart beats for the rank and whether its process is replaced, or why it gets no monitor there.
Then the rank says ``join`` (who it is), ``view`` (the iteration it is in), ``restart`` (all ranks are back,
and this one came last), ``serve`` (open the store of an iteration; answered with its port), ``between`` (it
has left a call, and may come to another one; answered once the monitor looks at the shared memory no more),
``answer`` (the monitor has not looked after it for too long), ``bye`` (it leaves in order). What the monitor
does with it is in `watch`.
"""

import contextlib
import dataclasses
import json
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..exception import InternalError, StoreError
from ..protocol.records import Decision, Member, View
from ..settings import Limits
from ..store import StorePlan
from ..store.bounded import in_background
from ..store.secret import AGENT_ENV, peer
from .shared_memory import RankMemory

log = logging.getLogger(__name__)

#: Of hello: another Python, with another ft_wrapper, may run the ranks.
VERSION = 12

_LONGEST = 1 << 16  # bytes of an answer, or of hello
_LONGEST_POLL = 2**31 - 1  # milliseconds: some 25 days
_ANSWER_TIMEOUT = 60.0  # seconds: the monitor only opens a port
_SOON = 1.0  # seconds within which a monitor that lives answers, mostly
_HELLO_TIMEOUT = 10.0  # seconds that the agent may take to look at who is there


@dataclasses.dataclass(eq=False)
class MonitorLine:
    """Owns the socket to the monitor, and a thread that waits for the monitor's end.

    Args:
        line: the socket.
        pid: the process that the monitor runs in.
        on_lost: called, in a thread of its own, if the monitor ends without having been told to.
        heart: the name of the heart that beats for this rank.
        is_child: whether the monitor's process is this one's own, and ends with the line.
        replaced: whether an agent starts another process in place of this one, which joins the job.
    """

    line: socket.socket
    pid: int
    on_lost: Callable[[], None] | None
    heart: str
    is_child: bool
    replaced: bool

    def __post_init__(self) -> None:
        self.name = "monitor process" if self.is_child else "monitor inside the agent"
        self.log_of = "monitor_process_logfile" if self.is_child else "what ftrun says"
        self._leaving = False
        self._sending = threading.Lock()
        self.line.settimeout(_ANSWER_TIMEOUT)
        self._watcher: threading.Thread | None = in_background("watching the monitor", self._watch)

    def await_start(self) -> None:
        """Waits until a monitor that was just forked is at work.

        Raises:
            StoreError: the port to host is taken.
        """
        self._answer("start")

    def join(self, member: Member) -> None:
        """Says who the rank is; from then on the monitor sends its heartbeat."""
        self._send({"type": "join", "member": str(member)})

    def enter(self, view: View, decision: Decision | None) -> None:
        """Says which iteration the rank is in; which it is there stands in the shared memory.

        Args:
            view: the iteration.
            decision: what changed since the last one said; None to say it all.
        """
        said = (
            {"nonce": view.nonce, "decision": decision.to_json()} if decision else {"whole": view.to_json()}
        )
        self._send({"type": "view", **said})

    def restarted(self, cause: str, phases: Mapping[str, float]) -> None:
        """Says that all ranks are back: for who counts restarts. From any thread.

        Args:
            cause: what kind of fault it was.
            phases: seconds by name, ``total`` among them.

        Raises:
            InternalError: the monitor has ended.
        """
        self._send({"type": "restart", "cause": cause, "phases": dict(phases)})

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
        port: int = self._answer("open a store")["port"]
        return port

    def await_answer(self) -> None:
        """Waits for a monitor that has not looked after this rank for longer than it should.

        Nobody watches the rank meanwhile, and no heartbeat is sent for it: in each iteration that it went on
        to, it would be evicted again.

        Raises:
            InternalError: it did not answer in time, or has ended; this rank has to leave.
        """
        self._send({"type": "answer"})
        if not self._is(select.POLLIN, _SOON):
            who = (self.name, self.pid, socket.gethostname())
            log.error("this rank's %s (%d on %s) hangs: the rank stays out until it answers", *who)
        self._answer("answer")

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
        """Ends the line, whatever the monitor does, and the monitor if it is a process of the rank's own."""
        self._leaving = True
        if self.is_child:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                if not self._has_ended():  # else it may have been reaped already, and its number be another's
                    os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        self._hang_up()

    def _hang_up(self) -> None:
        self._stop_watcher()
        self.line.close()

    def _stop_watcher(self) -> None:
        if self._watcher is not None:
            with contextlib.suppress(OSError):  # it has ended
                self.line.shutdown(socket.SHUT_RD)
            self._watcher.join(_ANSWER_TIMEOUT)
            self._watcher = None
        self.on_lost = None  # it refers to the call, which refers to this line

    def _has_ended(self, seconds: float = 0.0) -> bool:
        """Waits for the monitor's end; whether it has come."""
        return self._is(select.POLLHUP, seconds)  # not RDHUP, which stopping the watcher causes as well

    def _is(self, event: int, seconds: float) -> bool:
        """Waits for an event of the socket; whether it has come."""
        poll = select.poll()
        poll.register(self.line, event)
        return bool(poll.poll(min(seconds * 1000, _LONGEST_POLL)))

    def _say_bye(self) -> None:
        self._leaving = True
        try:
            self._send({"type": "bye"})
        except InternalError:
            log.debug("the %s (%d) ended before it was told to", self.name, self.pid)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            with self._sending:
                send(self.line, message)
        except OSError as error:
            raise InternalError(f"this rank's {self.name} ({self.pid}) ended; see {self.log_of}") from error

    def _answer(self, what: str) -> dict[str, Any]:
        try:
            answer = receive(self.line)
        except (EOFError, ConnectionError, TimeoutError) as error:
            how = (
                f"did not answer within {_ANSWER_TIMEOUT:g} s" if isinstance(error, TimeoutError) else "ended"
            )
            raise InternalError(
                f"the {self.name} ({self.pid}) {how} when it was to {what}; see {self.log_of}"
            ) from error
        if "error" in answer:
            raise StoreError(answer["error"])
        return answer

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self.line, select.POLLRDHUP)
        poll.poll()
        if not self._leaving:
            words = "this rank's %s (%d) ended: its faults would go unnoticed, so it leaves the job"
            log.error(words, self.name, self.pid)
            if self.on_lost is not None:
                self.on_lost()


def ask_agent(
    limits: Limits, plan: StorePlan, memory: RankMemory, on_lost: Callable[[], None], *, watch: bool = True
) -> tuple[MonitorLine | None, bool]:
    """Says hello to the agent that has started this process, if there is one.

    Args:
        limits: the timeouts that the monitor keeps.
        plan: how it gets at the store.
        memory: shared with it; the caller holds its life mutex.
        on_lost: as for `MonitorLine`.
        watch: whether to ask it to run the monitor.

    Returns:
        The line to the monitor that the agent runs; None if the rank needs a monitor process. And whether the
        agent starts another process in place of this one, which joins the job.
    """
    name = os.environ.get(AGENT_ENV)
    if not name:
        return None, False
    hello = {"version": VERSION, "settings": dataclasses.asdict(limits), "store": plan.plain}
    hello["watch"] = watch and plan.plain is not None
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.settimeout(_HELLO_TIMEOUT)
        line.connect(f"\0{name}")
        socket.send_fds(line, [b"!"], [memory.fd])
        send(line, hello)
        answer = receive(line)
        agent = peer(line)[0]
    except (OSError, EOFError, ValueError) as error:
        answer = {"refused": str(error) or repr(error)}
    replaced = answer.get("replaced") is True
    if "refused" in answer:
        log.debug("no monitor inside the agent: %s", answer["refused"])
        line.close()
        return None, replaced
    return MonitorLine(line, agent, on_lost, answer["heart"], is_child=False, replaced=replaced), replaced


# ---- the wire


def send(line: socket.socket, message: dict[str, Any]) -> None:
    """Sends a message.

    Raises:
        OSError: the line has ended, or its timeout has passed.
    """
    line.sendall(json.dumps(message).encode() + b"\n")


def receive(line: socket.socket) -> dict[str, Any]:
    """Receives a message, the only one that is under way.

    Raises:
        EOFError: the line has ended.
        OSError: the line has failed, or its timeout has passed.
        ValueError: what came is no message.
    """
    data = b""
    while not data.endswith(b"\n"):
        more = line.recv(_LONGEST - len(data))
        if not more:
            raise EOFError("the line has ended, or says too much")
        data += more
    message: dict[str, Any] = json.loads(data)
    return message
