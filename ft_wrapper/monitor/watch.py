"""The watch over one rank: reads its messages, waits for its death, keeps its timeouts, serves its stores.

One thread runs it, in a monitor process (`beside`) or, for each of the agent's ranks, inside the agent
(`service`). So nothing here depends on the process.
"""

import contextlib
import dataclasses
import enum
import json
import logging
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from ..exception import StoreError
from ..settings import AllLimits
from ..store import StoreMixin, serve
from ..store.bounded import in_background, take_or_make
from . import messages
from .heart import Heart
from .messages import Message, Reply
from .rank_monitor import Idle, RankMonitor
from .shared_memory import Phase, RankMemory

log = logging.getLogger(__name__)

RESTART = 0.1  # seconds that a restart mostly takes; what can wait is done after it

#: Gets the kind of fault that has caused a restart, and the restart's seconds by phase.
OnRestart = Callable[[str, Mapping[str, float]], None]


class Stage(enum.Enum):
    """Where a rank is, by its own messages.

    Attributes:
        IN_CALL: in a wrapped call, or about to join one.
        BETWEEN: between two calls: it has left one in order, and may make another one.
        LEFT: has left for good, or continues with another monitor.
    """

    IN_CALL = enum.auto()
    BETWEEN = enum.auto()
    LEFT = enum.auto()


@dataclasses.dataclass(eq=False)
class RankWatch:
    """The watch over one rank: `run`, then `tell_others` if it has died, then `close`.

    It owns what it makes: the thread that waits for the death, monitors, stores, descriptors. The caller owns
    line, memory, pidfd and heart, and closes them after `close`; it may close the line before.

    Args:
        limits: the timeouts.
        connect: makes a client of the store.
        memory: the memory shared with the rank.
        line: the socket to the rank, blocking.
        pid: the rank's process.
        pidfd: a pidfd of this process.
        heart: the heart that beats for the rank.
        job: name of the job in events; None for the environment's.
        on_restart: called when the rank reports that all ranks are back.
        idle: what earlier calls have left, for this one to use and add to.
    """

    limits: AllLimits
    connect: Callable[[], StoreMixin]
    memory: RankMemory
    line: socket.socket
    pid: int
    pidfd: int
    heart: Heart
    job: str | None = None
    on_restart: OnRestart = lambda cause, phases: None
    idle: Idle = dataclasses.field(default_factory=Idle)

    def __post_init__(self) -> None:
        self.stage = Stage.IN_CALL
        self._iteration_stores = IterationStores(self.idle.stores)
        self._monitor: RankMonitor | None = None
        self._unread = b""
        self._has_died = False
        self._stopped = threading.Event()
        self._lock = threading.Lock()  # held to write to `_wake`, and to close it
        with contextlib.ExitStack() as made:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC)
            made.callback(self._close_wake)
            waiter = in_background("waiting for a death", self._await_death)
            made.callback(waiter.join)
            made.callback(self._iteration_stores.close)
            self._made = made.pop_all()

    def run(self) -> bool:
        """Watches the rank until it has left for good, has died, or `stop` was called.

        Returns:
            Whether the rank has died as a member of the job, so that the death has to be reported.
        """
        with selectors.DefaultSelector() as selector:
            for fd in (self.line.fileno(), self.pidfd, self._wake):
                selector.register(fd, selectors.EVENT_READ)
            while self.stage is not Stage.LEFT:
                ready = {key.fd for key, _ in selector.select(self._pause())}
                if self.line.fileno() in ready and not self._read():
                    selector.unregister(self.line)
                    if self._monitor is None:
                        return False  # the rank hung up before it joined: another monitor watches it
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                if self._has_died or self.pidfd in ready:
                    self._read()  # the rank's last messages before its death
                    break
                if self._stopped.is_set():
                    return False
                if self._monitor is not None and self.stage is Stage.IN_CALL:
                    self._monitor.keep_time(self.pidfd)
                if not ready and self._iteration_stores.due_in() <= 0.0:
                    self._iteration_stores.open_ahead()
        return self.stage is not Stage.LEFT and self._monitor is not None

    def stop(self) -> None:
        """Ends `run`, if the rank lives, and `tell_others`. From any thread, even after `close`."""
        self._stopped.set()
        self._wake_up()

    def ask_to_leave(self) -> bool:
        """Asks the rank to leave the job. From any thread, before `close`.

        Returns:
            Whether the rank will leave when its next step begins.
        """
        self.memory.leave_requested = True
        is_watched = self.memory.phase == Phase.WATCHED
        return self.memory.active and is_watched and self.memory.step is not None

    def tell_others(self) -> None:
        """Reports the rank's death, and keeps its store until the other ranks have gone on without it.

        It retries until the report succeeds, `stop` is called, or the heart has no rank left. In the last
        case the heart's silence shows the death, or the job has ended.
        """
        assert self._monitor is not None
        while True:
            try:
                self._monitor.rank_died()
                if self._iteration_stores.serving is not None:
                    self._monitor.await_next()  # peers may yet connect to the store of this iteration
                return
            except StoreError as error:
                level = logging.DEBUG if self.stage is Stage.BETWEEN else logging.INFO
                log.log(level, "cannot tell the other ranks that process %d died: %s", self.pid, error)
            if self._stopped.wait(self.limits.heartbeat_interval) or not self.heart.is_beating:
                return

    def await_goodbyes(self) -> None:
        """Waits until no rank needs the job's store."""
        if self._monitor is not None:
            self._monitor.await_goodbyes()

    def close(self) -> None:
        """Ends all that it owns. Waits until the rank has closed its memory or has died."""
        self._made.close()

    def _pause(self) -> float | None:
        if self.stage is Stage.BETWEEN:
            return None
        pause = self.limits.monitor_process_interval if self._monitor is None else self._monitor.pause()
        return min(pause, max(0.0, self._iteration_stores.due_in()))

    def _wake_up(self) -> None:
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _close_wake(self) -> None:
        with self._lock:
            os.close(self._wake)
            self._wake = -1

    def _await_death(self) -> None:
        """Wakes `run` when the rank dies."""
        try:
            if self.memory.wait_for_death():
                self._has_died = True
                self._wake_up()
        except Exception:
            log.exception("cannot wait for the death of process %d, which will be noticed late", self.pid)

    def _answer(self, reply: Reply) -> None:
        with contextlib.suppress(OSError):  # the rank has died since; its death is reported elsewhere
            # Without waiting: the rank is about to read the reply, so there is room for it.
            self.line.sendall(json.dumps(vars(reply)).encode() + b"\n", socket.MSG_DONTWAIT)

    def _read(self) -> bool:
        """Carries out the rank's messages so far; returns False at the end of file."""
        more = True
        while more:
            try:
                data = self.line.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._unread += data
            more = bool(data)
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            self._carry_out(messages.parse(line))
        return more

    def _carry_out(self, message: Message) -> None:
        match message:
            case messages.Join(member):
                if self._monitor is not None:
                    self._monitor.stop()  # the rank joins as a new incarnation
                self._monitor = RankMonitor(
                    self.connect, member, self.memory, self.pid, self.limits, self.heart, self.job, self.idle
                )
                self._made.callback(self._monitor.close)
            case messages.Enter(view):
                assert self._monitor is not None
                self._monitor.view = view
            case messages.Advance(decision, nonce):
                assert self._monitor is not None and self._monitor.view is not None
                self._monitor.view = self._monitor.view.after(decision, nonce)
            case messages.Restarted(cause, phases, seconds):
                self.on_restart(cause, dict(zip(phases, seconds, strict=True)))
            case messages.Serve(host):
                self._serve(host)
            case messages.LeaveCall():  # after the reply, the memory is no longer read, nor a store served
                if self._monitor is not None:
                    self._monitor.leave_call()
                self.stage = Stage.BETWEEN
                self._iteration_stores.close(hand_on=True)
                self._answer(Reply())
            case messages.Respond():
                self._answer(Reply())
            case messages.Leave():
                self.stage = Stage.LEFT

    def _serve(self, host: str) -> None:
        try:
            reply = Reply(port=self._iteration_stores.next_port(host))
        except OSError as error:
            reply = Reply(error=f"cannot open the iteration's store on {host}: {error}")
        self._answer(reply)


class IterationStores:
    """The stores of the iterations in which this rank is rank 0.

    The last rank 0 is likely to be the next one. So its next store is opened ahead, and the last one ended,
    once the ranks are back. Before that they need the CPUs.

    Args:
        unused: stores that no rank has used, to be taken first; `close` adds to them for the next call.

    Attributes:
        serving: the store of the current iteration; None before the first one.
    """

    def __init__(self, unused: list[TCPStore]) -> None:
        self._unused = unused
        self.serving: TCPStore | None = None
        self._last: TCPStore | None = None  # of the iteration before, which may still have clients
        self._ahead: TCPStore | None = None
        self._opening: threading.Thread | None = None
        self._host = ""
        self._due = math.inf

    def next_port(self, host: str) -> int:
        """Returns the port of a new store, opened ahead or now. The last store ends a little later.

        Raises:
            OSError: no store could be opened.
        """
        self._await_opening()
        store = self._ahead or take_or_make(self._unused, lambda: _open_store(host))
        self._host, self._ahead, self._last, self.serving = host, None, self.serving, store
        self._due = time.monotonic() + RESTART
        return store.port

    def due_in(self) -> float:
        """Seconds until it is time to `open_ahead`."""
        return self._due - time.monotonic()

    def open_ahead(self) -> None:
        """Starts a thread that ends the last store and opens the next one.

        In a thread, since torch's client looks up its own address: seconds if no name server answers.
        """
        self._due = math.inf
        self._opening = in_background("opening a store ahead", self._open_ahead)

    def close(self, *, hand_on: bool = False) -> None:
        """Ends the stores.

        Args:
            hand_on: whether to leave unused stores to the next call, after all ranks left in order.
        """
        self._await_opening()
        stores = (self._ahead, self.serving) if hand_on else ()
        self._unused += [one for one in stores if one is not None and not one.num_keys()]
        self._ahead = self._last = self.serving = None
        self._due = math.inf

    def _open_ahead(self) -> None:
        self._last = None
        try:
            self._ahead = take_or_make(self._unused, lambda: _open_store(self._host))
        except Exception as error:  # `next_port` tries again
            log.debug("no store is opened ahead: %s", error)

    def _await_opening(self) -> None:
        if self._opening is not None:
            self._opening.join()
            self._opening = None


def _open_store(host: str) -> TCPStore:
    return serve(host, 0, timedelta(seconds=300))
