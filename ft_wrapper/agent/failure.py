"""How a rank failed, and how that is told."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Iterable, Sequence

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from .processes import RankProcess
from .signals import signal_name

log = logging.getLogger(__name__)

ERROR_FILE_ENV = "TORCHELASTIC_ERROR_FILE"
"""torch's: where a process records the exception that ends it."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """The end of a rank that did not exit with 0.

    Args:
        rank: the rank, of those of all nodes.
        pid: its process.
        exitcode: its exit code, or minus the number of the signal that ended it.
        when: seconds since the epoch: of the exception, if it was recorded, else of the end.
        error: the first line of what was recorded; empty if nothing was.
        file: where to read on: a log file or the error file; empty if there is none.
        incarnation: which process in a row of the rank it was.
        error_file: where its exception was recorded; empty if it was not.
        ended_by: the error of another rank that ended the job, and this process with it; empty if none did.
    """

    rank: int
    pid: int
    exitcode: int
    when: float
    error: str
    file: str
    incarnation: int = 0
    error_file: str = ""
    ended_by: str = ""

    def how(self) -> str:
        """Says in words how the process ended."""
        if self.exitcode < 0:
            return f"killed by {signal_name(-self.exitcode)}"
        return f"exit code {self.exitcode}"


def read_failure(process: RankProcess, exitcode: int, rank: int) -> Failure:
    """Puts together what is known about the end of a rank's process, right after it.

    Args:
        process: what has ended.
        exitcode: its exit code, or minus the number of the signal.
        rank: the rank, of those of all nodes.
    """
    error, when, found = "", time.time(), ""
    error_file, files = process.files.error_file, list(process.files.logs)
    if os.path.isfile(error_file):
        files.insert(0, error_file)
        try:
            message, recorded = _read_record(error_file)
        except (OSError, ValueError, KeyError, TypeError) as problem:
            # Half a file, for instance, left by a rank that died while it wrote it.
            log.warning("rank %d: its error file %s cannot be read: %r", rank, error_file, problem)
        else:
            found = error_file
            error = (message.strip().splitlines() or [""])[0]
            if 0 < recorded < when:
                when = recorded
    file = files[-1] if files else ""
    return Failure(rank, process.pid, exitcode, when, error, file, process.incarnation, found)


def _read_record(error_file: str) -> tuple[str, float]:
    """Reads an error file as torch's and other handlers write it; returns message and time (0: none)."""
    with open(error_file, encoding="utf-8") as file:
        record = json.load(file)
    message = record["message"]
    if isinstance(message, dict):
        return str(message["message"]), float(message["extraInfo"]["timestamp"])
    return str(message), float(record.get("timestamp", 0))


def write_own_error_file(cause: Failure | Exception) -> None:
    """Writes what has ended the job to this process's own error file, where a platform looks.

    As torchrun: the file is named by ``TORCHELASTIC_ERROR_FILE``, and is a copy of the error file of the rank
    that failed first, with its exit code. Nothing is written if the variable is not set, or if that rank has
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


def in_order(failures: Iterable[Failure]) -> list[Failure]:
    """Sorts failures by time, the first one first; within a second, in which records count, they stay."""
    return sorted(failures, key=lambda failure: int(failure.when))


def report(failures: Sequence[Failure], nproc: int, node: str = "") -> str:
    """Says who failed, how and where to look.

    Args:
        failures: in the order of happening.
        nproc: number of ranks of this node.
        node: what it is called; empty if there is no other.

    Returns:
        A table of several lines.
    """
    rows = [("rank", "pid", "when", "how", "error", "file")]
    for failure in failures:
        when = time.strftime("%H:%M:%S", time.localtime(failure.when))
        rows.append(
            (
                str(failure.rank),
                str(failure.pid) if failure.pid else "-",
                when,
                failure.how(),
                failure.error or "-",
                failure.file or "-",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ranks = len({failure.rank for failure in failures})
    times = f", {len(failures)} times in all" if len(failures) > ranks else ""
    where = f" of node {node}" if node else ""
    lines = [f"{ranks} of {nproc} ranks{where} failed{times}, the first one first:"]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(("  " + "  ".join(cells)).rstrip())
    if not any(failure.error for failure in failures):
        lines.append("  (decorate main() with torch.distributed.elastic's @record to see its error here)")
    return "\n".join(lines)
