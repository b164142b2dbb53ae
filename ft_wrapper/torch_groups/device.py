"""The device of a rank on a node that runs more ranks than it has devices: one for each active rank.

``ftrun`` makes a file without a name, and tells its ranks where it is. Byte n stands for device n: an active
rank holds a POSIX record lock on its device's. Such a lock belongs to the process, no child inherits it, and
the kernel drops it when the process ends, which frees a dead rank's device. Closing any descriptor of that
file drops all locks that the process has on it: only this module opens it, once.
"""

import contextlib
import fcntl
import os
import socket
import time

import torch

from ..exception import RestartAbort

DEVICES_ENV = "FT_WRAPPER_DEVICES"
"""``PATH:D``: the file of locks, and how many devices there are."""

# Others hear of a death before the kernel has freed the process's memory and dropped its locks. Who stepped
# in had to wait for a process that had no ballast 0 of 12 times, for one with 0.5 GB 3 of 12 (66 ms at most),
# for one with 2 GB 5 of 12 (349 ms).
_PAUSE = 0.01  # seconds between two looks: nothing tells of a lock that is dropped
_LOOKS = 1000

_locks: int | None = None  # the file, while this process holds its device
_index: int | None = None  # of the device that this process uses, from its first iteration on


def take_device(is_active: bool) -> None:
    """Before a rank enters: an active one gets a device to itself, or keeps its own; a spare shares one.

    Its index is then ``LOCAL_RANK``, and the device the current one if CUDA is in use. Does nothing where
    ``ftrun`` does not look after devices.

    Args:
        is_active: whether the rank is active in this iteration.

    Raises:
        RestartAbort: none is free. This process is not started again: there would be none for it, either.
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
    """Leaves the device to other ranks."""
    global _locks
    if _locks is not None:
        os.close(_locks)
    _locks = None


def own_device() -> torch.device:
    """The device that this rank holds, or the GPU that ``LOCAL_RANK`` names, if it is seen, or the CPU."""
    if _index is not None:
        return torch.device("cuda", _index)
    local_rank, count = os.environ.get("LOCAL_RANK", ""), torch.cuda.device_count()
    if count == 0:
        return torch.device("cpu")
    # A launcher that shows each rank its own GPU only makes all of them number 0.
    is_seen = local_rank.isdecimal() and int(local_rank) < count
    return torch.device("cuda", int(local_rank) if is_seen else torch.cuda.current_device())


def cuda_device() -> int | None:
    """Index of the GPU that this process uses; None where it has not used any so far."""
    return own_device().index if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def _await_device(locks: int, own: int, count: int) -> int:
    """Locks the process's own device if it is free, else the first that is; returns which."""
    for _ in range(_LOOKS):
        for index in (own, *range(count)):
            with contextlib.suppress(BlockingIOError):
                fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)
                return int(index)
        time.sleep(_PAUSE)
    raise RestartAbort(
        f"active ranks hold all {count} devices of {socket.gethostname()} (--devices-per-node): use spare "
        "nodes, or keep spares to their node by rank_assignment=Tree(...), as docs/launching.md shows"
    )
