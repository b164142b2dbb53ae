"""What runs in a monitor process: hears what the rank says, waits for its death, keeps its time."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import json
import logging
import os
import select
import selectors
import signal
import socket
import sys
import threading
from datetime import timedelta
from typing import Any, NoReturn

from torch._C._distributed_c10d import TCPStore

from ..exception import StoreError
from ..store import Decision, Member, StorePlan, TCPStoreServer, View, serve
from .rank_monitor import RankMonitor
from .settings import MonitorSettings
from .shared_memory import RankMemory
from .stepping_back import may_step_forward, step_back_for_good, stepping_back

log = logging.getLogger(__name__)

_RESTART = 0.1  # seconds in which others restart, mostly; so long a dead rank's memory is freed behind them


@dataclasses.dataclass(frozen=True)
class MonitorFiles:
    """Files of a monitor process; None for none.

    Args:
        logfile: where it logs to.
        pidfile: where it writes its process id.
    """

    logfile: str | None = None
    pidfile: str | None = None


def monitor_main(
    settings: MonitorSettings,
    plan: StorePlan,
    hosts: bool,
    memory: RankMemory,
    files: MonitorFiles,
    control: socket.socket,
    lifeline: int,
    rank_pid: int,
) -> NoReturn:
    """All of a forked monitor. Never returns into the rank's code, never drops what it inherited.

    Args:
        settings: the timeouts to keep.
        plan: how to get at the store.
        hosts: whether to host its server.
        memory: shared with the rank.
        files: log and pid file.
        control: what the rank says comes here.
        lifeline: descriptor to hold open while this process lives.
        rank_pid: the rank's process.
    """
    status = 1
    try:
        # Launchers kill by process group; and a collection here would destroy torch objects of the rank.
        gc.disable()
        os.setsid()
        _reset_signals()
        _close_inherited({control.fileno(), memory.fd, lifeline})
        _redirect(files)
        loop = _MonitorLoop(settings, plan, memory, control, rank_pid)
        if hosts:
            loop.host_store()
        loop.run()
        status = 0
    except BaseException:
        log.critical("monitor process failed", exc_info=True)
    finally:
        os._exit(status)


class IterationStores:
    """The stores that ``torch.distributed`` uses, one for each iteration whose rank 0 is this rank.

    Whoever was rank 0 is likely to be it again, so the next store is opened ahead, off the restart's path.
    """

    def __init__(self) -> None:
        self._opener = concurrent.futures.ThreadPoolExecutor(1, "ft_wrapper-store-opener")
        self._ahead: tuple[str, concurrent.futures.Future[TCPStore]] | None = None
        self._serving: TCPStore | None = None

    @property
    def serving(self) -> bool:
        """Whether any store was asked for."""
        return self._serving is not None

    def next_port(self, host: str) -> int:
        """Opens a store, or takes the one that was opened ahead; the last one ends.

        Raises:
            OSError: it could not be opened.
        """
        if self._ahead is None or self._ahead[0] != host:
            self._open_ahead(host)
        assert self._ahead is not None
        store = self._ahead[1].result()
        self._ahead = None
        self._opener.submit(_drop, self._serving)
        self._serving = store
        return store.port

    def open_ahead_again(self, host: str) -> None:
        """Opens the store of a later iteration; returns at once."""
        if self._ahead is None:
            self._open_ahead(host)

    def _open_ahead(self, host: str) -> None:
        self._ahead = (host, self._opener.submit(serve, host, 0, timedelta(seconds=300)))


class _MonitorLoop:
    def __init__(
        self,
        settings: MonitorSettings,
        plan: StorePlan,
        memory: RankMemory,
        control: socket.socket,
        rank_pid: int,
    ) -> None:
        self._settings = settings
        self._plan = plan
        self._memory = memory
        self._control = control
        self._rank_pid = rank_pid
        self._host_server: TCPStoreServer | None = None
        self._iteration_stores = IterationStores()
        self._monitor: RankMonitor | None = None
        self._unread = b""
        self._bye = False

    def host_store(self) -> None:
        """Hosts the coordination store from now on; tells the rank, and ends, if the port is taken."""
        assert self._plan.port is not None
        try:
            self._host_server = TCPStoreServer(self._plan.port, self._plan.host)
        except StoreError as error:
            self._answer({"error": str(error)})
            raise

    def run(self) -> None:
        """Returns when the rank has left, or has died and the others know."""
        self._answer({})
        pidfd = os.pidfd_open(self._rank_pid)
        deaths, told = os.pipe()
        death = threading.Thread(target=self._await_death, args=(told, pidfd), daemon=True)
        death.start()
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        for fd in (pidfd, deaths):
            selector.register(fd, selectors.EVENT_READ)
        while not self._bye:
            ready = {key.fd for key, _ in selector.select(self._pause())}
            if self._control.fileno() in ready and not self._read():
                selector.unregister(self._control)
            if deaths in ready or pidfd in ready:
                self._read()  # what the rank said last, before it died
                break
            if self._monitor is not None and not self._bye:
                self._monitor.keep_time(pidfd)
        if self._monitor is None:
            return
        if not self._bye:
            self._monitor.rank_died()
            # Freeing this process's memory takes a CPU for as long as freeing the rank's.
            _wait(pidfd, self._settings.termination_grace_time)
            death.join(_RESTART)
            if self._iteration_stores.serving:
                self._monitor.await_next()  # peers may yet connect to the store of this iteration
        if self._host_server is not None:
            self._monitor.await_goodbyes()
        self._monitor.close()
        if not self._bye:
            step_back_for_good()

    def _pause(self) -> float:
        return self._settings.interval if self._monitor is None else self._monitor.pause()

    def _await_death(self, told: int, pidfd: int) -> None:
        # A replacement is started once the process has gone, so nothing is gained by its going slowly.
        allowed = not self._settings.replaced and may_step_forward()
        if self._memory.wait_for_death():
            with stepping_back(self._rank_pid, allowed):
                os.write(told, b"!")
                _wait(pidfd, _RESTART)

    def _answer(self, answer: dict[str, Any]) -> None:
        self._control.sendall(json.dumps(answer).encode() + b"\n")

    def _read(self) -> bool:
        """Carries out what the rank has said so far; False at the end of file."""
        more = True
        while more:
            try:
                data = self._control.recv(1 << 16, socket.MSG_DONTWAIT)
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
                self._monitor.close()  # the rank has taken another incarnation of its slot
            self._monitor = RankMonitor(
                self._plan.connect, member, self._memory, self._rank_pid, self._settings
            )
        elif message["type"] == "view":
            assert self._monitor is not None
            self._monitor.enter(self._view(message), message["rank"])
        elif message["type"] == "serve":
            self._serve(message["host"])
        elif message["type"] == "bye":
            self._bye = True

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


def _wait(pidfd: int, seconds: float) -> None:
    """Waits for the end of a process, for so many seconds at the most."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(seconds * 1000)


def _drop(store: TCPStore | None) -> None:
    """Ends a store's server, in the opener's thread, with the last reference."""
    del store


def _reset_signals() -> None:
    """The rank's handlers are not for this process, and a terminal's Ctrl-C is meant for the rank."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _close_inherited(keep: set[int]) -> None:
    """Closes every file that is the rank's: peers would see its sockets open until this process ends."""
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd > 2 and fd not in keep:
            try:
                os.close(fd)
            except OSError:
                pass


def _redirect(files: MonitorFiles) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    out = null
    if files.logfile is not None:
        out = os.open(files.logfile, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if files.pidfile is not None:
        with open(files.pidfile, "w", encoding="utf-8") as pidfile:
            pidfile.write(f"{os.getpid()}\n")
    root = logging.getLogger()
    for logger in (root, *(logging.getLogger(name) for name in root.manager.loggerDict)):
        logger.handlers = []
    handler = logging.StreamHandler(os.fdopen(os.dup(2), "w", buffering=1))
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    sys.stderr = sys.stdout = handler.stream
