"""The command that a node has to pass before it takes a seat. Until then the job goes on without the node."""

import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from multiprocessing import connection

from .. import events
from .._text import cut
from ..store.bounded import call_in_thread
from .nodes import BadNode
from .process import start
from .signals import signal_name

log = logging.getLogger(__name__)

#: Seconds that the command may take, by default.
TIMEOUT = 120.0
#: Seconds that a node waits before it is checked again: at first, and at most. Each wait is twice the last.
FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0
_END_TIMEOUT = 5.0  # seconds that a killed command may take to vanish
_MOST_OUTPUT = 4096  # bytes, of which the last line is taken
_LONGEST_REASON = 300  # bytes


@dataclasses.dataclass(frozen=True)
class NodeCheck:
    """A shell command, which passes with exit status 0. Otherwise its last line of output is the reason.

    Args:
        command: for ``/bin/sh -c``.
        timeout: seconds that it may take.
        retries: how often it is tried again before the node ends; None: no limit.
    """

    command: str
    timeout: float = TIMEOUT
    retries: int | None = None

    def failure(self) -> str:
        """Runs it; returns why the node must not take part, empty if it may.

        If a signal handler raises meanwhile, the command is killed and the exception propagates.
        """
        try:
            # In memory: a full disk may be the reason.
            with open(os.memfd_create("node check"), "wb", buffering=0) as output:
                code = _run(self.command, self.timeout, output.fileno())
                last = _last_line(output.fileno())
        except OSError as error:
            return f"--node-check cannot be run: {error}"
        if code == 0:
            return ""
        if code is None:
            how = f"it has not ended within {self.timeout:g} s"
        else:
            how = f"killed by {signal_name(-code)}" if code < 0 else f"exit status {code}"
        return f"--node-check: {last} ({how})" if last else f"--node-check: {how}"


def await_pass(
    check: NodeCheck, who: str, keep_out: Callable[[str], object], wait: Callable[[float], object]
) -> bool:
    """Repeats the check until the node passes.

    Args:
        check: the check.
        who: the node, for the log.
        keep_out: called with the reason after each try that failed.
        wait: waits for a number of seconds; if it raises, as when the job is over, the wait ends.

    Returns:
        Whether it passed at once.

    Raises:
        BadNode: it has failed as often as it may.
    """
    failures, began, logged = 0, time.monotonic(), ""
    while why := check.failure():
        keep_out(why)
        failures += 1
        if check.retries is not None and failures > check.retries:
            times = "" if failures == 1 else f" {failures} times, the last time"
            raise BadNode(f"{who} has failed its check{times}: {why}")
        if why != logged:
            log.warning("%s is kept out of the job until it passes its check: %s", who, why)
            events.emit("kept_out", line=f"{who} was kept out: {why}")
            logged = why
        wait(min(FIRST_WAIT * 2 ** min(failures - 1, 30), LONGEST_WAIT))
    if failures:
        log.info("%s has passed its check after %.1f s, and joins", who, time.monotonic() - began)
    return failures == 0


def _run(command: str, timeout: float, output: int) -> int | None:
    """Runs a command in a session of its own, and kills what is left of it.

    Returns:
        Its exit code; None if it takes too long.
    """
    running: list[subprocess.Popen[bytes]] = []
    is_over = threading.Event()

    def run() -> int | None:
        with contextlib.ExitStack() as cleanup:
            nothing_to_read = f"exec </dev/null\n{command}"
            process = start(["/bin/sh", "-c", nothing_to_read], os.environ, output, output)
            cleanup.callback(_end, process)
            running.append(process)
            if is_over.is_set():
                return None
            with open(os.pidfd_open(process.pid), "rb", buffering=0) as pidfd:
                has_ended = connection.wait([pidfd.fileno()], timeout)
        return process.returncode if has_ended else None

    try:
        # What a signal handler raises in the main thread while this forks is lost: 2 of some 60 runs.
        return call_in_thread(run, "the node's check")
    except BaseException:  # a signal; the thread ends then, also if it is just starting the command
        is_over.set()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            for process in running:
                os.killpg(process.pid, signal.SIGKILL)
        raise


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kills what is left of a command. Its process is reaped only then, so that the pid is still its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all that is left is another user's: sudo
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a hanging driver holds it
        process.wait(_END_TIMEOUT)
    # Processes that it left behind are our children now, if this process adopts orphans.
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-process.pid, os.WNOHANG) != (0, 0):
            pass


def _last_line(output: int) -> str:
    end = os.pread(output, _MOST_OUTPUT, max(0, os.fstat(output).st_size - _MOST_OUTPUT))
    *_, last = "", *filter(None, map(str.strip, end.decode(errors="replace").splitlines()))
    return cut("".join(filter(str.isprintable, last)), _LONGEST_REASON)
