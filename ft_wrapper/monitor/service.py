"""The agent's service that runs a monitor for each of its ranks, in place of monitor processes (`beside`).

A rank that enters a wrapped call connects, says hello and passes the memory that it shares with its monitor.
From then on it talks to a `RankWatch`, in a thread of the agent. An error in a rank's monitor ends only this
monitor, and its rank sees the line end. The agent's main thread waits for none of this, except at exit.

A rank that has no agent, or is refused, starts a monitor process.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import psutil

from ..exception import StoreError
from ..protocol import keys
from ..protocol.notice import Notice
from ..settings import AllLimits
from ..store import StoreMixin
from ..store.bounded import in_background
from ..store.plan import StorePlan, announced_plan
from ..store.secret import ASKS, hand_out, peer
from .heart import Heart
from .messages import VERSION, HelloReply, receive, send
from .shared_memory import RankMemory
from .watch import Idle, OnRestart, RankWatch, Stage

log = logging.getLogger(__name__)

CLOSE_TIMEOUT = 5.0  # seconds at the agent's end to report the last deaths to other nodes
_HELLO_TIMEOUT = 10.0  # seconds from a connection to its hello
# Seconds until `add`: a process may say hello before the agent has noted its start.
_KNOWN_WITHIN = 5.0
_PAUSE = 1.0  # seconds between two attempts while no descriptor is free


class _Refused(Exception):
    """A process gets no monitor here; the message has the reason."""


@dataclasses.dataclass(eq=False)
class _Process:
    """A process that the agent has started and not reaped.

    Args:
        pid: the process.
        replaced: whether the agent is expected to replace it if it ends.
        kernel_kills: how many processes the kernel had killed before.
        memory: the memory of its last wrapped call; None before it has a monitor.
    """

    pid: int
    replaced: bool
    kernel_kills: int
    memory: RankMemory | None = None


@dataclasses.dataclass
class _Attended:
    """A process that has connected.

    Args:
        line: the socket to it.
        pid: the process; 0 before it is known.
        process: the agent's process that it is or descends from, while it has that process's monitor.
        watch: its watch; None before it has one.
        replaced: whether a replacement is expected if it ends, and can join.
    """

    line: socket.socket
    pid: int = 0
    process: _Process | None = None
    watch: RankWatch | None = None
    replaced: bool = False

    @property
    def is_in_call(self) -> bool:
        """Whether the process is in a wrapped call, or about to get a monitor for one."""
        return self.watch is None or self.watch.stage is Stage.IN_CALL

    def stop(self) -> None:
        """Ends the waits for this process, unless its death is still to be reported."""
        if self.watch is not None:
            self.watch.stop()
        else:
            with contextlib.suppress(OSError):  # closed, or hung up
                self.line.shutdown(socket.SHUT_RDWR)


class MonitorService:
    """Accepts ranks, and runs a monitor for each that is, or descends from, a process of this agent.

    The ranks share one heart. Each agent gives it a new name, so that no agent keeps another agent's members
    alive.

    A killed agent leaves nothing behind: its socket has an abstract name, not a file.

    Args:
        job: name of the job in events.
        on_restart: called for each restart that a rank reports.
        name: the socket's name, which ranks find in ``FT_WRAPPER_AGENT``; None for a new one.
        kernel_kills: how many processes here the kernel has killed so far, for lack of memory.

    Raises:
        OSError: no socket can be made.
    """

    def __init__(
        self,
        job: str,
        on_restart: OnRestart = lambda cause, phases: None,
        name: str | None = None,
        kernel_kills: Callable[[], int] = int,
    ) -> None:
        self.name = name or service_name()
        self._job = job
        self._on_restart = on_restart
        self._kernel_kills = kernel_kills
        self._changed = threading.Condition()
        self._processes: dict[int, _Process] = {}  # by process id
        self._attended: dict[threading.Thread, _Attended] = {}
        self._hearts: dict[tuple[AllLimits, str], Heart] = {}  # one per timeouts and store
        self._idle: dict[str, Idle] = {}  # by store
        self._closing = False
        self._notice: Notice | None = None  # the newest; its seconds are those of the clock
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(128)
        self._acceptor = in_background("accepting ranks", self._accept)

    def add(self, pid: int, *, replaced: bool = False) -> None:
        """Notes that the agent has started a rank's process.

        Args:
            pid: the process.
            replaced: whether the agent is expected to replace it if it ends.
        """
        with self._changed:
            self._processes[pid] = _Process(pid, replaced, self._kernel_kills())
            self._changed.notify_all()

    def remove(self, pid: int) -> RankMemory | None:
        """Notes that a rank's process has ended. Call it before the process is reaped and its id reused.

        Returns:
            The memory of its last wrapped call, which shows how it has left; None if it had none.
        """
        with self._changed:
            process = self._processes.pop(pid, None)
            return None if process is None else process.memory

    def ranks(self) -> list[tuple[RankMemory | None, bool]]:
        """For each of the agent's processes the memory of its last wrapped call, and whether it is in a call.

        The memory is None for a process that had no monitor here yet. It may be read, even after its call,
        and must not be kept.
        """
        with self._changed:
            in_call = self._in_call()
            return [(process.memory, process in in_call) for process in self._processes.values()]

    def last_end(self) -> float | None:
        """Since when all of the agent's processes have been waiting at exit; None if some process is not."""
        stamps = [memory.end_stamp if memory else 0.0 for memory, _ in self.ranks()]
        return max(stamps) if stamps and all(stamps) else None

    def ask_to_leave(self, pid: int) -> bool:
        """Asks a rank to leave the job where its next step begins, or once its iteration has ended.

        Args:
            pid: the process that the agent has started for it.

        Returns:
            Whether the rank will leave: it is in the function, and has reported a step in this iteration.
        """
        with self._changed:
            process = self._processes.get(pid)
            watch = None if process is None else self._in_call().get(process)
            return watch is not None and watch.ask_to_leave()

    def give(self, notice: Notice) -> list[int]:
        """Passes a notice to all ranks, and to those that enter a call later.

        Args:
            notice: the notice.

        Returns:
            The processes that run no function now, such as spares.
        """
        with self._changed:
            self._notice = notice.after(-time.monotonic())
            memories = [process.memory for process in self._in_call() if process.memory is not None]
            for memory in memories:
                memory.give(notice)
            working = [memory for memory in memories if memory.active]
            return [pid for pid, process in self._processes.items() if process.memory not in working]

    def about_to_send(self, signum: int, pid: int) -> None:
        """Notes that a signal to a rank comes from its agent: it ends the rank, or is a notice that is known.

        Args:
            signum: the signal, which is sent after this call.
            pid: the process that the agent has started for it.
        """
        with self._changed:
            if (process := self._processes.get(pid)) is not None and process.memory is not None:
                if signum == signal.SIGUSR1:
                    process.memory.notice_stamp = time.monotonic()
                else:
                    process.memory.end_requested = True

    def _in_call(self) -> dict[_Process, RankWatch | None]:
        """The agent's processes that are in a wrapped call, each with its watch, once it has one."""
        attended = self._attended.values()
        return {one.process: one.watch for one in attended if one.process is not None and one.is_in_call}

    def close(self) -> None:
        """Stops accepting ranks, and waits until their deaths are reported, at most `CLOSE_TIMEOUT`.

        Call it when the ranks have ended. A stuck rank is left without a monitor.
        """
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._listener.shutdown(socket.SHUT_RD)
        self._acceptor.join()  # at once
        with self._changed:
            attended = dict(self._attended)
        for one in attended.values():
            one.stop()
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for thread in attended:
            thread.join(max(0.0, deadline - time.monotonic()))
        left = sum(thread.is_alive() for thread in attended)
        if left:
            log.warning("monitors that ranks still hold after %g s: %d, left behind", CLOSE_TIMEOUT, left)
        self._listener.close()

    # ---- in the acceptor's thread

    def _accept(self) -> None:
        while not self._closing:
            try:
                line, _ = self._listener.accept()
            except OSError as error:
                if not self._closing:
                    log.warning("cannot accept a rank, trying again in %g s: %s", _PAUSE, error)
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, _PAUSE)
                continue
            attended = _Attended(line)
            with self._changed:  # it may end at once
                thread = in_background("the monitor of a rank", functools.partial(self._attend, attended))
                self._attended[thread] = attended

    # ---- in the thread of a connection

    def _attend(self, attended: _Attended) -> None:
        with contextlib.ExitStack() as owned:
            owned.callback(self._forget, threading.current_thread(), attended.line)
            try:
                self._watch(attended, owned)
            except _Refused as refused:
                log.debug("a process gets no monitor here: %s", refused)
                with contextlib.suppress(OSError):
                    send(attended.line, vars(HelloReply(attended.replaced, refused=str(refused))))
            except StoreError as error:
                log.warning("the monitor of process %d ends; the rank leaves too: %s", attended.pid, error)
            except Exception:
                log.exception("the monitor of process %d failed, so the rank leaves the job", attended.pid)

    def _watch(self, attended: _Attended, owned: contextlib.ExitStack) -> None:
        """Watches a rank to its end.

        Args:
            attended: the rank's process.
            owned: gets everything that has to be closed afterwards.
        """
        line = attended.line
        line.settimeout(_HELLO_TIMEOUT)
        pid, uid = peer(line)
        attended.pid = pid
        if uid != os.geteuid():
            raise _Refused(f"process {pid} is user {uid}'s")
        begins, fds, _, _ = socket.recv_fds(line, 1, 2, socket.MSG_CMSG_CLOEXEC)
        received = owned.enter_context(contextlib.ExitStack())
        for fd in fds:
            received.callback(os.close, fd)
        if begins == ASKS:
            hand_out(line)
            return
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise _Refused(f"process {pid} has ended") from None
        owned.callback(os.close, pidfd)
        # With the pidfd open, the id can have become another process's only if that is also ours.
        process = self._process_of(pid)
        limits, plan, memory, questions = _hear_hello(line, fds)
        owned.callback(memory.close)
        owned.callback(questions.close)
        received.close()
        attended.replaced = process.replaced and bool(limits.rejoin)
        if plan is None:
            raise _Refused(f"process {pid} has a monitor process")
        with self._changed:  # first come, first served; an earlier call's monitor runs until the rank leaves
            if process in self._in_call():
                raise _Refused(f"process {process.pid} already has a monitor")
            attended.process, process.memory = process, memory
            if self._notice is not None:
                # Also if its time is over: ranks that see other notices than their peers would save alone.
                memory.give(self._notice.after(time.monotonic()))
            key = limits, json.dumps(plan.plain, sort_keys=True)
            if key not in self._hearts:
                self._hearts[key] = Heart(plan.connect, heart_name(), limits)
            heart, idle = self._hearts[key], self._idle.setdefault(key[1], Idle())
        limits = dataclasses.replace(limits, replaced=attended.replaced)

        def how() -> str:
            kills = self._kernel_kills() - process.kernel_kills
            return f"died (out of memory? the kernel has killed {kills})" if kills > 0 else "died"

        reporting = self._job, self._on_restart, idle, how
        whose = memory, line, questions, pid, pidfd, heart
        watch = RankWatch(limits, plan.connect, *whose, *reporting)
        owned.callback(watch.close)
        owned.callback(line.close)  # closed first: the rank waits for this, and `watch.close` for the rank
        with self._changed:
            attended.watch = watch
            if self._closing:
                return
        send(line, vars(HelloReply(attended.replaced, heart.name)))
        line.settimeout(None)
        died = watch.run()
        attended.process = None
        line.close()
        if died:
            watch.tell_others()

    def _process_of(self, pid: int) -> _Process:
        """The agent's process that this one is, or descends from (through a shell, for example)."""
        try:
            lineage: list[int] = [pid, *(parent.pid for parent in psutil.Process(pid).parents())]
        except psutil.Error:
            raise _Refused(f"process {pid} has ended") from None
        if os.getpid() in lineage[1:]:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closing or not self._processes.keys().isdisjoint(lineage), _KNOWN_WITHIN
                )
                for candidate in lineage:
                    if candidate in self._processes:
                        return self._processes[candidate]
        raise _Refused(f"process {pid} is not a rank's")

    def _forget(self, thread: threading.Thread, line: socket.socket) -> None:
        """Removes an ended connection. With the last one, hearts and idle clients also end."""
        with self._changed:
            del self._attended[thread]
            line.close()
            if self._attended:
                return
            clients = [client for idle in self._idle.values() for client in idle.clients]
            ended: list[Heart | StoreMixin] = [*self._hearts.values(), *clients]
            self._hearts, self._idle = {}, {}
        for one in ended:
            one.close()


def service_name() -> str:
    """Returns a unique name for an agent's service."""
    return f"ftrun-{os.getpid()}-{os.urandom(8).hex()}"


def heart_name() -> str:
    """Returns a unique name for a heart."""
    return keys.shared_heart(os.urandom(8).hex())


def _hear_hello(
    line: socket.socket, fds: list[int]
) -> tuple[AllLimits, StorePlan | None, RankMemory, socket.socket]:
    """Receives hello; the plan is None if the rank wants no monitor."""
    try:
        fd, questions = fds
        hello = receive(line)
        if hello["version"] != VERSION:
            raise ValueError(f"version {hello['version']} instead of {VERSION}")
        limits = AllLimits.from_json(hello["settings"])
        plan = announced_plan(**hello["store"]) if hello["watch"] else None
        return limits, plan, RankMemory.from_fd(fd), socket.socket(fileno=os.dup(questions))
    except (EOFError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise _Refused(f"no proper hello: {error!r}") from error
