"""The agent's side of the template process, which forks ranks that have torch imported already."""

import collections
import dataclasses
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from . import template
from .outputs import opened
from .process import Program, Request, start

log = logging.getLogger(__name__)

_PACKAGE = str(Path(__file__).resolve().parents[2])


@dataclasses.dataclass(frozen=True)
class _Spare:
    """A forked process that waits for its orders.

    Args:
        pid: the process, our child.
        orders: the socket on which it gets them.
    """

    pid: int
    orders: socket.socket

    def discard(self) -> None:
        """Ends it."""
        self.orders.close()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


class Standby:
    """Owns the template process, and a process that was forked ahead. This process has to be a subreaper.

    Args:
        program: a Python script.
        environment: what all ranks have in theirs, in addition to our own.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, program: Program, environment: Mapping[str, str]) -> None:
        assert program.script is not None
        self.started = time.monotonic()
        self._requests: collections.deque[Request] = collections.deque()
        self._asked: socket.socket | None = None  # for the orders of a process that the template is forking
        self._spare: _Spare | None = None
        self._wants_spare = self._has_all = False
        self._restored = os.environ.get(template.BLAS_THREADS)
        # Messages, each as a whole, with the descriptors that belong to it.
        self._socket, theirs = _socketpair()
        kind = "-m" if program.is_module else "-"
        with ExitStack() as cleanup:
            cleanup.callback(self._socket.close)
            with theirs:
                self.process: subprocess.Popen[bytes] = start(
                    [
                        *(sys.executable, "-u", "-c", template.BOOT),
                        *(_PACKAGE, str(theirs.fileno()), str(os.getpid()), kind, program.script),
                        *program.arguments,
                    ],
                    {**os.environ, **environment, template.BLAS_THREADS: "1"},
                    pass_fds=[theirs.fileno()],
                )
            self._socket.setblocking(False)
            cleanup.pop_all()

    def fileno(self) -> int:
        """Readable when there are answers."""
        return self._socket.fileno()

    def pids(self) -> list[int] | None:
        """The processes that are our children; None while the template forks one with a pid yet unknown."""
        if self._asked is not None:
            return None
        return [self.process.pid, *([self._spare.pid] if self._spare is not None else [])]

    def ask(self, request: Request) -> None:
        """Asks for a process; `answers` has the result."""
        self._requests.append(request)

    def cancel(self) -> None:
        """Withdraws all requests."""
        self._requests.clear()

    def ask_ahead(self) -> None:
        """Has a process forked ahead, unless there is one."""
        self._wants_spare = True

    def answers(self) -> list[tuple[Request, int | str]] | None:
        """Carries out what is possible without blocking. Call it after `ask` and `ask_ahead`, too.

        Returns:
            The requests that were carried out, in the order of asking, each with its process, our child, or
            with why there is none. None if the template has ended.
        """
        found: list[tuple[Request, int | str]] = []
        while True:
            while self._requests and self._spare is not None:
                spare, self._spare = self._spare, None
                answer = self._carry_out(self._requests[0], spare)
                if answer is not None:
                    found.append((self._requests.popleft(), answer))
            wants_one = self._requests or (self._wants_spare and self._spare is None)
            try:
                if self._wants_spare and not self._has_all:
                    self._socket.send(template.IMPORT_MORE)
                    self._has_all = True
                self._wants_spare = False
                if wants_one and self._asked is None:
                    self._fork()
                data = self._socket.recv(template.MAX_MESSAGE)
            except BlockingIOError:
                return found
            except OSError:
                data = b""
            if not data:
                return found or None
            self._take(json.loads(data), found)

    def drop_dead_spare(self) -> None:
        """Reaps the process that was forked ahead, if it has died."""
        if self._spare is not None and os.waitpid(self._spare.pid, os.WNOHANG)[0] != 0:
            self._spare.orders.close()
            self._spare = None

    def go_on(self) -> bool:
        """Continues the template if a signal has stopped it; returns whether one had."""
        with suppress(ChildProcessError):
            if os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG) is not None:
                self.process.send_signal(signal.SIGCONT)
                return True
        return False

    def overdue(self, seconds: float) -> bool:
        """Whether the first of the requests has waited that long."""
        return bool(self._requests) and time.monotonic() - self._requests[0].asked >= seconds

    def close(self, timeout: float) -> list[Request]:
        """Ends the template, and the processes that wait for orders; those that run already go on.

        Args:
            timeout: seconds to wait for the template's end after SIGKILL. One that is stuck in the kernel is
                left behind.

        Returns:
            The requests that were not carried out.
        """
        self.process.kill()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pid = self.process.pid
            log.error("the standby process %d: still there %g s after SIGKILL, left behind", pid, timeout)
        requests, self._requests = list(self._requests), collections.deque()
        self.answers()  # it may have forked one
        if self._spare is not None:
            self._spare.discard()
        if self._asked is not None:
            self._asked.close()
        self._socket.close()
        return requests

    def _fork(self) -> None:
        ours, theirs = _socketpair()
        with theirs:
            try:
                socket.send_fds(self._socket, [template.FORK], [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        self._asked = ours

    def _take(self, answer: dict[str, Any], found: list[tuple[Request, int | str]]) -> None:
        orders, self._asked = self._asked, None
        assert orders is not None, "the template answers when it is asked only"
        if "pid" in answer:
            self._spare = _Spare(answer["pid"], orders)
            return
        orders.close()
        if self._requests:
            found.append((self._requests.popleft(), str(answer["error"])))

    def _carry_out(self, request: Request, spare: _Spare) -> int | str | None:
        """Sends a process its orders; returns its pid, or why that failed, or None if it has died."""
        environment: dict[str, str | None] = {template.BLAS_THREADS: self._restored, **request.environment}
        with ExitStack() as files:
            try:
                paths = {1: request.files.stdout, 2: request.files.stderr}
                streams = {number: opened(path, files) for number, path in paths.items()}
            except OSError as error:
                spare.discard()
                return str(error)
            fds = {number: fd for number, fd in streams.items() if fd is not None}
            order = {
                "environment": environment,
                "streams": list(fds),
                "local_rank": str(request.rank),
            }
            try:
                socket.send_fds(spare.orders, [json.dumps(order).encode()], list(fds.values()))
            except OSError:
                spare.discard()
                return None
        os.kill(spare.pid, signal.SIGCONT)  # a signal may have stopped it
        spare.orders.close()
        return spare.pid


def _socketpair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
