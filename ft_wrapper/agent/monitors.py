"""The monitors of this node's ranks, inside the agent: no process is needed beside a rank.

A rank that enters a wrapped call connects, says hello and hands over the memory that it shares with its
monitor. From then on it talks to a `MonitorLoop`, in a thread of this process, as it would to one in a
process of its own, which it makes itself if it is refused. What goes wrong with one rank's monitor ends that
one only: the rank sees the line's end.

No wait here is the main thread's, but for the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Iterator

import psutil

from ..exception import StoreError
from ..monitor import wire
from ..monitor.heart import Heart
from ..monitor.line import peer
from ..monitor.loop import MonitorLoop
from ..monitor.settings import MonitorSettings
from ..monitor.shared_memory import RankMemory
from ..store import StorePlan, announced_plan, keys

log = logging.getLogger(__name__)

CLOSE_TIMEOUT = 5.0
"""Seconds at the agent's end for the other nodes to be told of the last deaths."""
# Seconds for a hello to come, once its sender has connected.
_HELLO_TIMEOUT = 10.0
# Seconds for a process to become known, which may be sooner at work than it is noted that it was started.
_KNOWN_WITHIN = 5.0
# Seconds to the next try, if no one can be accepted for want of descriptors or threads.
_PAUSE = 1.0


class _Refused(Exception):
    """Somebody gets no monitor here; says why."""


@dataclasses.dataclass
class _Attended:
    """Somebody who has connected.

    Args:
        line: to him.
        loop: his monitor, once he has one.
    """

    line: socket.socket
    loop: MonitorLoop | None = None

    @property
    def is_between(self) -> bool:
        """Whether he has left a wrapped call in order, and may come to another one."""
        return self.loop is not None and self.loop.is_between

    def stop(self) -> None:
        """Ends whatever waits for him, unless he has died and others are to be told."""
        if self.loop is not None:
            self.loop.stop()
        else:
            with contextlib.suppress(OSError):  # closed, or hung up
                self.line.shutdown(socket.SHUT_RDWR)


@dataclasses.dataclass
class _SharedHeart:
    """The heart of the ranks that are in the same job, with the same times to keep.

    Args:
        heart: it.
        users: how many connections have it.
    """

    heart: Heart
    users: int = 0


class Monitors:
    """Accepts ranks, and runs a monitor for each that is one of this agent's processes, or is below one.

    They share one heart. Its name is no other agent's, nor that of one that was here before: so no agent
    keeps members alive that are not its own.

    Nothing is to be cleaned up after an agent that was killed: the socket's name is no file's.

    Args:
        job: what the job is called in events.

    Raises:
        OSError: there is no socket to be had.
    """

    def __init__(self, job: str) -> None:
        self.name = f"ftrun-{os.getpid()}-{os.urandom(8).hex()}"
        """What ranks find in ``FT_WRAPPER_AGENT``."""
        self._job = job
        self._changed = threading.Condition()
        self._processes: set[int] = set()  # those that the agent has started, and not reaped
        self._watched: dict[int, _Attended] = {}  # who has the monitor of each that has one
        self._attended: dict[threading.Thread, _Attended] = {}
        self._hearts: dict[tuple[MonitorSettings, str], _SharedHeart] = {}
        self._closing = False
        with contextlib.ExitStack() as cleanup:
            self._listener = cleanup.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._listener.bind(f"\0{self.name}")
            self._listener.listen(128)
            self._listener.setblocking(False)
            self._wake = os.eventfd(0, os.EFD_CLOEXEC)
            cleanup.callback(os.close, self._wake)
            self._acceptor = threading.Thread(target=self._accept, name="ft_wrapper-monitors", daemon=True)
            self._acceptor.start()
            self._cleanup = cleanup.pop_all()

    def __enter__(self) -> Monitors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, pid: int) -> None:
        """A rank's process was started."""
        with self._changed:
            self._processes.add(pid)
            self._changed.notify_all()

    def remove(self, pid: int) -> None:
        """A rank's process has ended; to be called before it is reaped, and its number another's."""
        with self._changed:
            self._processes.discard(pid)

    def close(self) -> None:
        """Accepts no one any more, and waits until the others know who has died: `CLOSE_TIMEOUT` at the most.

        The ranks have ended by then. One that has not, for it is stuck, is left without a monitor.
        """
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        os.eventfd_write(self._wake, 1)
        self._acceptor.join()  # it waits for no one
        with self._changed:
            attended = dict(self._attended)
        for one in attended.values():
            one.stop()
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for thread in attended:
            thread.join(max(0.0, deadline - time.monotonic()))
        left = sum(thread.is_alive() for thread in attended)
        if left:
            log.warning("%d monitors are not through after %g s, left alone", left, CLOSE_TIMEOUT)
        self._cleanup.close()

    # ---- in the acceptor's thread

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while not self._closing:
            poll.poll()
            try:
                line, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                continue
            except OSError as error:
                log.warning("no rank can be accepted for the moment: %s", error)
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
                log.warning("no monitor can be started for the moment: %s", error)
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
                log.debug("no monitor inside the agent: %s", refused)
                with contextlib.suppress(OSError):
                    wire.send(attended.line, {"refused": str(refused)})
            except StoreError as error:
                log.warning("a rank has lost its monitor, and leaves its job: %s", error)
            except Exception:
                log.exception("a monitor has failed: its rank leaves its job")

    def _watch(self, attended: _Attended, owned: contextlib.ExitStack) -> None:
        """Watches a rank to its end; what is to be closed then goes onto the stack."""
        line = attended.line
        line.settimeout(_HELLO_TIMEOUT)
        pid, uid = peer(line)
        if uid != os.geteuid():
            raise _Refused(f"process {pid} is user {uid}'s")
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise _Refused(f"process {pid} has ended") from None
        owned.callback(os.close, pidfd)
        # With the pidfd at hand: the number cannot have become another process's, unless that is ours, too.
        process = self._process_of(pid)
        settings, plan, memory = _hear(line)
        owned.callback(memory.close)
        heart = owned.enter_context(self._shared_heart(settings, plan))
        with self._claimed(process, attended):
            loop = MonitorLoop(settings, plan.connect, memory, line, pid, pidfd, self._job, heart)
            owned.callback(loop.close)
            owned.callback(line.close)  # before that: the rank waits for it, and the loop for the rank
            with self._changed:
                attended.loop = loop
                if self._closing:
                    return
            wire.send(line, {"heart": heart.name})
            line.settimeout(None)
            died = loop.run()
        line.close()
        if died:
            self._tell_others(loop, heart, pid, settings.heartbeat_interval)

    def _tell_others(self, loop: MonitorLoop, heart: Heart, pid: int, pause: float) -> None:
        """Tells the others of a death, until they know it, as long as the dead rank's heart beats for others.

        For its silence tells no one then. In a job that has ended the heart beats for no one before long.
        """
        is_over = False
        while not is_over:
            try:
                loop.tell_others()
            except StoreError as error:
                level = logging.DEBUG if loop.is_between else logging.INFO
                log.log(level, "the other ranks could not be told that process %d died: %s", pid, error)
            else:
                return
            with self._changed:
                is_over = self._changed.wait_for(lambda: self._closing, pause) or not heart.is_beating

    @contextlib.contextmanager
    def _shared_heart(self, settings: MonitorSettings, plan: StorePlan) -> Iterator[Heart]:
        """The heart of all ranks with this store and these settings; ends with the last that has it."""
        key = settings, json.dumps(plan.plain, sort_keys=True)
        with self._changed:
            if key not in self._hearts:
                name = keys.shared_heart(os.urandom(8).hex())
                self._hearts[key] = _SharedHeart(Heart(plan.connect, name, settings))
            shared = self._hearts[key]
            shared.users += 1
        try:
            yield shared.heart
        finally:
            with self._changed:
                shared.users -= 1
                if not shared.users:
                    del self._hearts[key]
            if not shared.users:
                shared.heart.close()

    def _process_of(self, pid: int) -> int:
        """Which of the agent's processes somebody is, or is below: started by a shell, for instance."""
        try:
            lineage: list[int] = [pid, *(parent.pid for parent in psutil.Process(pid).parents())]
        except psutil.Error:
            raise _Refused(f"process {pid} has ended") from None
        if os.getpid() in lineage[1:]:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closing or not self._processes.isdisjoint(lineage), _KNOWN_WITHIN
                )
                for candidate in lineage:
                    if candidate in self._processes:
                        return candidate
        raise _Refused(f"process {pid} is no rank's")

    @contextlib.contextmanager
    def _claimed(self, process: int, attended: _Attended) -> Iterator[None]:
        """One monitor at a time for each process that the agent has started: first come, first served.

        Beside it the one of an earlier call goes on, until the rank says bye to that.
        """
        with self._changed:
            if process in self._watched and not self._watched[process].is_between:
                raise _Refused(f"process {process} has a monitor already")
            self._watched[process] = attended
        try:
            yield
        finally:
            with self._changed:
                if self._watched.get(process) is attended:
                    del self._watched[process]

    def _forget(self, thread: threading.Thread, line: socket.socket) -> None:
        with self._changed:
            del self._attended[thread]
            line.close()


def _hear(line: socket.socket) -> tuple[MonitorSettings, StorePlan, RankMemory]:
    """Receives hello."""
    try:
        hello, fd = wire.receive_hello(line)
        try:
            if hello["version"] != wire.VERSION:
                raise ValueError(f"version {hello['version']} instead of {wire.VERSION}")
            settings = MonitorSettings(**hello["settings"])
            return settings, announced_plan(**hello["store"]), RankMemory.from_fd(fd)
        finally:
            os.close(fd)
    except (EOFError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise _Refused(f"no proper hello: {error!r}") from error
