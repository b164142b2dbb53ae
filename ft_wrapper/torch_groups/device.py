"""The device of a rank on a node with more ranks than devices: each active rank has its own.

``ftrun`` makes a file without a name, and passes its path to its ranks. An active rank that uses device n
holds a POSIX record lock on byte n. Such a lock belongs to the process, and no child inherits it. The kernel
drops it when the process ends, so a dead rank's device is free. Closing any descriptor of the file drops all
locks of the process on it. So only this module opens the file, once.
"""

import contextlib
import fcntl
import os
import socket
import time

import torch

from ..exception import RestartAbort

DEVICES_ENV = "FT_WRAPPER_DEVICES"
"""``PATH:D``: the path of the lock file, and the number of devices."""

# Other ranks learn of a death before the kernel has freed the process's memory and dropped its locks. The
# replacing rank had to wait 0 of 12 times after a process without ballast, 3 of 12 times (66 ms at most)
# after one with 0.5 GB, 5 of 12 times (349 ms) after one with 2 GB.
_PAUSE = 0.01  # seconds between two attempts: nothing signals that a lock was dropped
_LOOKS = 1000

_locks: int | None = None  # descriptor of the lock file, while this process holds a device
_index: int | None = None  # index of the device that this process uses; None before its first iteration


def take_device(is_active: bool) -> None:
    """Before a rank enters: gives an active rank its own device, or keeps it. A spare shares a device.

    The device's index becomes ``LOCAL_RANK``. If CUDA is in use, the device becomes the current one. Without
    ``ftrun --devices-per-node`` it does nothing.

    Args:
        is_active: whether the rank is active in this iteration.

    Raises:
        RestartAbort: no device is free. The process is not restarted, since it would find none either.
    """
    global _locks, _index
    path, _, count = os.environ.get(DEVICES_ENV, "").rpartition(":")
    if not path:
        return
    if _index is None:
        _index = int(os.environ["LOCAL_RANK"])
    if not is_active:
        release_device()
    elif _locks is None:
        _locks = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        _index = _await_device(_locks, _index, int(count))
    os.environ["LOCAL_RANK"] = str(_index)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_device(_index)


def release_device() -> None:
    """Releases the device to other ranks."""
    global _locks
    if _locks is not None:
        os.close(_locks)
    _locks = None


def own_device() -> torch.device:
    """The device that this rank holds; else the GPU that ``LOCAL_RANK`` names, if visible; else the CPU."""
    if _index is not None:
        return torch.device("cuda", _index)
    local_rank, count = os.environ.get("LOCAL_RANK", ""), torch.cuda.device_count()
    if count == 0:
        return torch.device("cpu")
    # If a launcher shows each rank only its own GPU, that is number 0 on every rank.
    is_seen = local_rank.isdecimal() and int(local_rank) < count
    return torch.device("cuda", int(local_rank) if is_seen else torch.cuda.current_device())


def cuda_device() -> int | None:
    """Index of the GPU that this process uses; None if it has used none so far."""
    return own_device().index if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def _await_device(locks: int, own: int, count: int) -> int:
    """Locks the process's own device if it is free, else the first free one; returns its index."""
    for _ in range(_LOOKS):
        for index in (own, *range(count)):
            with contextlib.suppress(BlockingIOError):
                fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)
                return int(index)
        time.sleep(_PAUSE)
    raise RestartAbort(
        f"active ranks hold all {count} devices of {socket.gethostname()} (--devices-per-node): use spare "
        "nodes, or keep spares on their node with rank_assignment=Tree(...), as docs/launching.md shows"
    )
