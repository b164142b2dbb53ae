"""Events as structured records: one JSON line each.

They are written if the environment variable ``FT_WRAPPER_EVENTS`` names a file, to which all ranks and
monitors of a host append. Times of one host can be compared: ``monotonic`` is one clock for all of its
processes, until the machine reboots (``boot``). Times of two hosts cannot.
"""

import contextlib
import functools
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from ._files import check_own_file, owners_only

log = logging.getLogger(__name__)

ENV = "FT_WRAPPER_EVENTS"

Record = dict[str, Any]


def are_enabled() -> bool:
    """Whether events are written."""
    return bool(os.environ.get(ENV))


def check_events_file() -> None:
    """Checks that events can be written, if they are enabled.

    Raises:
        OSError: they cannot. The message names the variable, and says what to do.
    """
    if are_enabled():
        check_own_file(ENV, os.environ[ENV])


def started() -> float:
    """When this process began, on the ``monotonic`` clock; to a hundredth of a second."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)  # goes on while the machine is suspended
    return time.monotonic() - since_boot + ticks / os.sysconf("SC_CLK_TCK")


@functools.cache
def _boot() -> str:
    """Distinguishes the boots of a machine, and machines of the same name: each boot has its own clock."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read(8)
    return ""


def emit(event: str, **fields: Any) -> None:
    """Appends one record to the events file, if there is one. Only its owner may read it.

    If the file cannot be written, for example because the disk is full, that is logged once and not raised.

    Args:
        event: what happened, one word: ``fault``, ``end``, ``abort``, ``arrive``, ``enter``, ``done`` …
        fields: JSON values that belong to it (iteration, rank, slot, incarnation …).
    """
    path = os.environ.get(ENV)
    if not path:
        return
    record = {
        "event": event,
        "job": os.environ.get("TORCHELASTIC_RUN_ID", ""),
        **fields,
        "host": socket.gethostname(),
        "boot": _boot(),
        "pid": os.getpid(),
        "monotonic": time.monotonic(),
        "time": time.time(),
    }
    try:
        # A single write of any length to a file opened for appending does not mix with other processes'.
        with open(path, "ab", buffering=0, opener=owners_only) as file:
            file.write(f"{json.dumps(record)}\n".encode())
    except OSError as error:
        _report(path, str(error))


@functools.lru_cache(maxsize=16)  # once for each error, not for each event
def _report(path: str, trouble: str) -> None:
    log.warning("%s=%s: events are lost, and the job goes on: %s", ENV, path, trouble)


def load(path: str) -> list[Record]:
    """Reads an events file, in the order of writing. Damaged lines are skipped, with a warning.

    Args:
        path: the file.
    """
    found = list(read_lines(path))
    if damaged := [one for one in found if isinstance(one, ValueError)]:
        log.warning("%d damaged lines are left out, the first is %s", len(damaged), damaged[0])
    return [one for one in found if isinstance(one, dict)]


def read_lines(path: str) -> Iterator[Record | ValueError]:
    """Each line of an events file: its record, or why it has none. Fields that are None are left out.

    A crash or a full disk may have cut a line short, and other programs may have written to the file.

    Args:
        path: the file.
    """
    with open(path, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                found = {name: value for name, value in json.loads(line).items() if value is not None}
                found["event"].encode()
                yield found
            except (ValueError, AttributeError, KeyError, RecursionError):  # the last if nested too deeply
                yield ValueError(f"{path}:{number}: no JSON record of an event")
