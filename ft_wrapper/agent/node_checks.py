"""The check of a node: a command of the user's, which says why it failed."""

import contextlib
import functools
import logging
import os
import selectors
import signal
import subprocess
import time

from .process import die_with
from .signals import held, signal_name

log = logging.getLogger(__name__)

#: Seconds that a check may take, by default.
TIMEOUT = 120.0
_END_TIMEOUT = 5.0  # seconds that a killed command may take to vanish
_MOST_OUTPUT = 4096  # bytes, of which the last line is taken
_PIPE = 1 << 16  # bytes that a pipe holds
_LONGEST_REASON = 300  # characters


class Command:
    """Runs a shell command, which passes with exit status 0.

    The last line that it has printed is the reason if it does not. It runs in a session of its own. What is
    left of its process group is killed at its end, after the timeout, and when a signal handler raises.

    Args:
        command: for ``/bin/sh -c``.
        timeout: seconds that it may take.
    """

    def __init__(self, command: str, timeout: float) -> None:
        self._command = command
        self._timeout = timeout

    def __call__(self) -> str:
        """Runs it; returns why the node must not take part, empty if it may."""
        process, said = None, bytearray()
        read_end, write_end = os.pipe()
        with open(read_end, "rb", buffering=0), open(write_end, "wb", buffering=0) as printed:
            os.set_blocking(read_end, False)
            try:
                with held():
                    process = self._start(write_end)
                printed.close()
                has_ended = self._wait(process.pid, read_end, said)
            except OSError as error:
                return f"--node-check cannot be run: {error}"
            finally:
                if process is not None:
                    with held():
                        _end(process)
        if not has_ended:
            how = f"it has not ended within {self._timeout:g} s"
        elif process.returncode == 0:
            return ""
        elif process.returncode < 0:
            how = f"killed by {signal_name(-process.returncode)}"
        else:
            how = f"exit status {process.returncode}"
        last = _last_line(bytes(said))
        return f"--node-check: {last} ({how})" if last else f"--node-check: {how}"

    def _start(self, output: int) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            ["/bin/sh", "-c", self._command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=functools.partial(die_with, os.getpid()),
        )

    def _wait(self, pid: int, output: int, said: bytearray) -> bool:
        """Reads what the command prints until it has ended; False if it does not in time."""
        deadline = time.monotonic() + self._timeout
        pidfd = os.pidfd_open(pid)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(pidfd, selectors.EVENT_READ)
                selector.register(output, selectors.EVENT_READ)
                while True:
                    ready = [key.fd for key, _ in selector.select(max(0.0, deadline - time.monotonic()))]
                    if output in ready and not _read(output, said):
                        selector.unregister(output)  # all writers have closed it
                    if pidfd in ready:
                        for _ in range(_PIPE // _MOST_OUTPUT):  # what it has left behind may print for ever
                            if not _read(output, said):
                                break
                        return True
                    if time.monotonic() >= deadline:
                        return False
        finally:
            os.close(pidfd)


def _read(output: int, said: bytearray) -> bool:
    """Reads what is there and keeps the end of it; False if there is nothing."""
    try:
        data = os.read(output, _MOST_OUTPUT)
    except BlockingIOError:
        return False
    said += data
    del said[:-_MOST_OUTPUT]
    return bool(data)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kills what is left of a command. Its process is reaped only then, so that the number is its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(_END_TIMEOUT)
    except subprocess.TimeoutExpired:
        log.warning(
            "the node check %d is still there %g s after SIGKILL, left behind", process.pid, _END_TIMEOUT
        )
    # What it had started and did not wait for is ours now, where this process adopts what others leave.
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-process.pid, os.WNOHANG) != (0, 0):
            pass


def _last_line(said: bytes) -> str:
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    text = "".join(char for char in lines[-1] if char.isprintable()) if lines else ""
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"
