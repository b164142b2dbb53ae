"""A rank's line to its monitor, which runs in its own process or inside the agent."""

import contextlib
import dataclasses
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Mapping

from ..exception import InternalError, StoreError
from ..protocol.records import Decision, Member, View
from ..settings import AllLimits
from ..store import StorePlan
from ..store.bounded import in_background
from ..store.secret import AGENT_ENV, peer
from . import messages
from .messages import HelloReply, Message, Reply, receive, send
from .shared_memory import RankMemory

log = logging.getLogger(__name__)

_LONGEST_POLL = 2**31 - 1  # milliseconds: some 25 days
_ANSWER_TIMEOUT = 60.0  # seconds: the monitor only opens a port
_SOON = 1.0  # seconds within which a living monitor mostly answers
_HELLO_TIMEOUT = 10.0  # seconds that the agent may take to answer hello


@dataclasses.dataclass(eq=False)
class MonitorLine:
    """Owns the socket to the monitor, and a thread that waits for the monitor's end.

    Args:
        line: the socket.
        pid: the monitor's process.
        on_lost: called, in its own thread, if the monitor ends unasked.
        heart: name of the heart that beats for this rank.
        is_child: whether the monitor is a child process of the rank, and ends with the line.
        replaced: whether an agent replaces this process if it ends, by one that joins the job.
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
        """Waits until a newly started monitor is running.

        Raises:
            StoreError: the port to host is taken.
        """
        self._answer("start")

    def join(self, member: Member) -> None:
        """Sends the rank's member. From then on the monitor sends the heartbeat."""
        self._send(messages.Join(member))

    def enter(self, view: View, decision: Decision | None) -> None:
        """Sends the rank's iteration. The number of the rank in it is in the shared memory.

        Args:
            view: the iteration.
            decision: the decision that led to it from the last iteration sent; None to send the whole view.
        """
        self._send(messages.Enter(view) if decision is None else messages.Advance(decision, view.nonce))

    def restarted(self, cause: str, phases: Mapping[str, float]) -> None:
        """Reports that all ranks are back, so that the restart is counted. From any thread.

        Args:
            cause: kind of the fault.
            phases: seconds by phase, ``total`` among them.

        Raises:
            InternalError: the monitor has ended.
        """
        self._send(messages.Restarted(cause, tuple(phases), tuple(map(float, phases.values()))))

    def serve(self, host: str) -> int:
        """Has the monitor open the store that ``torch.distributed`` uses in one iteration.

        The monitor serves it, so that peers that connect after this rank's death find a server. Without one,
        a client retries for its whole timeout, and nothing frees it.

        Args:
            host: address of this host for the other ranks.

        Returns:
            The store's port. The store serves until the next one does, or the monitor ends.

        Raises:
            StoreError: no store could be opened.
        """
        self._send(messages.Serve(host))
        return self._answer("open a store").port

    def await_answer(self) -> None:
        """Waits for a monitor that has not watched this rank for too long.

        Without heartbeats from the monitor, each new iteration would evict this rank again.

        Raises:
            InternalError: the monitor did not answer in time, or has ended; this rank has to leave.
        """
        self._send(messages.Respond())
        if not self._is(select.POLLIN, _SOON):
            who = (self.name, self.pid, socket.gethostname())
            log.error("this rank's %s (%d on %s) hangs: the rank stays out until it answers", *who)
        self._answer("answer")

    def between(self) -> bool:
        """Reports that the rank has left a call in order, and may take its time until the next one.

        From then on the monitor only sends the heartbeat and waits for the process's end. The rank keeps only
        the socket, and calls `close` once another monitor has joined. It no longer needs the shared memory.

        Returns:
            Whether the monitor does so; False if it has ended.
        """
        self._leaving = True
        try:
            self._send(messages.LeaveCall())
            self._answer("keep watch between two calls")
        except (InternalError, OSError) as error:
            log.debug("no monitor keeps watch between two calls: %s", error)
            return False
        finally:
            self._stop_watcher()
        return True

    def close(self, timeout: float) -> None:
        """Lets the monitor end, after the other ranks' goodbyes if it hosts the store; else kills it.

        Args:
            timeout: seconds to wait for its end.
        """
        self._say_bye()
        self._has_ended(timeout)
        self.kill()

    def detach(self) -> None:
        """Leaves a failed rank's monitor running, because it hosts the other ranks' store."""
        self._say_bye()
        self._hang_up()

    def kill(self) -> None:
        """Closes the line, and kills the monitor if it is a child process."""
        self._leaving = True
        if self.is_child:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                if not self._has_ended():  # otherwise it may have been reaped, and its id reused
                    os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        self._hang_up()

    def _hang_up(self) -> None:
        self._stop_watcher()
        self.line.close()

    def _stop_watcher(self) -> None:
        if self._watcher is not None:
            with contextlib.suppress(OSError):  # the monitor has ended
                self.line.shutdown(socket.SHUT_RD)
            self._watcher.join(_ANSWER_TIMEOUT)
            self._watcher = None
        self.on_lost = None  # it refers to the call, which refers to this line

    def _has_ended(self, seconds: float = 0.0) -> bool:
        """Waits for the monitor's end; returns whether it has ended."""
        return self._is(select.POLLHUP, seconds)  # not RDHUP, which `_stop_watcher` also causes

    def _is(self, event: int, seconds: float) -> bool:
        """Waits for an event of the socket; returns whether it occurred."""
        poll = select.poll()
        poll.register(self.line, event)
        return bool(poll.poll(min(seconds * 1000, _LONGEST_POLL)))

    def _say_bye(self) -> None:
        self._leaving = True
        try:
            self._send(messages.Leave())
        except InternalError:
            log.debug("the %s (%d) ended before it was asked to", self.name, self.pid)

    def _send(self, message: Message) -> None:
        try:
            with self._sending:
                self.line.sendall(f"{type(message).__name__} {message.to_json()}\n".encode())
        except OSError as error:
            raise InternalError(f"this rank's {self.name} ({self.pid}) ended; see {self.log_of}") from error

    def _answer(self, what: str) -> Reply:
        try:
            reply = Reply(**receive(self.line))
        except (EOFError, ConnectionError, TimeoutError) as error:
            how = (
                f"did not answer within {_ANSWER_TIMEOUT:g} s" if isinstance(error, TimeoutError) else "ended"
            )
            raise InternalError(
                f"the {self.name} ({self.pid}) {how} when asked to {what}; see {self.log_of}"
            ) from error
        if reply.error:
            raise StoreError(reply.error)
        return reply

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
    limits: AllLimits,
    plan: StorePlan,
    memory: RankMemory,
    questions: socket.socket,
    on_lost: Callable[[], None],
    *,
    watch: bool = True,
) -> tuple[MonitorLine | None, bool]:
    """Says hello to the agent that has started this process, if there is one.

    Args:
        limits: the timeouts.
        plan: how the monitor connects to the store.
        memory: the memory shared with the monitor; the caller holds its life mutex.
        questions: the monitor's end of the socket for questions to the rank.
        on_lost: called, in its own thread, if the monitor ends unasked.
        watch: whether to ask the agent for a monitor.

    Returns:
        The line to the monitor inside the agent, or None if the rank needs a monitor process; and whether the
        agent replaces this process if it ends, by one that joins the job.
    """
    name = os.environ.get(AGENT_ENV)
    if not name:
        return None, False
    hello = {"version": messages.VERSION, "settings": dataclasses.asdict(limits), "store": plan.plain}
    hello["watch"] = watch and plan.plain is not None
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.settimeout(_HELLO_TIMEOUT)
        line.connect(f"\0{name}")
        socket.send_fds(line, [b"!"], [memory.fd, questions.fileno()])
        send(line, hello)
        reply = HelloReply(**receive(line))
        agent = peer(line)[0]
    except (OSError, EOFError, TypeError, ValueError) as error:
        reply = HelloReply(replaced=False, refused=str(error) or repr(error))
    if reply.refused:
        log.debug("no monitor inside the agent: %s", reply.refused)
        line.close()
        return None, reply.replaced
    monitor = MonitorLine(line, agent, on_lost, reply.heart, is_child=False, replaced=reply.replaced)
    return monitor, reply.replaced
