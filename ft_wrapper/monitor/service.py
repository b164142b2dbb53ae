"""Who runs the watch over a rank: the agent, for each of its ranks; or a process of its own (`beside`).

Inside the agent, no process is needed beside a rank. A rank that enters a wrapped call connects, says hello
and hands over the memory that it shares with its monitor. From then on it talks to a `RankWatch`, in a thread
of the agent. What goes wrong with one rank's monitor ends that one only: the rank sees the line's end. No
wait is the agent's main thread's, but for the end.

A rank that has no agent, or is refused, starts a process.
"""

import contextlib
import dataclasses
import json
import logging
import os
import socket
import threading
import time

import psutil

from ..exception import StoreError
from ..protocol import keys
from ..settings import Limits
from ..store import StoreMixin
from ..store.bounded import in_background
from ..store.plan import StorePlan, announced_plan
from ..store.secret import ASKS, hand_out, peer
from .heart import Heart
from .messages import VERSION, HelloReply, receive, send
from .rank_monitor import Idle
from .shared_memory import RankMemory
from .watch import OnRestart, RankWatch, Stage

log = logging.getLogger(__name__)

CLOSE_TIMEOUT = 5.0  # seconds at the agent's end to tell the other nodes of the last deaths
_HELLO_TIMEOUT = 10.0  # seconds from a connection to its hello
# Seconds for `add`: a process may say hello before the agent has noted that it started it.
_KNOWN_WITHIN = 5.0
_PAUSE = 1.0  # seconds to the next try where descriptors or threads have run out


class _Refused(Exception):
    """A process gets no monitor here; says why."""


@dataclasses.dataclass(eq=False)
class _Process:
    """A process that the agent has started and not reaped."""

    pid: int
    replaced: bool  # whether another takes its place if it ends, as far as is known
    memory: RankMemory | None = None  # of its last wrapped call, once it has had a monitor


@dataclasses.dataclass
class _Attended:
    """A process that has connected."""

    line: socket.socket
    pid: int = 0  # before it is known
    process: _Process | None = None  # that it is or is below, as long as it has that one's monitor
    watch: RankWatch | None = None  # once it has one
    replaced: bool = False  # whether another takes its place if it ends, and can join; as far as is known

    @property
    def is_in_call(self) -> bool:
        """Whether it is in a wrapped call, or about to get a monitor for one."""
        return self.watch is None or self.watch.stage is Stage.IN_CALL

    def stop(self) -> None:
        """Ends what waits for it, unless it has died and the others have to be told."""
        if self.watch is not None:
            self.watch.stop()
        else:
            with contextlib.suppress(OSError):  # closed, or hung up
                self.line.shutdown(socket.SHUT_RDWR)


class MonitorService:
    """Accepts ranks, and runs a monitor for each that is one of this agent's processes, or is below one.

    They share one heart. Its name is new with each agent, so that no agent keeps another one's members alive.

    A killed agent leaves nothing behind: the socket's name is not a file's.

    Args:
        job: what the job is called in events.
        on_restart: called for each restart that a rank reports.
        name: what ranks find in ``FT_WRAPPER_AGENT``; a new one when None.

    Raises:
        OSError: no socket can be made.
    """

    def __init__(
        self, job: str, on_restart: OnRestart = lambda cause, phases: None, name: str | None = None
    ) -> None:
        self.name = name or service_name()
        self._job = job
        self._on_restart = on_restart
        self._changed = threading.Condition()
        self._processes: dict[int, _Process] = {}  # by their numbers
        self._attended: dict[threading.Thread, _Attended] = {}
        self._hearts: dict[tuple[Limits, str], Heart] = {}  # those in one job, with the same times, share one
        self._idle: dict[str, Idle] = {}  # by store
        self._closing = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(128)
        self._acceptor = in_background("accepting ranks", self._accept)

    def add(self, pid: int, *, replaced: bool = False) -> None:
        """A rank's process was started.

        Args:
            pid: it.
            replaced: whether another one is started in its place if it ends, as far as is known.
        """
        with self._changed:
            self._processes[pid] = _Process(pid, replaced)
            self._changed.notify_all()

    def remove(self, pid: int) -> RankMemory | None:
        """A rank's process has ended; called before it is reaped, for then its number may be another's.

        Returns:
            The memory of its last wrapped call, which tells how it has left; None without one.
        """
        with self._changed:
            process = self._processes.pop(pid, None)
            return None if process is None else process.memory

    def ranks(self) -> list[tuple[RankMemory | None, bool]]:
        """For each of the agent's processes the memory of its last wrapped call, and whether it is in that.

        None for one that had no monitor here yet. The memory may be read, also after its call, and must not
        be kept.
        """
        with self._changed:
            in_call = [one.process for one in self._attended.values() if one.is_in_call]
            return [(process.memory, process in in_call) for process in self._processes.values()]

    def last_end(self) -> float | None:
        """Since when all of the agent's processes wait at their end; None if one is not there."""
        with self._changed:
            stamps = [
                process.memory.end_stamp if process.memory else 0.0 for process in self._processes.values()
            ]
        return max(stamps) if stamps and all(stamps) else None

    def ask_to_leave(self, pid: int) -> bool:
        """Asks a rank to leave the job where its next step begins, or once its iteration has ended.

        Args:
            pid: the process that the agent has started for it.

        Returns:
            Whether it is going to do so: it is in the function, and has told a step in this iteration.
        """
        with self._changed:
            process = self._processes.get(pid)
            return process is not None and any(
                one.watch is not None and one.watch.ask_to_leave()
                for one in self._attended.values()
                if one.process is process and one.is_in_call
            )

    def close(self) -> None:
        """Accepts no more ranks, and waits until the others know who has died: `CLOSE_TIMEOUT` at the most.

        The ranks have ended by then. One that is stuck is left without a monitor.
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
            log.warning("%d ranks still hold their monitors after %g s: left behind", left, CLOSE_TIMEOUT)
        self._listener.close()

    # ---- in the acceptor's thread

    def _accept(self) -> None:
        while not self._closing:
            try:
                line, _ = self._listener.accept()
            except OSError as error:
                if not self._closing:
                    log.warning("cannot accept a rank, trying again in %g s: %s", _PAUSE, error)
                self._pause()
                continue
            attended = _Attended(line)
            thread = threading.Thread(
                target=self._attend, args=(attended,), name="ft_wrapper-rank-monitor", daemon=True
            )
            with self._changed:
                self._attended[thread] = attended
            try:
                thread.start()
            except RuntimeError as error:
                log.warning("cannot start a rank's monitor; the rank forks one: %s", error)
                self._forget(thread, line)
                self._pause()

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, _PAUSE)

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
        """Watches a rank to its end; what has to be closed then goes onto the stack."""
        line = attended.line
        line.settimeout(_HELLO_TIMEOUT)
        pid, uid = peer(line)
        attended.pid = pid
        if uid != os.geteuid():
            raise _Refused(f"process {pid} is user {uid}'s")
        begins, fds, _, _ = socket.recv_fds(line, 1, 1, socket.MSG_CMSG_CLOEXEC)
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
        # With the pidfd at hand: the number cannot have become another process's, unless that is ours, too.
        process = self._process_of(pid)
        limits, plan, memory = _hear_hello(line, fds)
        owned.callback(memory.close)
        received.close()
        attended.replaced = process.replaced and limits.use_global_iteration
        if plan is None:
            raise _Refused(f"process {pid} has a monitor process")
        with self._changed:  # first come, first served; an earlier call's goes on until the rank says bye
            if any(one.process is process and one.is_in_call for one in self._attended.values()):
                raise _Refused(f"process {process.pid} has a monitor already")
            attended.process, process.memory = process, memory
            key = limits, json.dumps(plan.plain, sort_keys=True)
            if key not in self._hearts:
                self._hearts[key] = Heart(plan.connect, heart_name(), limits)
            heart, idle = self._hearts[key], self._idle.setdefault(key[1], Idle())
        limits = dataclasses.replace(limits, replaced=attended.replaced)
        told = self._job, self._on_restart
        watch = RankWatch(limits, plan.connect, memory, line, pid, pidfd, heart, *told, idle)
        owned.callback(watch.close)
        owned.callback(line.close)  # before that: the rank waits for it, and the watch for the rank
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
        """Which of the agent's processes this is, or is below (a shell, say)."""
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
        raise _Refused(f"process {pid} is no rank's")

    def _forget(self, thread: threading.Thread, line: socket.socket) -> None:
        """A connection has ended; the hearts end with the last one, and what calls hand on."""
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
    """A name for an agent's service, that no other one has."""
    return f"ftrun-{os.getpid()}-{os.urandom(8).hex()}"


def heart_name() -> str:
    """A name for a heart, that no other one has."""
    return keys.shared_heart(os.urandom(8).hex())


def _hear_hello(line: socket.socket, fds: list[int]) -> tuple[Limits, StorePlan | None, RankMemory]:
    """Receives hello; without a plan if no monitor is wanted."""
    try:
        (fd,) = fds
        hello = receive(line)
        if hello["version"] != VERSION:
            raise ValueError(f"version {hello['version']} instead of {VERSION}")
        limits = Limits.from_json(hello["settings"])
        plan = announced_plan(**hello["store"]) if hello["watch"] else None
        return limits, plan, RankMemory.from_fd(fd)
    except (EOFError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise _Refused(f"no proper hello: {error!r}") from error
