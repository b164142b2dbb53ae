"""Starts ftrun, its template and other Pythons in milliseconds: forked from one that has imported torch.

Importing torch, and what the template imports for its ranks, takes five seconds of processor time per
ftrun, more than the rest of a short job. So one warm process imports it all once, and stays with one
thread. An ftrun is forked from it twice, as a template forks its ranks: then it is a child of the test,
which waits for it and signals it like any other. Before it begins it forks the process that becomes its
template, which waits to hear what it would find as its arguments, its environment and its descriptors.
Other programs with torch are forked once.

What an import of torch reads from the environment has been read by then: see `fits`.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
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
from typing import IO, Any

import ft_wrapper.cli.run  # noqa: F401
from ft_wrapper import *  # noqa: F403  # what each of them would load
from ft_wrapper.agent import standby
from ft_wrapper.agent.process import await_adoption
from ft_wrapper.agent.signals import NOTICES, die_with
from ft_wrapper.rendezvous import presence
from ft_wrapper.torch_groups.warm_up import import_lazy_modules

from .ends import end_quickly as end_quickly

TIMEOUT = 120.0
RECONNECTS = "FT_WRAPPER_TEST_RECONNECTS"
"""Of an ftrun whose store is never away: else, on a busy machine, it finds no node silent for up to 20 s."""
MAX_MESSAGE = 1 << 20
MODULE = "ft_wrapper.run"
NAMESPACE = ["ip", "netns", "exec"]
"""In front of a network namespace and a command: to run that there."""
# Read while torch is imported, or by Python as it starts.
_READ_EARLY = ("TORCH_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "LD_", "CUDA_", "GLOO_", "NCCL_")
_READ_LATE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 0x80000
Program = tuple[str | types.CodeType, dict[str, Any]]
"""Code, and the names that it begins with."""
_libc = ctypes.CDLL(None, use_errno=True)
# What it runs begins in no frame of ours, which its tracebacks would show.
_CODE = """import gc, sys
gc.disable()  # until all is imported
sys.path.insert(0, sys.argv.pop(1))
from support.warm_ftrun import end_quickly, main
try:
    exec(*main(int(sys.argv.pop(1))))  # ft_wrapper.run, and ft_wrapper.agent.standby
except SystemExit as error:
    end_quickly(error.code)
    raise
end_quickly()
"""


# In the test ---------------------------------------------------------------------------------------------


class WarmProcess:
    """The test's handle on the warm process."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = str(Path(__file__).parent.parent)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _CODE, path, str(theirs.fileno())],
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
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        cwd: Path,
        outputs: Sequence[int],
        new_session: bool = False,
        path: Sequence[str] = (),
        namespace: str = "",
    ) -> subprocess.Popen[Any]:
        """Forks a Python.

        Args:
            words: what to give it: a script or ``-m`` and a module or ``-c`` and code, and arguments.
            environment: all of its environment.
            cwd: its working directory.
            outputs: where its standard output and its errors go.
            new_session: it leads a session of its own.
            path: where it looks for modules first.
            namespace: the network namespace that it is in; that of the test if empty.
        """
        request = {"words": words, "environment": dict(environment), "cwd": str(cwd)}
        request.update(session=new_session, path=path, namespace=namespace)
        with _adopting():
            socket.send_fds(self._control, [json.dumps(request).encode()], [*outputs])
            pid = int(self._control.recv(MAX_MESSAGE))
        return _popen([sys.executable, *words], pid)

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
    # Its ranks use no GPU, if there are some, or share the first.
    everything = {"PET_DEVICES_PER_NODE": "0", **os.environ, **environment}
    namespace = before[-1] if [*before[:-1]] == NAMESPACE else ""
    if warm_process is not None and (namespace or not before) and warm_process.fits(everything):
        words = ["-m", MODULE, *arguments]
        return warm_process.start(words, everything, cwd, [output, output], namespace=namespace)
    command = [*before, sys.executable, "-m", MODULE, *arguments]
    return subprocess.Popen(command, env=everything, cwd=cwd, stdout=output, stderr=subprocess.STDOUT)


def start_python(
    words: Sequence[object],
    *,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdout: int | IO[Any] = subprocess.PIPE,
    stderr: int | IO[Any] = subprocess.PIPE,
    start_new_session: bool = False,
    path: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Starts a Python as `subprocess.Popen` does, with text pipes: forked if that makes no difference.

    Args:
        words: what follows ``python``.
        environment: what it finds in its environment beside what we have in ours.
        cwd: its working directory; ours when None.
        stdout: as for `subprocess.Popen`.
        stderr: as for `subprocess.Popen`.
        start_new_session: as for `subprocess.Popen`.
        path: where it, and what it starts, look for modules first.
    """
    everything = {**os.environ, **(environment or {})}
    arguments = [str(word) for word in words]
    fits = warm_process is not None and warm_process.fits(everything)
    if path:
        everything["PYTHONPATH"] = os.pathsep.join([*path, everything.get("PYTHONPATH", "")])
    if warm_process is None or not fits:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=everything,
            cwd=cwd,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=start_new_session,
        )
    with contextlib.ExitStack() as ours:
        read_ends: list[IO[str] | None] = []
        outputs: list[int] = []
        for wanted in (stdout, stderr):
            read_end = None
            if wanted == subprocess.PIPE:
                there, number = os.pipe()
                read_end = os.fdopen(there)
                ours.callback(os.close, number)
            elif wanted == subprocess.STDOUT:
                number = outputs[0]
            elif wanted == subprocess.DEVNULL:
                number = os.open(os.devnull, os.O_WRONLY)
                ours.callback(os.close, number)
            else:
                number = wanted if isinstance(wanted, int) else wanted.fileno()
            read_ends.append(read_end)
            outputs.append(number)
        process = warm_process.start(
            arguments, everything, cwd or Path.cwd(), outputs, start_new_session, path
        )
    process.stdout, process.stderr = read_ends
    return process


def run_python(
    words: Sequence[object],
    timeout: float,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a Python to its end as `subprocess.run` does, with what it says, as `start_python` starts it."""
    with start_python(words, environment=environment, cwd=cwd) as process:
        try:
            said, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, said, errors)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Descendants whose parents end become children of this process."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _popen(command: Sequence[str], pid: int) -> subprocess.Popen[Any]:
    """The usual handle on a child that was not started by exec."""
    handle: Any = subprocess.Popen.__new__(subprocess.Popen)
    handle.args, handle.pid, handle.returncode = command, pid, None
    handle.stdin = handle.stdout = handle.stderr = None
    handle._child_created, handle._waitpid_lock = True, threading.Lock()
    handle._sigint_wait_secs = 0.25
    # What `communicate` looks at.
    handle._communication_started, handle._input, handle.text_mode = False, None, True
    return handle  # type: ignore[no-any-return]


# In the warm process -------------------------------------------------------------------------------------


def main(control_fd: int) -> Program:
    """All of the warm process. Returns when the test is gone; in what is forked from it, what that runs."""
    import_lazy_modules()
    importlib.import_module("torch.distributed.checkpoint")
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"the warm process has {threads} threads; a fork of it may hang")
    gc.collect()
    gc.freeze()
    gc.enable()
    # Ctrl-C is for the test, which ends this process, and for the ftruns.
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=control_fd) as control:
        control.send(b"ready")
        while True:
            data, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE, 2)
            if not data:
                return "", {}
            pid = _fork_twice()
            if pid == 0:
                break
            for fd in fds:
                os.close(fd)
            control.send(str(pid).encode())
    signal.signal(signal.SIGINT, interrupted)
    request = json.loads(data)
    _settle(request, fds)
    first, *arguments = request["words"]
    if first == "-m" and arguments[0] == MODULE:
        return _become_ftrun(arguments[1:], request["cwd"])
    return _become_other(first, arguments, request["cwd"])


def _fork_twice() -> int:
    """Forks a process that is a child of the nearest subreaper, the test; its pid, and 0 in it."""
    read_end, write_end = os.pipe()
    between = os.fork()
    if between == 0:
        parent = os.getpid()
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


def _settle(request: dict[str, Any], outputs: list[int]) -> None:
    """Takes what it is given: its streams, its folder, its environment."""
    high = [_above(fd, 100) for fd in outputs]
    for stream, fd in zip((1, 2), high, strict=True):
        os.dup2(fd, stream)
        os.close(fd)
    if request["session"]:
        os.setsid()
    if request["namespace"]:
        _enter_namespace(request["namespace"])
    os.chdir(request["cwd"])
    sys.path[1:1] = request["path"]
    _set_environment(request["environment"])


def _enter_namespace(name: str) -> None:
    """What ``ip netns exec`` does, but for /sys: the network is another, and so are some files of /etc."""
    with open(f"/run/netns/{name}") as file:
        _succeeds(_libc.setns(file.fileno(), _CLONE_NEWNET))
    _succeeds(_libc.unshare(_CLONE_NEWNS))
    _succeeds(_libc.mount(b"", b"/", None, _MS_REC | _MS_SLAVE, None))
    for path in Path("/etc/netns", name).iterdir():
        _succeeds(_libc.mount(bytes(path), bytes(Path("/etc", path.name)), None, _MS_BIND, None))


def _succeeds(status: int) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _become_ftrun(arguments: list[str], cwd: str) -> Program:
    ahead = None if "--no-fork" in arguments or os.environ.get("PET_NO_FORK") == "1" else _Ahead()
    if ahead is not None:
        if ahead.pid == 0:
            return ahead.become_template()
        ahead.replace_start()
    presence.RECONNECTS = float(os.environ.get(RECONNECTS, presence.RECONNECTS))
    return _as_main(MODULE, arguments, cwd)


def _become_other(first: str, arguments: list[str], cwd: str) -> Program:
    if first == "-m":
        return _as_main(arguments[0], arguments[1:], cwd)
    if first == "-c":
        path, source = "<string>", arguments.pop(0)
        sys.argv, sys.path[0] = ["-c", *arguments], ""
    else:
        path, source = first, Path(first).read_text()
        sys.argv, sys.path[0] = [first, *arguments], str(Path(first).resolve().parent)
    names = _new_main().__dict__
    if first != "-c":
        names["__file__"] = path
    return compile(source, path, "exec", dont_inherit=True), names


def _as_main(module: str, arguments: list[str], cwd: str) -> Program:
    sys.argv, sys.path[0] = [module, *arguments], cwd
    sys.modules.pop(module, None)  # it runs as __main__
    _new_main()
    return f"import runpy; runpy._run_module_as_main({module!r})", {}


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
        die_with(self._parent, NOTICES)
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
