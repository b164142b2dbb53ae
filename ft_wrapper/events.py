"""What happened, as structured records: one JSON line each.

Written when the environment variable ``FT_WRAPPER_EVENTS`` names a file, which all ranks and monitors of
a host append to. Times of one host may be compared with each other: ``monotonic`` is one clock for all of
its processes, until the machine is started again (``boot``). Times of two hosts may not.
"""

import contextlib
import functools
import json
import logging
import os
import socket
import time
from typing import Any

from ._files import check_own_file, owners_only
from ._renamed import of_module

log = logging.getLogger(__name__)

ENV = "FT_WRAPPER_EVENTS"

# Fields that readers take for what they are, and without which a record, or one of an event, says nothing.
_TEXTS = ("event", "job", "host", "boot", "nonce", "kind", "message", "line", "after")
_TIMES = ("monotonic", "time", "started", "began", "since")
_NUMBERS = (*_TIMES, "pid", "child", "slot", "incarnation", "iteration", "call", "step", "committed")
_MOST = 6e10  # a time of day beyond that is in no year that a date can have
_NEEDED = {"event", "host", "pid", "monotonic"}
_OF_RANKS = {"register": {"slot", "incarnation"}, "decided": {"iteration"}, "fault": {"slot"}}
_NEEDED_BY = {**_OF_RANKS, "rank_started": {"child"}, "rank_ended": {"child"}, "restarted": {"line"}}


def are_enabled() -> bool:
    """Whether events are written."""
    return bool(os.environ.get(ENV))


def check() -> None:
    """Checks that events can be written, if they are written.

    Raises:
        OSError: they cannot; names the variable, and says what to do.
    """
    if are_enabled():
        check_own_file(ENV, os.environ[ENV])


def started() -> float:
    """When this process began, on the clock of ``monotonic``; to a hundredth of a second."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)  # goes on while the machine is suspended
    return time.monotonic() - since_boot + ticks / os.sysconf("SC_CLK_TCK")


@functools.cache
def _boot() -> str:
    """Tells apart the starts of a machine, and machines of one name: each start has a clock of its own."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read(8)
    return ""


def emit(event: str, **fields: Any) -> None:
    """Appends one record to the events file, if there is one; its owner alone may read it.

    If the file cannot be written, when the disk is full say, that is one line in the log and no error.

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
        # One write, whatever its length, to a file opened for appending is not torn between processes.
        with open(path, "ab", buffering=0, opener=owners_only) as file:
            file.write(f"{json.dumps(record)}\n".encode())
    except OSError as error:
        _report(path, str(error))


@functools.lru_cache(maxsize=16)  # once for each error, not for each event
def _report(path: str, trouble: str) -> None:
    log.warning("%s=%s: events are lost, and the job goes on: %s", ENV, path, trouble)


def load(path: str) -> list[dict[str, Any]]:
    """Reads an events file, in the order of writing.

    A crash or a full disk may have cut a line short. Such lines are left out, with a warning, and so are
    those that no process of ours has written. A field that is None is left out, too.

    Args:
        path: the file.

    Raises:
        ValueError: no line is the record of an event; the message names file and line.
    """
    records, damaged = [], []
    with open(path, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                records.append(_checked(json.loads(line)))
            except (ValueError, TypeError, AttributeError, RecursionError):  # the last for what is too deep
                damaged.append(number)
    if damaged and not records:
        raise ValueError(f"{path}:{damaged[0]} is not a JSON record of an event, and no other line is")
    if damaged:
        log.warning("%s: %d damaged lines are left out, the first is line %d", path, len(damaged), damaged[0])
    return records


def _checked(found: Any) -> dict[str, Any]:
    """A record whose readers need not look what its fields are; raises an error if it is none."""
    record = {name: value for name, value in found.items() if value is not None}
    "".join(record.get(name, "") for name in _TEXTS).encode()
    needed = _NEEDED | _NEEDED_BY.get(record.get("event", ""), set())
    if not (needed <= record.keys() and all(abs(record.get(name, 0)) < _MOST for name in _NUMBERS)):
        raise ValueError("a field is missing, or is no number")
    return record


__getattr__ = of_module(__name__, globals(), {"read": "load"})
