"""Starts ftrun, and its template, in milliseconds: forked from a process that has imported torch.

Importing torch, and what the template imports for its ranks, takes five seconds of processor time per
ftrun, more than the rest of a short job. So one warm process imports it all once, and stays with one
thread. An ftrun is forked from it twice, as a template forks its ranks: then it is a child of the test,
which waits for it and signals it like any other. Before it begins it forks the process that becomes its
template, which waits to hear what it would find as its arguments, its environment and its descriptors.

What an import of torch reads from the environment has been read by then: see `fits`.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import fcntl
import gc
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ft_wrapper.run  # noqa: F401
from ft_wrapper.agent import standby
from ft_wrapper.agent.process import await_adoption, die_with
from ft_wrapper.torch_groups.warm_up import import_lazy_modules

TIMEOUT = 120.0
MAX_MESSAGE = 1 << 20
MODULE = "ft_wrapper.run"
# Read while torch is imported, or by Python as it starts.
_READ_EARLY = ("TORCH_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "LD_", "CUDA_", "GLOO_", "NCCL_")
_READ_LATE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
_PR_SET_CHILD_SUBREAPER = 36
Program = tuple[str, dict[str, Any]]
"""Source, and the names that it begins with."""
_prctl = ctypes.CDLL(None).prctl


# In the test ---------------------------------------------------------------------------------------------


class WarmProcess:
    """The test's handle on the warm process."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = str(Path(__file__).parent.parent)
        code = (
            "import sys; sys.path.insert(0, sys.argv.pop(1)); from support.warm_ftrun import main;"
            " exec(*main(int(sys.argv.pop(1))))  # ft_wrapper.run, and ft_wrapper.agent.standby"
        )
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, path, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**self._environment, "OPENBLAS_NUM_THREADS": "1"},
            )
        self._control.settimeout(TIMEOUT)
        if not self._control.recv(MAX_MESSAGE):
            raise RuntimeError("the warm process did not start")

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether an ftrun with this environment may be forked from it."""
        return self._early(environment) == self._early(self._environment)

    @staticmethod
    def _early(environment: Mapping[str, str]) -> dict[str, str]:
        names = {name for name in environment if name.startswith(_READ_EARLY)} - _READ_LATE
        return {name: environment[name] for name in names}

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path, output: int
    ) -> subprocess.Popen[bytes]:
        """Forks an ftrun.

        Args:
            arguments: its own.
            environment: all of its environment.
            cwd: its working directory.
            output: where its standard streams go.
        """
        request = {"arguments": arguments, "environment": dict(environment), "cwd": str(cwd)}
        with _adopting():
            socket.send_fds(self._control, [json.dumps(request).encode()], [output])
            pid = int(self._control.recv(MAX_MESSAGE))
        return _popen([sys.executable, "-m", MODULE, *arguments], pid)

    def close(self) -> None:
        """Ends it; what was forked from it lives on."""
        self._control.close()
        self.process.wait(TIMEOUT)


warm_process: WarmProcess | None = None
"""What ftruns are forked from if that makes no difference; they are started by exec if there is none."""


@contextlib.contextmanager
def warm() -> Iterator[None]:
    """Has `start_ftrun` fork its ftruns from one process for as long as the block runs."""
    global warm_process
    warm_process = WarmProcess()
    try:
        yield
    finally:
        warm_process.close()
        warm_process = None


def start_ftrun(
    arguments: Sequence[str],
    output: int,
    cwd: Path,
    environment: Mapping[str, str],
    before: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Starts an ftrun: forked from the warm process if there is one and that makes no difference.

    Args:
        arguments: its own.
        output: where its standard streams go.
        cwd: its working directory.
        environment: what it finds in its environment beside what we have in ours.
        before: what to put in front of the command.
    """
    everything = {**os.environ, **environment}
    if warm_process is not None and not before and warm_process.fits(everything):
        return warm_process.start(arguments, everything, cwd, output)
    command = [*before, sys.executable, "-m", MODULE, *arguments]
    return subprocess.Popen(command, env=everything, cwd=cwd, stdout=output, stderr=subprocess.STDOUT)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Descendants whose parents end become children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _popen(command: Sequence[str], pid: int) -> subprocess.Popen[bytes]:
    """The usual handle on a child that was not started by exec."""
    handle: Any = subprocess.Popen.__new__(subprocess.Popen)
    handle.args, handle.pid, handle.returncode = command, pid, None
    handle.stdin = handle.stdout = handle.stderr = None
    handle._child_created, handle._waitpid_lock = True, threading.Lock()
    handle._sigint_wait_secs = 0.25
    return handle  # type: ignore[no-any-return]


# In the warm process -------------------------------------------------------------------------------------


def main(control_fd: int) -> Program:
    """All of the warm process. Returns when the test is gone; in an ftrun or a template, what that runs.

    It runs outside of our frames, which tracebacks would show.
    """
    import_lazy_modules()
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"the warm process has {threads} threads; a fork of it may hang")
    gc.collect()
    gc.freeze()
    # Ctrl-C is for the test, which ends this process, and for the ftruns.
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
    test = os.getppid()
    with socket.socket(fileno=control_fd) as control:
        control.send(b"ready")
        while True:
            data, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE, 1)
            if not data:
                return "", {}
            pid = _fork_for(test)
            if pid == 0:
                break
            os.close(fds[0])
            control.send(str(pid).encode())
    signal.signal(signal.SIGINT, interrupted)
    return _become_ftrun(json.loads(data), fds[0])


def _fork_for(parent: int) -> int:
    """Forks a process that is a child of another one, a subreaper; its pid, and 0 in it."""
    read_end, write_end = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid != 0:
            os.write(write_end, str(pid).encode())
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as said:
        if between == 0:
            await_adoption(parent)
            return 0
        os.waitpid(between, 0)  # from then on it is the other one's
        return int(said.read())


def _become_ftrun(request: dict[str, Any], output: int) -> Program:
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.chdir(request["cwd"])
    _set_environment(request["environment"])
    ahead = None if "--no-standby" in request["arguments"] else _Ahead()
    if ahead is not None:
        if ahead.pid == 0:
            return ahead.become_template()
        ahead.replace_start()
    sys.argv = [MODULE, *request["arguments"]]
    sys.path[0] = request["cwd"]
    sys.modules.pop(MODULE)  # it runs as __main__
    _new_main()
    return f"import runpy; runpy._run_module_as_main({MODULE!r})", {}


def _set_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    # torch's launcher has set its loggers' level by then.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.distributed") and isinstance(logger, logging.Logger) and logger.level:
            logger.setLevel(environment.get("LOGLEVEL", "WARNING"))
    tempfile.tempdir = None


def _new_main() -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    return module


class _Ahead:
    """A child of ftrun that waits to become its template; `pid` is 0 in it. It ends with ftrun."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._socket, theirs = theirs, self._socket
        theirs.close()

    def replace_start(self) -> None:
        """Has ftrun's first template be this process; others are started as ever."""
        start = standby.start

        def start_here(
            command: Sequence[str], environment: Mapping[str, str], *args: Any, **kwargs: Any
        ) -> subprocess.Popen[bytes]:
            if self._socket.fileno() == -1 or standby.BOOT not in command:
                return start(command, environment, *args, **kwargs)
            arguments = [*command[list(command).index(standby.BOOT) + 1 :]]
            fds = [*kwargs["pass_fds"]]
            request = {"arguments": arguments, "environment": dict(environment), "fds": fds}
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
            self._socket.close()
            return _popen(command, self.pid)

        standby.start = start_here

    def become_template(self) -> Program:
        """Waits until ftrun wants it; returns what it is to run."""
        die_with(self._parent)
        with self._socket:
            data, received, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE, 8)
        if not data:
            os._exit(0)
        request = json.loads(data)
        # First out of the way of the numbers that they are to have.
        high = [_above(fd, 100) for fd in received]
        for fd, number in zip(high, request["fds"], strict=True):
            os.dup2(fd, number)
            os.close(fd)
        os.setsid()
        _set_environment(request["environment"])
        _unbuffer()
        sys.argv = ["-c", *request["arguments"]]
        sys.path[0] = ""
        return standby.BOOT, _new_main().__dict__


def _unbuffer() -> None:
    """What ``python -u`` does."""
    for name, fd, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        raw: Any = io.FileIO(fd, "w", closefd=False)
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _above(fd: int, lowest: int) -> int:
    number = fcntl.fcntl(fd, fcntl.F_DUPFD, lowest)
    os.close(fd)
    return number
