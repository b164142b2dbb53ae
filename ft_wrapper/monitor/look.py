"""What Linux says of a process from outside: whether its main thread moves, what it waits in.

A look costs some 0.3 ms, so it is for processes under suspicion. `slices` costs a microsecond.

A thread that neither runs nor is about to run gets no slice of a processor: "asleep" needs no threshold.
"""

import contextlib
import os
import pathlib
import stat
import struct
from collections.abc import Collection, Iterator

from .evidence import Look

_FREEZERS = ("__refrigerator", "do_freezer_trap")
# By machine: calls that work on files; those that do if their descriptor is a file's; and those with a
# timeout, each with the number of that argument and what it is.
_CALLS = {
    "x86_64": (
        {3, 4, 74, 75, 77, 82, 87, 257, 262, 263, 264, 285},  # close stat fsync … fallocate
        {0, 1, 17, 18},  # read write pread pwrite
        {230: (2, "time"), 35: (0, "time"), 202: (3, "time"), 7: (2, "ms"), 271: (2, "time"), 23: (4, "time")}
        | {232: (3, "ms"), 281: (3, "ms"), 270: (4, "time")},
    ),
    "aarch64": (
        {35, 38, 46, 47, 56, 57, 79, 82, 83},
        {63, 64, 67, 68},
        {
            115: (2, "time"),
            101: (0, "time"),
            98: (3, "time"),
            73: (2, "time"),
            22: (3, "ms"),
            72: (4, "time"),
        },
    ),
}
_FILES, _OF_FILES, _ENDING = _CALLS.get(os.uname().machine, (set(), set(), {}))
_SOON = 120.0  # seconds: a wait that ends by then is not a hang, though it may be a loop of such waits
_GLOO = "gloo"  # its thread is named after it
_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def look_at(pid: int, now: float, own_thread: int = 0) -> Look:
    """Looks at a process.

    Args:
        pid: the process.
        now: monotonic seconds.
        own_thread: the thread of the process that answers questions, which is left out.

    Raises:
        OSError: the process has ended.
    """
    state, _ = _state(f"{pid}/task/{pid}")
    run, waited, count = _schedule(f"{pid}/task/{pid}")
    elsewhere = transport = 0
    are_others_ready = False
    for thread in _listed(f"{pid}/task"):
        if int(thread) not in (pid, own_thread):
            with contextlib.suppress(OSError):  # it has ended
                at, name = _state(f"{pid}/task/{thread}")
                if name.startswith(_GLOO):
                    transport += _schedule(f"{pid}/task/{thread}")[0]
                    continue
                elsewhere += _schedule(f"{pid}/task/{thread}")[0]
                are_others_ready |= at in "RD"
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            are_others_ready |= _state(f"{child}")[0] in "RD"
            for thread in _listed(f"{child}/task"):
                elsewhere += _schedule(f"{child}/task/{thread}")[0]
    elsewhere += sum(map(int, _fields(f"{pid}/stat")[13:15])) * _TICK  # of children that have ended
    if state == "D" and _read(f"{pid}/wchan") in _FREEZERS:
        state = "F"
    is_in_file, ends_soon = _call(pid, now) if state in "SD" else (False, False)
    copied = sum(int(line.partition(":")[2]) for line in _read(f"{pid}/io").splitlines()[:2])
    times = elsewhere, transport, copied, are_others_ready
    return Look(int(now * 1e9), state, run, waited, count, *times, is_in_file, ends_soon)


def slices(pid: int) -> tuple[int, int]:
    """How long the main thread has run, and how often; unchanged while it is asleep.

    Raises:
        OSError: the process has ended.
    """
    run, _, count = _schedule(f"{pid}/task/{pid}")
    return run, count


def is_held(pid: int) -> bool:
    """Whether a signal has stopped a process; False if it has ended."""
    try:
        return _state(str(pid))[0] == "T"
    except OSError:
        return False


def processor_times(pid: int) -> tuple[int, int]:
    """How long the main thread has run, and has waited for a processor; in nanoseconds.

    Raises:
        OSError: the process has ended.
    """
    run, waited, _ = _schedule(f"{pid}/task/{pid}")
    return run, waited


def throttled_for(pid: int) -> int:
    """How long the quotas of the process's control groups have throttled it; in nanoseconds."""
    found = 0
    for line in _read(f"{pid}/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "cpu" not in kinds.split(","):
            continue
        here = pathlib.Path(f"/sys/fs/cgroup/{kinds}{path}")
        for group in (here, *here.parents[:-3]):  # not /sys/fs and above
            with contextlib.suppress(OSError):
                said = dict(each.split() for each in (group / "cpu.stat").read_text().splitlines())
                found += int(said.get("throttled_time", 0)) + 1000 * int(said.get("throttled_usec", 0))
    return found


def is_lost(pid: int) -> bool:
    """Whether a process is stopped, or has ended."""
    try:
        return _state(str(pid))[0] in "TZX"
    except OSError:
        return True


def descendants(pid: int) -> Iterator[int]:
    """The living descendants of a process."""
    for thread in _listed(f"{pid}/task"):
        for child in map(int, _read(f"{pid}/task/{thread}/children").split()):
            yield child
            yield from descendants(child)


def _call(pid: int, now: float) -> tuple[bool, bool]:
    """Whether the main thread is in a call on files, and whether its call ends soon by a timeout."""
    try:
        number, *given = (int(one, 0) for one in _read(f"{pid}/syscall").split())
    except ValueError:  # it runs, or may not be looked at
        return False, False
    if number in _FILES:
        return True, False
    if number in _OF_FILES:
        with contextlib.suppress(OSError):
            return stat.S_ISREG(os.stat(f"/proc/{pid}/fd/{given[0]}").st_mode), False
    if number not in _ENDING:
        return False, False
    which, kind = _ENDING[number]
    if kind == "ms":
        return False, struct.unpack("i", struct.pack("I", given[which] & 0xFFFFFFFF))[0] in range(
            int(_SOON * 1000)
        )
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            seconds, _ = struct.unpack("qq", os.pread(memory.fileno(), 16, given[which]))
    except (OSError, OverflowError, struct.error):  # no timeout, or it has just returned
        return False, False
    return False, 0 <= seconds <= _SOON or abs(seconds - now) <= _SOON


def _state(path: str) -> tuple[str, str]:
    """The state of a process or thread, and its name."""
    head, _, tail = _read(f"{path}/stat", strict=True).rpartition(") ")
    return tail[:1], head.partition("(")[2]


def _fields(path: str) -> list[str]:
    return _read(path, strict=True).rpartition(") ")[2].split()


def _schedule(path: str) -> tuple[int, int, int]:
    run, waited, count = map(int, _read(f"{path}/schedstat", strict=True).split())
    return run, waited, count


def _listed(path: str) -> Collection[str]:
    try:
        return os.listdir(f"/proc/{path}")
    except OSError:
        return ()


def _read(path: str, *, strict: bool = False) -> str:
    try:
        with open(f"/proc/{path}", "rb", buffering=0) as file:
            return file.read(4096).decode(errors="replace").strip("\0\n")
    except OSError:
        if strict:
            raise
        return ""
