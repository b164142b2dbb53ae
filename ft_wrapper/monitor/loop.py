"""The loop of a monitor: hears what the rank says, waits for its death, keeps its time.

One thread runs it, in any process but the rank's: in a process of its own (`process_main`), or inside the
agent, for each of its ranks. So nothing here is about the process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any

from ..store import Decision, Member, StoreMixin, View
from .heart import Heart
from .iteration_stores import IterationStores
from .rank_monitor import RankMonitor
from .settings import MonitorSettings
from .shared_memory import RankMemory
from .stepping_back import may_step_forward, stepping_back

log = logging.getLogger(__name__)

_RESTART = 0.1  # seconds in which others restart, mostly; so long a dead rank's memory is freed behind them


class MonitorLoop:
    """One rank's monitor: `run`, then `tell_others` if it has died, then `close`.

    Owns what it makes: the threads that wait for the death and send the heartbeat, stores, descriptors. Line,
    memory and pidfd are the caller's, who closes them after `close`; the line may go before.

    Args:
        settings: the timeouts to keep.
        connect: makes a client of the store.
        memory: shared with the rank.
        line: what the rank says comes here; a blocking socket.
        pid: the rank's process.
        pidfd: of it.
        job: what the job is called in events; None for what the environment says.
        heart: beats for this rank as for others; None for one of its own.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        connect: Callable[[], StoreMixin],
        memory: RankMemory,
        line: socket.socket,
        pid: int,
        pidfd: int,
        job: str | None = None,
        heart: Heart | None = None,
    ) -> None:
        self._settings = settings
        self._connect = connect
        self._memory = memory
        self._line = line
        self._pid = pid
        self._pidfd = pidfd
        self._job = job
        self._heart = heart
        self._iteration_stores = IterationStores()
        self._monitor: RankMonitor | None = None
        self._former: list[RankMonitor] = []  # of incarnations that the rank has given up
        self._unread = b""
        self._bye = False
        self.is_between = False
        """Whether the rank has left its call in order, and is at work outside of one."""
        self._lock = threading.Lock()
        with contextlib.ExitStack() as made:
            self._stop = os.eventfd(0, os.EFD_CLOEXEC)
            made.callback(os.close, self._stop)
            self._deaths, told = os.pipe()
            made.callback(os.close, self._deaths)
            self._waiter = threading.Thread(
                target=self._await_death, args=(told,), name="ft_wrapper-await-death", daemon=True
            )
            try:
                self._waiter.start()
            except RuntimeError:
                os.close(told)
                raise
            made.callback(self._waiter.join)
            made.callback(self._iteration_stores.close)
            self._made = made.pop_all()
        self._closed = False

    def run(self) -> bool:
        """Watches the rank until it has left for good, has died, or `stop` was called.

        Returns:
            Whether it has died, and was in the job, so that the others have to be told.
        """
        died = False
        with selectors.DefaultSelector() as selector:
            for fd in (self._line.fileno(), self._pidfd, self._deaths, self._stop):
                selector.register(fd, selectors.EVENT_READ)
            while not (died or self._bye):
                ready = {key.fd for key, _ in selector.select(self._pause())}
                if self._line.fileno() in ready and not self._read():
                    selector.unregister(self._line)
                    if self._monitor is None:
                        return False  # it has hung up: it is somebody else's to watch
                if self._deaths in ready:
                    died = os.read(self._deaths, 1) != b""
                    if not died:
                        selector.unregister(self._deaths)  # it leaves in order, and has said so
                if self._pidfd in ready or (self._stop in ready and _has_ended(self._pidfd)):
                    died = True
                if died:
                    self._read()  # what the rank said last, before it died
                elif self._stop in ready:
                    return False
                elif self._monitor is not None and not (self._bye or self.is_between):
                    self._monitor.keep_time(self._pidfd)
        return not self._bye and self._monitor is not None

    def stop(self) -> None:
        """Ends `run`, if the rank lives; from any thread, also when all is closed."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._stop, 1)

    def tell_others(self) -> None:
        """Tells the others of the rank's death, until they go on without it; they may yet need its store.

        Raises:
            StoreError: they cannot be told. May be tried again.
        """
        if self._monitor is not None:
            self._monitor.rank_died()
            if self._iteration_stores.serving:
                self._monitor.await_next()  # peers may yet connect to the store of this iteration

    def await_goodbyes(self) -> None:
        """Waits until no one needs the coordination store any more."""
        if self._monitor is not None:
            self._monitor.await_goodbyes()

    def await_freed(self, seconds: float) -> None:
        """Waits until a dead rank's memory has been freed.

        Args:
            seconds: at the most.
        """
        _wait(self._pidfd, seconds)
        self._waiter.join(_RESTART)

    def close(self) -> None:
        """Ends all that this has made. Waits for the rank to let go of its memory, which it does or dies."""
        with self._lock:
            self._closed = True
        with self._made:
            for monitor in self._former if self._monitor is None else [*self._former, self._monitor]:
                self._made.callback(monitor.close)

    def _pause(self) -> float | None:
        if self.is_between:
            return None
        return self._settings.interval if self._monitor is None else self._monitor.pause()

    def _await_death(self, told: int) -> None:
        """Says so if the rank has died; closes the pipe in any case."""
        try:
            # A replacement is started once the process has gone, so nothing is gained by its going slowly.
            allowed = not self._settings.replaced and may_step_forward()
            if self._memory.wait_for_death():
                with stepping_back(self._pid, allowed):
                    os.write(told, b"!")
                    _wait(self._pidfd, _RESTART)
        except Exception:
            log.exception("the death of process %d would be noticed late", self._pid)
        finally:
            os.close(told)

    def _answer(self, answer: dict[str, Any]) -> None:
        # Not waiting: the rank reads what it has asked for.
        self._line.sendall(json.dumps(answer).encode() + b"\n", socket.MSG_DONTWAIT)

    def _read(self) -> bool:
        """Carries out what the rank has said so far; False at the end of file."""
        more = True
        while more:
            try:
                data = self._line.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._unread += data
            more = bool(data)
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            self._carry_out(json.loads(line))
        return more

    def _carry_out(self, message: dict[str, Any]) -> None:
        if message["type"] == "join":
            member = Member.parse(message["member"], "join")
            if self._monitor is not None:
                self._monitor.stop()  # the rank has taken another incarnation of its slot
                self._former.append(self._monitor)
                self._monitor = None
            self._monitor = RankMonitor(
                self._connect, member, self._memory, self._pid, self._settings, self._job, self._heart
            )
        elif message["type"] == "view":
            assert self._monitor is not None
            self._monitor.enter(self._view(message))
        elif message["type"] == "serve":
            self._serve(message["host"])
        elif message["type"] == "between":
            self._keep_watch_between_calls()
        elif message["type"] == "bye":
            self._bye = True

    def _keep_watch_between_calls(self) -> None:
        """From here on the monitor does not look at the shared memory, and serves nothing."""
        if self._monitor is not None:
            self._monitor.leave_call()
        self.is_between = True
        self._iteration_stores.close()
        self._answer({})

    def _serve(self, host: str) -> None:
        try:
            self._answer({"port": self._iteration_stores.next_port(host)})
        except OSError as error:
            self._answer({"error": f"no store for the iteration could be opened on {host}: {error}"})
        self._iteration_stores.open_ahead_again(host)

    def _view(self, message: dict[str, Any]) -> View:
        if "decision" in message:
            assert self._monitor is not None and self._monitor.view is not None
            decision = Decision.from_json(message["decision"], "view")
            return self._monitor.view.after(decision, message["nonce"])
        call, n, first, min_world_size = message["view"]
        members = tuple(Member.parse(name, "view") for name in message["members"])
        return View(call, n, message["nonce"], first, members, min_world_size)


def _wait(pidfd: int, seconds: float) -> bool:
    """Waits for the end of a process, for so many seconds at the most; whether it has come."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _has_ended(pidfd: int) -> bool:
    return _wait(pidfd, 0.0)
