"""The template process, from which every rank is forked: torch is imported in it once.

A process that has torch already reaches its script some ten milliseconds after the request, or at once if it
was forked ahead, instead of the seconds that importing torch takes. It finds what a program started by exec
finds: its own environment, arguments, ``__main__``, random numbers, session and signals.

- One thread only: what other threads hold at the moment of a fork (a lock, a pool of workers) is broken in
  the child. So nothing is computed there, and the threads are counted before each fork.
- A rank is forked twice, so that it becomes a child of the agent, a subreaper: the agent waits for it itself,
  and the template may die without harm.
- A forked process does nothing until the agent sends it, over its own socket, what to run. So the agent knows
  each rank that runs.

The agent's side of it is `Standby`; what follows runs in the template and in the ranks.
"""

import builtins
import collections
import ctypes
import dataclasses
import encodings.idna
import functools
import gc
import importlib.machinery
import io
import json
import logging
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

from ..torch_groups.warm_up import import_lazy_modules
from .outputs import opened
from .process import Program, Request, await_adoption, start, with_local_rank
from .signals import die_with

log = logging.getLogger(__name__)

_PACKAGE = str(Path(__file__).resolve().parents[2])
#: What the template is started with, as ``python -c``; its arguments follow: where this package is, the
#: socket's descriptor, the agent's process, ``-m`` or ``-``, and the script with its arguments.
BOOT = (
    "import sys; "
    # Not the working directory, which may hold anything: the rank puts its script's directory there.
    "sys.path[:] = [*filter(None, sys.path), sys.argv[1]]; "
    "from ft_wrapper.agent.standby import main; "
    "from ft_wrapper import *; "  # what a script may import
    "main()"
)

_NAMES_WITHIN = 1.0  # seconds; a fork takes milliseconds, but imports of the template may be on
_MAX_MESSAGE = 1 << 20
_TOGETHER = 0.1  # seconds between the signals to two processes, if their sender signals all
_FORK = b"fork"
# Sent once the first ranks run: they do not wait for what only their replacements need.
_IMPORT_MORE = b"import more"
# Must be 1 in the template: otherwise importing torch, and numpy with it, leaves further threads.
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"

# What is imported with the first look-up of a host's name.
_ = encodings.idna


# In the agent ----------------------------------------------------------------------------------------------


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
        self._requests: collections.deque[Request] = collections.deque()
        self._asked: socket.socket | None = None  # for the orders of a process that the template is forking
        self._spare: _Spare | None = None
        self._wants_spare = self._has_all = False
        self._restored = os.environ.get(_BLAS_THREADS)
        # Messages, each as a whole, with the descriptors that belong to it.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kind = "-m" if program.is_module else "-"
        with ExitStack() as cleanup:
            cleanup.callback(self._socket.close)
            with theirs:
                self.process: subprocess.Popen[bytes] = start(
                    [
                        *(sys.executable, "-u", "-c", BOOT),
                        *(_PACKAGE, str(theirs.fileno()), str(os.getpid()), kind, program.script),
                        *program.arguments,
                    ],
                    {**os.environ, **environment, _BLAS_THREADS: "1"},
                    pass_fds=[theirs.fileno()],
                )
            self._socket.setblocking(False)
            cleanup.pop_all()

    def fileno(self) -> int:
        """Readable when there are answers."""
        return self._socket.fileno()

    def pids(self) -> list[int] | None:
        """The processes that are our children; None while the template forks one of unknown pid."""
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
                    self._socket.send(_IMPORT_MORE)
                    self._has_all = True
                self._wants_spare = False
                if wants_one and self._asked is None:
                    self._fork()
                data = self._socket.recv(_MAX_MESSAGE)
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

    def got(self, signum: int) -> bool:
        """Whether a signal to the agent has ended the template, too: its sender signals all processes."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(_TOGETHER) == -signum
        return False

    def overdue(self, seconds: float) -> bool:
        """Whether the first of the requests has waited that long."""
        return bool(self._requests) and time.monotonic() - self._requests[0].asked >= seconds

    def close(self, timeout: float) -> list[Request]:
        """Ends the template, and the processes that wait for orders; those that already run go on.

        Args:
            timeout: seconds to wait for the template's end after SIGKILL. One that is stuck in the kernel is
                left behind.

        Returns:
            The requests that were not carried out.
        """
        if self._asked is not None:  # a process that it has forked, and not named, would stay a zombie
            connection.wait([self._socket], min(_NAMES_WITHIN, timeout))
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
        self._asked, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._socket, [_FORK], [theirs.fileno()])

    def _take(self, answer: dict[str, Any], found: list[tuple[Request, int | str]]) -> None:
        orders, self._asked = self._asked, None
        assert orders is not None, "the template answers only when asked"
        if "pid" in answer:
            self._spare = _Spare(answer["pid"], orders)
            return
        orders.close()
        if self._requests:
            found.append((self._requests.popleft(), str(answer["error"])))

    def _carry_out(self, request: Request, spare: _Spare) -> int | str | None:
        """Sends a process its orders; returns its pid, or why that failed, or None if it has died."""
        environment: dict[str, str | None] = {_BLAS_THREADS: self._restored, **request.environment}
        with ExitStack() as files:
            try:
                paths = {1: request.files.stdout, 2: request.files.stderr}
                fds = {n: fd for n, path in paths.items() if (fd := opened(path, files)) is not None}
            except OSError as error:
                spare.discard()
                return str(error)
            order = {"environment": environment, "streams": list(fds), "local_rank": str(request.rank)}
            try:
                socket.send_fds(spare.orders, [json.dumps(order).encode()], list(fds.values()))
            except OSError:
                spare.discard()
                return None
        os.kill(spare.pid, signal.SIGCONT)  # a signal may have stopped it
        spare.orders.close()
        return spare.pid


# In the template -------------------------------------------------------------------------------------------


def main() -> None:
    """Serves the agent until it is gone. In each rank it returns, or raises, once the script has run."""
    _, _, fd, agent, kind, script, *arguments = sys.argv
    sys.path.pop()  # the ranks search where they would have searched if started on their own
    # A collection in a rank would write to, and so copy, whatever it looks at.
    gc.disable()
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(fd)) as control:
        control.set_inheritable(False)
        orders = _serve(control)
    with orders:
        local_rank = _become_what_is_ordered(orders, int(agent))
    gc.enable()
    _run(kind, script, with_local_rank(arguments, local_rank))


def _serve(control: socket.socket) -> socket.socket:
    """Forks a process for each request. Returns only in the forked processes: the socket of the request."""
    while True:
        data, fds, _, _ = socket.recv_fds(control, _MAX_MESSAGE, 1)
        if not data:
            os._exit(0)  # the agent is gone
        if data == _IMPORT_MORE:  # takes seconds; most training scripts need it, as torch's optimizers do
            with suppress(Exception):  # then the scripts see for themselves
                import_lazy_modules()
            gc.collect()
            gc.freeze()
            continue
        orders = socket.socket(fileno=fds[0])
        answer = _fork()
        if answer is None:
            return orders
        orders.close()
        control.sendall(json.dumps(answer).encode())


def _fork() -> dict[str, object] | None:
    """Forks a rank, through an intermediate process; returns what to answer, or None in the rank."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return {"error": f"it has {threads} threads and cannot be forked safely"}
    read_end, write_end = socket.socketpair()
    with read_end, write_end:
        try:
            between = os.fork()
        except OSError as error:
            return {"error": str(error)}
        if between == 0:
            _fork_again(write_end)
            return None
        write_end.close()
        pid = read_end.recv(32)
        os.waitpid(between, 0)
    return {"pid": int(pid)} if pid else {"error": "no second process could be forked"}


def _fork_again(write_end: socket.socket) -> None:
    """In the intermediate process: forks the rank, writes its pid and ends. Returns in the rank."""
    between = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        os._exit(1)
    if pid != 0:
        write_end.send(str(pid).encode())
        os._exit(0)
    await_adoption(between)


# In the rank -------------------------------------------------------------------------------------------


def _become_what_is_ordered(orders: socket.socket, agent: int) -> str:
    """Waits for the agent's order, then makes this process like one started by exec; returns its rank."""
    os.setsid()
    die_with(agent)
    data, fds, _, _ = socket.recv_fds(orders, _MAX_MESSAGE, 2)
    if not data:
        os._exit(0)  # it is not needed
    order = json.loads(data)
    for stream, descriptor in zip(order["streams"], fds, strict=True):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    for name, value in order["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    # Python's own generator seeds itself again after a fork.
    torch.default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    _set_blas_threads()
    return str(order["local_rank"])


def _set_blas_threads() -> None:
    """Gives OpenBLAS the threads that it would have taken on its own, had it not been limited to one."""
    count = os.environ.get(_BLAS_THREADS) or os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    threads = int(count) if count.isdecimal() else len(os.sched_getaffinity(0))
    if threads <= 1:
        return
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        libraries = {line.split()[-1] for line in maps if "openblas" in line}
    for library in libraries:
        handle = ctypes.CDLL(library)
        for name in ("openblas_set_num_threads", "openblas_set_num_threads64_"):
            for function in (name, f"scipy_{name}"):
                if hasattr(handle, function):
                    getattr(handle, function)(threads)


def _run(kind: str, script: str, arguments: list[str]) -> None:
    """Runs the script as Python itself does, in a ``__main__`` of its own."""
    main_module = types.ModuleType("__main__")
    main_module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main_module
    sys.orig_argv = [sys.executable, "-u", *(["-m"] if kind == "-m" else []), script, *arguments]
    sys.argv = [script, *arguments]
    try:
        if kind == "-m":
            _search_first(os.getcwd())
            runpy._run_module_as_main(script)  # type: ignore[attr-defined]
        elif pkgutil.get_importer(script) is not None:  # a directory or an archive with a __main__ in it
            sys.path.insert(0, script)
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        else:
            _search_first(os.path.dirname(os.path.realpath(script)))
            _run_file(os.path.abspath(script), main_module)
    except (Exception, KeyboardInterrupt):
        sys.excepthook = functools.partial(_show_without_own_frames, sys.excepthook)
        raise


def _show_without_own_frames(
    show: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    trace: types.TracebackType | None,
) -> None:
    """Shows an error as Python would have shown it if it had started the script."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<string>"):
        trace = trace.tb_next
    show(kind, error.with_traceback(trace), trace)


def _run_file(path: str, main_module: types.ModuleType) -> None:
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main_module.__file__ = path
    main_module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main_module.__dict__["__cached__"] = None
    exec(code, main_module.__dict__)


def _search_first(directory: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, directory)
