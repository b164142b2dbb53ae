"""What a node looks at before it takes a seat in a job: ``ftrun --node-checks``.

A false alarm keeps a good node out of a job that others pay for. So what can be found on a machine with which
nothing is wrong, as a port without a cable, is looked at only where the user names it.
"""

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from . import _is_clock_synchronized, findings, gpus
from .findings import Finding

#: The names of checks, each with the number that was given for it.
Wanted: TypeAlias = Mapping[str, float | None]

#: What ``auto`` stands for.
AUTO = ("gpus", "disk", "shm", "clock")
#: What finds something on good machines, too.
NAMED_ONLY = ("links", "xids", "ntp")
#: What a number may be given for: what it counts.
NUMBERS = {"gpus": "how many there have to be", "disk": "GiB that have to be free", "shm": "the same"}

_FULL = 16 << 20  # bytes: with less free, and less than a tenth, a file system is full
_GIB = 1 << 30
_COMMAND_TIMEOUT = 10.0
# By NVIDIA's catalog these come from the GPU, its memory, its links or its firmware, and it has to be reset
# or replaced. A program's own mistakes (13, 31, 43, 45 …) have others.
_XIDS = frozenset({48, 62, 64, 74, 79, 95, 110, 119, 120, 140, 143})
_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)")
_IFF_UP = 1


def parse(text: str) -> dict[str, float | None]:
    """Reads what ``--node-checks`` takes: names with commas between them, ``auto`` or ``none``.

    Args:
        text: such as ``auto,links,gpus=8``.

    Raises:
        ValueError: a name or number is wrong, or a package is missing; says which, and the way out.
    """
    wanted: dict[str, float | None] = {}
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        name, has_number, number = part.partition("=")
        if part == "auto":
            wanted = dict.fromkeys(AUTO) | wanted
        elif part == "none" and parts == ["none"]:
            return {}
        elif name not in (*AUTO, *NAMED_ONLY):
            raise ValueError(f"there is no {part!r}; use none, or of auto, {', '.join((*AUTO, *NAMED_ONLY))}")
        else:
            wanted[name] = _number(name, number) if has_number else wanted.get(name)
    if "gpus" in [part.partition("=")[0] for part in parts] and importlib.util.find_spec("pynvml") is None:
        raise ValueError("gpus needs the package nvidia-ml-py: pip install 'ft-wrapper[gpu]'")
    return wanted


def _number(name: str, text: str) -> float:
    if name not in NUMBERS:
        raise ValueError(f"{name}={text}: takes no number; leave out ={text}")
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf") or (name == "gpus" and number != int(number)):
        raise ValueError(f"{name}={text}: give a number, {NUMBERS[name]}")
    return number


def look(wanted: Wanted, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Looks at this machine. May take as long as its driver and its file systems do.

    Args:
        wanted: what to look at.
        environ: the variables that the ranks will have.
    """
    looks: dict[str, Callable[[float | None], Iterable[Finding | None]]] = {
        "gpus": lambda number: of_gpus(_nvml(), environ, None if number is None else int(number)),
        "disk": lambda number: (disk(path, number) for path in _folders()),
        "shm": lambda number: [shared_memory(_size("/dev/shm"), number)],
        "clock": lambda _: [findings.clock(time.time(), True, 1)],
        "links": lambda _: [*links(Path("/sys")), *ports(Path("/sys"))],
        "xids": lambda _: xids(kernel_log()),
        "ntp": lambda _: [findings.clock(time.time(), _is_clock_synchronized(), 2)],
    }
    return [found for name, number in wanted.items() for found in looks[name](number) if found is not None]


# GPUs ------------------------------------------------------------------------------------------------------


def _nvml() -> Any:
    with suppress(ImportError):
        return importlib.import_module("pynvml")
    return None


def of_gpus(nvml: Any, environ: Mapping[str, str], expected: int | None = None) -> list[Finding]:
    """GPUs that have to be reset or replaced, or that are not there.

    What a GPU or its driver does not tell is left out, and so is a machine without either.

    Args:
        nvml: the module ``pynvml``; None if it is not installed.
        environ: the variables: the job's GPUs are those in ``CUDA_VISIBLE_DEVICES``, or all.
        expected: how many there have to be.
    """
    found: list[Finding] = []
    usable, why_none = 0, "the package nvidia-ml-py is not installed"
    if nvml is not None:
        try:
            with gpus.opened(nvml):
                for name, handle in gpus.visible(nvml, environ):
                    usable += not _is_error(nvml, handle)
                    for problem in _problems(nvml, handle):
                        found.append(
                            Finding(name, problem, "reset it, or replace it; nvidia-smi -q tells more")
                        )
            why_none = ""
        except nvml.NVMLError as error:
            why_none = f"the driver does not answer: {error}"
    if expected is not None and usable < expected:
        why = why_none or "the others cannot be used here"
        found.append(Finding(f"{usable} of {expected} GPUs", why, "see nvidia-smi and the kernel's log"))
    return found


def _is_error(nvml: Any, handle: Any) -> bool:
    return isinstance(handle, nvml.NVMLError)


def _problems(nvml: Any, handle: Any) -> Iterator[str]:
    if handle is None:
        return
    if _is_error(nvml, handle):
        if handle.value in _lost(nvml):
            yield f"it cannot be used any more ({handle})"
        return
    asked = (
        gpus.recovery_action,
        gpus.failed_row_remapping,
        gpus.pending_row_remapping,
        gpus.uncorrected_errors,
    )
    for ask in asked:
        try:
            problem = ask(nvml, handle)
        except nvml.NVMLError as error:
            if error.value in _lost(nvml):
                yield f"it cannot be used any more ({error})"
                return
            continue
        if problem is not None:
            yield problem


def _lost(nvml: Any) -> list[Any]:
    names = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED")
    return [getattr(nvml, name) for name in names if hasattr(nvml, name)]


def xids(lines: Iterable[str]) -> Iterator[Finding]:
    """Errors of GPUs in the kernel's log, of those that a reset or another GPU takes; each kind once.

    Args:
        lines: of the log, since the machine was started.
    """
    seen: set[tuple[str, str]] = set()
    for line in lines:
        match = _XID.search(line)
        if match is None or int(match[2]) not in _XIDS or match.groups() in seen:
            continue
        seen.add((match[1], match[2]))
        why = "the GPU, its memory or its links have failed since the machine was started"
        yield Finding(f"Xid {match[2]} of the GPU at {match[1]}", why, "reset it, and restart the machine")


def kernel_log() -> list[str]:
    """The kernel's log; empty where this process may not read it."""
    with suppress(OSError):
        return _read_kmsg("/dev/kmsg")
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(["dmesg"], capture_output=True, timeout=_COMMAND_TIMEOUT, check=True)
        return said.stdout.decode(errors="replace").splitlines()
    return []


def _read_kmsg(path: str) -> list[str]:
    lines: list[str] = []
    log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(log, 8192)  # one record, or the rest of a plain file
            except BrokenPipeError:  # the next one was overwritten meanwhile
                continue
            except BlockingIOError:
                return lines
            if not record:
                return lines
            lines += record.decode(errors="replace").splitlines()
    finally:
        os.close(log)


# The network -----------------------------------------------------------------------------------------------


def links(root: Path) -> Iterator[Finding]:
    """Network cards that have received something, are switched on, and have no link now.

    Wireless ones and those on USB, which a machine may have for its own management, are left out.

    Args:
        root: where the kernel shows its devices: ``/sys``.
    """
    for card in _entries(root / "class" / "net"):
        if not (card / "device").exists() or (card / "wireless").exists() or (card / "phy80211").exists():
            continue
        if (card / "device" / "subsystem").resolve().name == "usb":
            continue
        is_on = int(_text(card / "flags") or "0", 16) & _IFF_UP
        was_used = _has_counted(card / "statistics" / "rx_bytes")
        if is_on and was_used and _text(card / "carrier") == "0":
            why = "it has had one, and what goes over it is lost"
            yield Finding(
                f"no link on {card.name}", why, f"see its cable and switch, or ip link set {card.name} down"
            )


def ports(root: Path) -> Iterator[Finding]:
    """InfiniBand ports that have received something, and are not active now.

    Args:
        root: where the kernel shows its devices: ``/sys``.
    """
    for card in _entries(root / "class" / "infiniband"):
        for port in _entries(card / "ports"):
            state = _text(port / "state")
            was_used = _has_counted(port / "counters" / "port_rcv_data")
            if _text(port / "link_layer") == "InfiniBand" and was_used and state and "ACTIVE" not in state:
                what = f"port {port.name} of {card.name} is {state.partition(': ')[2] or state}"
                yield Finding(what, "NCCL cannot use it", "see its cable, its switch and the subnet manager")


def _has_counted(path: Path) -> bool:
    """Whether a counter of the kernel's is above 0; some are no number but ``N/A (no PMA)``."""
    return _text(path).lstrip("0").isdecimal()


def _entries(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(folder.iterdir())
    return []


def _text(path: Path) -> str:
    """What a file of the kernel's says; empty if it does not."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""


# Files -----------------------------------------------------------------------------------------------------


def _folders() -> list[str]:
    """Where this job writes, each file system once."""
    found: dict[int, str] = {}
    for path in (tempfile.gettempdir(), os.getcwd()):
        with suppress(OSError):
            if os.access(path, os.W_OK):  # not an image that is mounted read-only, and is always full
                found.setdefault(os.stat(path).st_dev, path)
    return list(found.values())


def _size(path: str) -> tuple[int, int] | None:
    """Size of a file system in bytes, and how much of that is free; None if there is none."""
    with suppress(OSError):
        usage = shutil.disk_usage(path)
        return usage.total, usage.free
    return None


def disk(path: str, least: float | None = None) -> Finding | None:
    """A folder of a file system that is full.

    Args:
        path: the folder.
        least: GiB that have to be free; None: full is what has next to nothing left.
    """
    size = _size(path)
    if size is None or not _is_full(size, least):
        return None
    why = "logs, temporary files and checkpoints cannot be written"
    return Finding(f"{_shown(size[1])} free in {path}", why, "remove what is not needed")


def shared_memory(size: tuple[int, int] | None, least: float | None = None) -> Finding | None:
    """A ``/dev/shm`` that earlier processes have filled.

    Args:
        size: how large it is, and how much of it is free; None if there is none, which is a finding only
            where a size is asked for.
        least: GiB that have to be free; None: full is what has next to nothing left.
    """
    if size is None:
        return findings.shared_memory(None) if least else None
    if not _is_full(size, least):
        return None
    why = "data loaders and NCCL keep what they share there, and die by SIGBUS where it is full"
    return Finding(f"{_shown(size[1])} free in /dev/shm", why, "remove what ended processes have left there")


def _is_full(size: tuple[int, int], least: float | None) -> bool:
    total, free = size
    if least is not None:
        return free < least * _GIB
    return total > 0 and free < min(_FULL, total / 10)  # some file systems do not tell their size


def _shown(size: int) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size >> 20} MiB"
