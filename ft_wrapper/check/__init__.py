"""What may go wrong on this machine, found before a job runs.

``ftrun --check`` prints it; in a job rank 0 logs it, once.
"""

import contextlib
import ctypes
import importlib.metadata
import logging
import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from datetime import timedelta

import torch
from torch.distributed import constants

from ..settings import AllLimits
from ..store.bounded import in_background
from . import findings
from .findings import Finding

__all__ = ["Finding", "has_cuda", "log_once", "preflight"]

log = logging.getLogger(__name__)

_GROUP_TIMEOUT = timedelta(minutes=10)  # where torch was built without NCCL
_TIME_ERROR = 5  # of adjtimex
_TIMEX_SIZE = 512  # bytes, more than its struct has


def preflight(
    environ: Mapping[str, str],
    hard_timeout: float = AllLimits.hard_timeout,
    nodes: int | None = None,
    world_size: int | None = None,
) -> list[Finding]:
    """Looks at this machine. Does not initialize CUDA; a lookup of this host's name may take a while.

    Args:
        environ: the variables that the ranks will have.
        hard_timeout: the wrapper's, in seconds.
        nodes: how many the job has; what the environment says when None.
        world_size: the number of ranks; the same.
    """
    nodes = nodes or max(_number(environ, "GROUP_WORLD_SIZE"), _number(environ, "SLURM_JOB_NUM_NODES"))
    present = [name for _, name in socket.if_nameindex()]
    host = socket.gethostname()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = [
        findings.open_files(files, world_size or _number(environ, "WORLD_SIZE")),
        findings.shared_memory(_free_shared_memory()),
        findings.clock(time.time(), _is_clock_synchronized(), nodes),
        findings.gloo_interface(environ, present),
        findings.own_name(host, _addresses(host) if nodes > 1 else (), environ, nodes),
    ]
    if has_cuda():
        found += [
            findings.nccl_version(_installed_nccl()),
            findings.nvls(environ),
            findings.rethrown_errors(environ),
            findings.async_errors(environ),
            findings.heartbeat(environ, hard_timeout),
            findings.group_timeout(constants.default_pg_nccl_timeout or _GROUP_TIMEOUT, hard_timeout),
            findings.flight_recorder(environ),
            findings.nccl_interface(environ, present),
        ]
    return [finding for finding in found if finding is not None]


def has_cuda() -> bool:
    """Whether torch was built with CUDA and NCCL, and sees a GPU. Does not stand in the way of forks."""
    is_built = torch.version.cuda is not None and torch.distributed.is_nccl_available()
    return is_built and torch.cuda.device_count() > 0


def _installed_nccl() -> tuple[int, ...]:
    # torch's own answer is what it was compiled with; another package may have been installed since.
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
            return tuple(map(int, importlib.metadata.version(package).split(".")[:3]))
    return tuple(torch.cuda.nccl.version()[:3])  # type: ignore[no-untyped-call]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() and int(text) else 1


def _free_shared_memory() -> int | None:
    with contextlib.suppress(OSError):
        return shutil.disk_usage("/dev/shm").free
    return None


def _is_clock_synchronized() -> bool:
    """What the kernel thinks; True where it does not say."""
    return bool(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_SIZE)) != _TIME_ERROR)


def _addresses(host: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None)})
    return []


# In a job --------------------------------------------------------------------------------------------------

_was_asked = False


def log_once(hard_timeout: float, *, is_wanted: bool) -> threading.Thread | None:
    """Logs the findings at the first call in this process, in a thread: to look up a name may take seconds.

    Args:
        hard_timeout: the wrapper's, in seconds.
        is_wanted: whether this is the process of the job that logs them.
    """
    global _was_asked
    is_first, _was_asked = not _was_asked, True
    if not (is_first and is_wanted):
        return None
    environ = dict(os.environ)

    def log_all() -> None:
        for finding in preflight(environ, hard_timeout):
            log.warning("%s", finding)

    return in_background("the check of this machine", log_all)
