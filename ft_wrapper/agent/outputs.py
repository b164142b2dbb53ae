"""The output of ranks: log files, lines shown on the console, descriptions of failures.

The destinations are torch's own (`LogsSpecs`), one set for each incarnation of a rank.
"""

import dataclasses
import functools
import json
import logging
import os
import signal
import socket
import string
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from .._files import owners_only
from ..report import table
from .rounds import Failure
from .signals import signal_name

log = logging.getLogger(__name__)

#: torchrun's: what comes before each line shown, a template as for ``--log-line-prefix-template``.
PREFIX_ENV = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
PREFIX_WORDS = frozenset({"role_name", "rank", "local_rank", "hostname"})
#: torch's: where a process records the exception that ends it.
ERROR_FILE_ENV = "TORCHELASTIC_ERROR_FILE"
_TAIL_INTERVAL = 0.1  # seconds between two looks at a file that is shown
_AT_ONCE = 1 << 20  # bytes of it
_BLOCK = 4096  # bytes; less may still have room at the end of a file


@dataclasses.dataclass(frozen=True)
class RankFiles:
    """Files of one incarnation of a rank.

    Args:
        stdout: where its output goes; empty for our own.
        stderr: the same for its errors.
        error_file: where ``torch.distributed.elastic``'s ``record`` writes its exception.
    """

    stdout: str
    stderr: str
    error_file: str


class Logs:
    """The files of all ranks, and the threads that show them on the console.

    A context manager: leaving it shows what was written last.

    Args:
        specs: what the command line asked for.
        role: what the ranks are called in the lines that are shown.
        prefix: what comes before these lines, with ``${role_name}``, ``${rank}``, ``${local_rank}`` and
            ``${hostname}`` substituted; role and rank when None.
    """

    def __init__(self, specs: LogsSpecs, role: str, prefix: str | None = None) -> None:
        self._specs = specs
        self._role = role
        self._prefix = string.Template(prefix or "[${role_name}${rank}]:")
        self._destinations: LogsDest | None = None
        self._first_rank = 0
        self._tails: dict[tuple[int, int], list[Tail]] = {}
        self._ended: list[Tail] = []

    def __enter__(self) -> "Logs":
        return self

    def __exit__(self, *_: object) -> None:
        for rank, incarnation in list(self._tails):
            self.close(rank, incarnation)
        for tail in self._ended:
            tail.close()

    def begin_round(self, environments: Mapping[int, dict[str, str]], first_rank: int = 0) -> None:
        """Makes the directories of a round, in which all ranks start; empties them if they exist.

        Args:
            environments: by local rank; torch names directories by what it finds in them.
            first_rank: what local rank 0 is called in the lines that are shown.

        Raises:
            OSError: they cannot be made.
        """
        self._first_rank = first_rank
        self._destinations = self._specs.reify({rank: dict(env) for rank, env in environments.items()})

    def open(self, rank: int, incarnation: int) -> RankFiles:
        """Says where the streams of a process go, and starts to show those that are to be shown.

        Args:
            rank: its local rank.
            incarnation: its number; replacements have a directory of their own below their predecessor's.

        Raises:
            OSError: the directory, or a file to be shown, cannot be made.
        """
        to = self._destinations
        assert to is not None, "no round has begun"

        def own(path: str) -> str:
            if incarnation == 0 or path in ("", os.devnull):
                return path
            folder = os.path.join(os.path.dirname(path), f"incarnation_{incarnation}")
            os.makedirs(folder, 0o700, exist_ok=True)
            return os.path.join(folder, os.path.basename(path))

        stdout, stderr = own(to.stdouts[rank]), own(to.stderrs[rank])
        files = RankFiles(stdout, stderr, own(to.error_files[rank]))
        shown = self._tails[rank, incarnation] = []
        streams = ((stdout, to.tee_stdouts, sys.stdout), (stderr, to.tee_stderrs, sys.stderr))
        for path, ranks, console in streams:
            if rank in ranks and console:  # None where this process was started without one
                shown.append(Tail(path, console, self._prefix_of(rank)))
        return files

    def _prefix_of(self, rank: int) -> str:
        ranks = {"rank": self._first_rank + rank, "local_rank": rank}
        return self._prefix.safe_substitute(ranks, role_name=self._role, hostname=socket.gethostname())

    def close(self, rank: int, incarnation: int) -> None:
        """The process has ended: its last lines are shown, in another thread, and its tails end."""
        self._ended = [tail for tail in self._ended if tail.is_alive()]
        for tail in self._tails.pop((rank, incarnation), ()):
            tail.end()
            self._ended.append(tail)


def opened(path: str, files: ExitStack) -> int | None:
    """Opens a file for a stream; None if the stream goes where ours goes.

    Args:
        path: the file; empty for none.
        files: closes it.

    Raises:
        OSError: it cannot be opened.
    """
    return files.enter_context(open(path, "wb", opener=owners_only)).fileno() if path else None


class Tail(threading.Thread):
    """Shows what is written to a file, line by line, in a thread of its own, until `end` and once after it.

    Torch's `TailLog` may end before its last look, and then loses what was written in between. On a pipe it
    shows nothing before there are 8 KB. It splits a line that is written in pieces, and ends at a character
    that the console cannot encode.

    Args:
        path: the file; made if it is not there yet.
        console: where its lines are shown.
        prefix: what comes before each of them.

    Raises:
        OSError: the file cannot be made or read.
    """

    def __init__(self, path: str, console: TextIO, prefix: str) -> None:
        super().__init__(name="ft_wrapper-tail", daemon=True)
        open(path, "ab", opener=owners_only).close()
        self._path = path
        self._file = open(path, "rb")  # noqa: SIM115
        self._console = console
        self._prefix = prefix.encode(errors="replace")
        self._ended = threading.Event()
        self.start()

    def end(self) -> None:
        """Nothing more will be written. Does not wait until the last lines are shown."""
        self._ended.set()

    def close(self) -> None:
        """Waits until the last lines are shown."""
        self.end()
        self.join()

    def run(self) -> None:
        """Shows it, in the thread."""
        with self._file:
            try:
                self._show()
            except (OSError, ValueError) as error:  # the console's reader is gone, or it is closed
                log.warning("output to %s is no longer shown: %s", self._path, error)

    def _show(self) -> None:
        rest, ended = b"", False
        while not ended:
            ended = self._ended.wait(_TAIL_INTERVAL)  # before the look, which then is the last one
            while data := self._file.read(_AT_ONCE):
                *lines, rest = (*(rest + data).splitlines(keepends=True), b"")
                if lines and not lines[-1].endswith(b"\n"):
                    rest = lines.pop()
                self._write(lines)
            if ended and rest:
                self._write([rest])
            self._console.flush()

    def _write(self, lines: Sequence[bytes]) -> None:
        """Writes bytes, which any console takes; a progress bar's states are lines, too."""
        shown = b"".join(self._prefix + line.rstrip(b"\r\n") + b"\n" for line in lines)
        if hasattr(self._console, "buffer"):
            self._console.buffer.write(shown)
        else:  # not a file's, such as a notebook's
            self._console.write(shown.decode(errors="replace"))


# Failures --------------------------------------------------------------------------------------------------


def describe_exit(exitcode: int, kernel_kills: int = 0, lost_output: str = "") -> str:
    """Says in words how a process ended.

    Args:
        exitcode: its exit code, or minus the number of the signal that ended it.
        kernel_kills: how many processes the kernel has killed here for lack of memory since it began.
        lost_output: where nothing can be written to its log files, which and why; else empty.
    """
    if exitcode == -signal.SIGKILL and kernel_kills:
        return f"killed by SIGKILL (out of memory? the kernel has killed {kernel_kills} meanwhile)"
    if exitcode < 0:
        return f"killed by {signal_name(-exitcode)}"
    said = f"exit code {exitcode}" + ("" if exitcode else " in its wrapped call")
    return f"{said} ({lost_output}; its prints fail and are lost)" if lost_output else said


def read_failure(
    rank: int, pid: int, incarnation: int, exitcode: int, files: RankFiles, kernel_kills: int = 0
) -> Failure:
    """Puts together what is known of a failed process, right after its end.

    Args:
        rank: its rank, among those of all nodes.
        pid: the process.
        incarnation: number of this process of the rank, from 0.
        exitcode: its exit code, or minus the number of the signal.
        files: its streams and its error file.
        kernel_kills: how many processes the kernel has killed here for lack of memory since it began.
    """
    error, when, recorded_in = "", time.time(), ""
    logs = [file for file in (files.stdout, files.stderr) if file not in ("", os.devnull)]
    lost_output = next(filter(None, map(_why_lost, logs)), "")
    if os.path.isfile(files.error_file):
        logs.insert(0, files.error_file)
        try:
            message, recorded = _read_record(files.error_file)
        except (OSError, ValueError, KeyError, TypeError) as problem:
            # Half a file, for instance: the rank died while it wrote it.
            log.warning("rank %d: its error file %s cannot be read: %r", rank, files.error_file, problem)
        else:
            recorded_in = files.error_file
            error = (message.strip().splitlines() or [""])[0]
            if 0 < recorded < when:
                when = recorded
    how, file = describe_exit(exitcode, kernel_kills, lost_output), logs[-1] if logs else ""
    return Failure(rank, pid, exitcode, when, error, file, incarnation, recorded_in, how=how)


def _why_lost(log_file: str) -> str:
    """Why nothing more can be written next to a log file, as on a full disk; empty if it can."""
    try:
        with tempfile.TemporaryFile(dir=os.path.dirname(log_file), buffering=0) as probe:
            probe.write(bytes(_BLOCK))
    except OSError as error:
        return f"{log_file} cannot be written: {error.strerror}"
    return ""


def _read_record(error_file: str) -> tuple[str, float]:
    """Reads an error file as torch's and other handlers write it; returns message and time (0: none)."""
    with open(error_file, encoding="utf-8") as file:
        record = json.load(file)
    message = record["message"]
    if isinstance(message, dict):
        return str(message["message"]), float(message["extraInfo"]["timestamp"])
    return str(message), float(record.get("timestamp", 0))


def write_own_error_file(cause: Failure | Exception) -> None:
    """Writes what ended the job to this process's own error file, where a platform looks.

    As torchrun: ``TORCHELASTIC_ERROR_FILE`` names the file, and it is a copy of the error file of the rank
    that failed first, with its exit code. Nothing is written if the variable is not set, or if that rank
    recorded nothing.

    Args:
        cause: the first failure of a rank, or an error of our own.
    """
    if not os.environ.get(ERROR_FILE_ENV):
        return
    handler = get_error_handler()
    try:
        if isinstance(cause, Exception):
            handler.record_exception(cause)
        elif cause.error_file:
            handler.dump_error_file(cause.error_file, cause.exitcode)
    except (OSError, ValueError) as error:
        log.warning("%s=%s cannot be written: %s", ERROR_FILE_ENV, os.environ[ERROR_FILE_ENV], error)


def report(failures: Sequence[Failure], nproc: int, node: str = "") -> str:
    """Says which ranks failed, how, and where to look.

    Args:
        failures: in the order of happening.
        nproc: number of ranks of this node.
        node: what it is called; empty if there is no other.

    Returns:
        A table of several lines.
    """
    rows: list[tuple[object, ...]] = [("rank", "pid", "when", "how", "error", "file")]
    for failure in failures:
        when = time.strftime("%H:%M:%S", time.localtime(failure.when))
        rows.append((failure.rank, failure.pid or "", when, failure.how, failure.error, failure.file))
    ranks = len({failure.rank for failure in failures})
    times = f", {len(failures)} times in all" if len(failures) > ranks else ""
    where = f" of node {node}" if node else ""
    lines = [f"{ranks} of {nproc} ranks{where} failed{times}, the first one first:"]
    lines += table(rows, "  ")
    if not any(failure.error for failure in failures):
        lines.append("  (decorate main() with torch.distributed.elastic's @record to see its error here)")
    return "\n".join(lines)


# How often the kernel has killed for lack of memory ---------------------------------------------------------
# The kernel notifies no process, but it counts before it sends SIGKILL: by cgroup, in that of this process
# and its ranks and in those below it.

_CGROUPS = Path("/sys/fs/cgroup")
_COUNTERS = {"memory": "memory.oom_control", "": "memory.events"}  # of versions 1 and 2, by the controller


def count_kernel_kills(events: Path | None = None) -> int:
    """How many processes the kernel has killed here for lack of memory; 0 if it does not say.

    Args:
        events: the file that `kills_file` finds; that of this process when None.
    """
    with suppress(OSError, ValueError):
        lines = (events or kills_file() or Path(os.devnull)).read_text().splitlines()
        return int(dict(line.split() for line in lines).get("oom_kill", 0))
    return 0


@functools.cache
def kills_file(own: Path = Path("/proc/self/cgroup"), cgroups: Path = _CGROUPS) -> Path | None:
    """The file of the nearest cgroup that counts such kills; None if none does.

    Args:
        own: says which cgroups a process is in; a container may see them under other names.
        cgroups: where they are mounted.
    """
    with suppress(OSError, ValueError):
        for _, kind, path in (line.split(":", 2) for line in own.read_text().splitlines()):
            for each in (Path(path), *Path(path).parents) if kind in _COUNTERS else ():
                if (file := cgroups / kind / each.relative_to("/") / _COUNTERS[kind]).exists():
                    return file
    return None
