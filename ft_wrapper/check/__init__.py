"""Finds what may go wrong on this machine, before a job runs.

``ftrun --check`` prints the findings; in a job rank 0 logs them, once.
"""

import contextlib
import ctypes
import dataclasses
import importlib.metadata
import ipaddress
import logging
import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta

import torch
from torch.distributed import constants

from ..settings import AllLimits
from ..store.bounded import in_background

log = logging.getLogger(__name__)

_GROUP_TIMEOUT = timedelta(minutes=10)  # where torch was built without NCCL
_TIME_ERROR = 5  # of adjtimex
_TIMEX_SIZE = 512  # bytes, more than its struct has
# torch's names for one variable, the one that takes precedence first.
_ASYNC_ERRORS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
_RETHROW = ("TORCH_NCCL_RETHROW_CUDA_ERRORS",)
_DUMP = ("TORCH_NCCL_DUMP_ON_TIMEOUT",), ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",)
#: Set to 0 by the wrapper during a call unless the user set them: torch's watchdog ignores NCCL's errors.
WATCHDOG = (_ASYNC_ERRORS, _RETHROW, *_DUMP)
_FLIGHT_RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FALSE = ("0", "f", "false", "n", "no")  # as torch reads them

_LEAST_NCCL = (2, 26, 2)
_HANGS = ((2, 28, 3), (2, 28, 8))  # the first and the last version
_HEARTBEAT_TIMEOUT = 480.0  # torch's default, in seconds
_SLOW_LOOKUP = 0.05  # seconds; a name service nearby answers within a few milliseconds
_LEAST_SHARED_MEMORY = 64 << 20  # bytes; a container's default
_FILES = 128  # of a single rank; below, for each further rank: a connection in each of a few groups
_FILES_OF_A_PEER = 4
_RELEASED = 1_767_225_600.0  # 2026, in seconds: no correct clock shows an earlier time


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that will, or may, go wrong.

    Args:
        what: the finding.
        why: why it matters.
        remedy: what to set.
    """

    what: str
    why: str
    remedy: str

    def __str__(self) -> str:
        """One line."""
        return f"{self.what}: {self.why}; {self.remedy}"


Findings = Iterator[Finding]


# NCCL ----------------------------------------------------------------------------------------------------


def nccl_version(version: Sequence[int]) -> Findings:
    """A version of NCCL whose abort hangs."""
    text, found = ".".join(map(str, version)), tuple(version)
    if found < _LEAST_NCCL:
        yield Finding(f"NCCL {text}", "aborting a communicator may hang", "use 2.26.2 or newer")
    if _HANGS[0] <= found <= _HANGS[1]:
        why = "the versions from 2.28.3 to 2.28.8 are known to hang"
        yield Finding(f"NCCL {text}", why, "use 2.28.9 or newer, or 2.27")


def nvls(environ: Mapping[str, str]) -> Findings:
    """NVLink SHARP, whose communicators cannot be aborted reliably."""
    name = "NCCL_NVLS_ENABLE"
    if environ.get(name) != "0":
        why = "an abort may fail or hang where NCCL uses NVLink SHARP"
        yield Finding(_shown(environ, name), why, f"set {name}=0")


def rethrown_errors(environ: Mapping[str, str]) -> Findings:
    """A watchdog that ends the process for a CUDA error. Unset, the wrapper sets it to 0."""
    (name,) = _RETHROW
    if environ.get(name, "0").lower() not in _FALSE:
        why = "torch's watchdog ends the process on a CUDA error, instead of a restart"
        yield Finding(_shown(environ, name), why, f"unset it, or set {name}=0")


def async_errors(environ: Mapping[str, str]) -> Findings:
    """A watchdog that ends the process, or aborts while a restart does. Unset, the wrapper sets it to 0."""
    name = _first(environ, _ASYNC_ERRORS)
    if environ.get(name, "0") != "0":
        what = "aborts communicators during the restart" if environ[name] == "2" else "ends the process"
        why = f"on an NCCL error or timeout torch's watchdog {what}"
        yield Finding(_shown(environ, name), why, f"unset it, or set {name}=0")


def heartbeat(environ: Mapping[str, str], hard_timeout: float) -> Findings:
    """A torch monitor that ends a hung process before ours does."""
    name, switch = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_ENABLE_MONITORING"
    try:
        seconds = float(environ.get(name, _HEARTBEAT_TIMEOUT))
    except ValueError:  # torch refuses it
        return
    if seconds <= hard_timeout and environ.get(switch, "1").lower() not in _FALSE:
        why = f"torch ends a process before hard_timeout={hard_timeout:g} s, which a restart may still free"
        what = _shown(environ, name, f"{seconds:g}")
        yield Finding(what, why, f"set it above {hard_timeout:g}, or {switch}=0")


def group_timeout(timeout: timedelta, hard_timeout: float) -> Findings:
    """Collectives that time out while the function may still hang."""
    seconds = timeout.total_seconds()
    if seconds <= hard_timeout:
        what = f"process groups time out after {seconds:g} s by default"
        why = f"torch's watchdog acts on a hang before hard_timeout={hard_timeout:g} s"
        yield Finding(what, why, f"pass init_process_group a timeout above {hard_timeout:g} s")


def flight_recorder(environ: Mapping[str, str]) -> Findings:
    """No record of the collectives."""
    name = _first(environ, _FLIGHT_RECORDER)
    if environ.get(name) == "0":  # torch's default is 2000
        why = "Flight Recorder is off, and a hang leaves no trace of the collectives"
        yield Finding(_shown(environ, name), why, "set TORCH_FR_BUFFER_SIZE=2000")


# The machine -----------------------------------------------------------------------------------------------


def open_files(limit: int, world_size: int) -> Findings:
    """Too few open files for a rank."""
    needed = _FILES + _FILES_OF_A_PEER * world_size
    if limit < needed:
        why = f"a rank of {world_size} may need {needed}: a connection to each peer in each group is one"
        yield Finding(f"limit of {limit} open files", why, f"ulimit -n {needed}")


def shared_memory(free: int | None) -> Findings:
    """A /dev/shm that is nearly full, has a container's default size, or does not exist."""
    if free is None or free <= _LEAST_SHARED_MEMORY:
        what = "no /dev/shm" if free is None else f"{free >> 20} MiB free in /dev/shm"
        why = "data loaders and NCCL share memory there, and die of SIGBUS if it is full"
        yield Finding(what, why, "empty it, or give the container more: --shm-size=8g, or a memory volume")


def clock(now: float, is_synchronized: bool, nodes: int) -> Findings:
    """A clock that is wrong, or drifts away from the other nodes'."""
    remedy = "run chrony or systemd-timesyncd"
    if now < _RELEASED:
        what = f"the clock says {time.strftime('%Y-%m-%d', time.gmtime(now))}"
        yield Finding(what, "certificates are refused, and log lines misplaced", remedy)
    elif not is_synchronized and nodes > 1:
        why = "log lines of several nodes have no common order"
        yield Finding("the clock is not synchronized", why, remedy)


def gloo_interface(environ: Mapping[str, str], present: Collection[str]) -> Findings:
    """An interface for gloo that does not exist."""
    name = "GLOO_SOCKET_IFNAME"
    missing = [one for one in environ.get(name, "").split(",") if one and one not in present]
    if missing:
        yield _no_interface(environ, name, "gloo", ", ".join(missing), present)


def nccl_interface(environ: Mapping[str, str], present: Collection[str]) -> Findings:
    """An interface for NCCL that does not exist. It takes prefixes; ``=``: whole names, ``^``: all others."""
    name = "NCCL_SOCKET_IFNAME"
    text = environ.get(name, "")
    excludes, text = text.startswith("^"), text.removeprefix("^")
    is_exact, text = text.startswith("="), text.removeprefix("=")
    named = tuple(one for one in text.split(",") if one)
    taken = [one for one in present if (one in named if is_exact else one.startswith(named)) is not excludes]
    if named and not taken:
        yield _no_interface(environ, name, "NCCL", environ[name], present)


def own_name(name: str, addresses: Collection[str], environ: Mapping[str, str], nodes: int) -> Findings:
    """A host name by which gloo gives other nodes an address that they cannot reach.

    Args:
        name: this host's name.
        addresses: the addresses of that name; none if it cannot be looked up.
        environ: the variables.
        nodes: number of the job's nodes; a single node may use the loopback.
    """
    is_asked = nodes > 1 and not environ.get("GLOO_SOCKET_IFNAME")
    if is_asked and all(ipaddress.ip_address(one).is_loopback for one in addresses):
        what = "leads to the loopback only" if addresses else "cannot be looked up"
        why = "gloo gives other nodes an address at which they do not reach this one"
        remedy = f"set GLOO_SOCKET_IFNAME, or give {name} its address in /etc/hosts or DNS"
        yield Finding(f"this host's name {name} {what}", why, remedy)


def reverse_lookup(host: str, seconds: float) -> Findings:
    """A store's address whose name takes long to look up.

    Args:
        host: the store's host.
        seconds: how long the look-up took.
    """
    if seconds >= _SLOW_LOOKUP:
        why = "torch asks for a peer's name at each new connection to a store, so restarts may take as long"
        remedy = "put all nodes' addresses into /etc/hosts, or run a cache of names; see docs: launching"
        yield Finding(f"the reverse look-up of {host} took {seconds:.2g} s", why, remedy)


def _first(environ: Mapping[str, str], names: Sequence[str]) -> str:
    """The name of a variable that takes effect, of torch's names for it."""
    return next((name for name in names if name in environ), names[0])


def _shown(environ: Mapping[str, str], name: str, default: str = "") -> str:
    if name in environ:
        return f"{name}={environ[name]}"
    return f"{name} is not set" + (f" ({default} by default)" if default else "")


def _no_interface(
    environ: Mapping[str, str], name: str, who: str, missing: str, present: Collection[str]
) -> Finding:
    why = f"there is no interface {missing} here, and {who} cannot connect"
    return Finding(_shown(environ, name), why, f"unset it, or name one of {', '.join(sorted(present))}")


# This machine ----------------------------------------------------------------------------------------------


def preflight(
    environ: Mapping[str, str],
    hard_timeout: float = AllLimits().hard,
    nodes: int | None = None,
    world_size: int | None = None,
) -> list[Finding]:
    """Checks this machine. Does not initialize CUDA; looking up this host's name may take a while.

    Args:
        environ: the variables that the ranks will have.
        hard_timeout: the wrapper's, in seconds.
        nodes: number of the job's nodes; from the environment when None.
        world_size: number of ranks; from the environment when None.
    """
    nodes = nodes or max(_number(environ, "GROUP_WORLD_SIZE"), _number(environ, "SLURM_JOB_NUM_NODES"))
    present = [name for _, name in socket.if_nameindex()]
    host = socket.gethostname()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = [
        *open_files(files, world_size or _number(environ, "WORLD_SIZE")),
        *shared_memory(_free_shared_memory()),
        *clock(time.time(), _is_clock_synchronized(), nodes),
        *gloo_interface(environ, present),
        *own_name(host, _addresses(host) if nodes > 1 else (), environ, nodes),
    ]
    if has_cuda():
        found += [
            *nccl_version(_installed_nccl()),
            *nvls(environ),
            *rethrown_errors(environ),
            *async_errors(environ),
            *heartbeat(environ, hard_timeout),
            *group_timeout(constants.default_pg_nccl_timeout or _GROUP_TIMEOUT, hard_timeout),
            *flight_recorder(environ),
            *nccl_interface(environ, present),
        ]
    return found


def has_cuda() -> bool:
    """Whether torch was built with CUDA and NCCL, and sees a GPU. Does not prevent later forks."""
    is_built = torch.version.cuda is not None and torch.distributed.is_nccl_available()
    return is_built and torch.cuda.device_count() > 0


def _installed_nccl() -> tuple[int, ...]:
    # torch reports the version it was compiled with; another package may have been installed since.
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
    """The kernel's view; True if it gives none."""
    return bool(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_SIZE)) != _TIME_ERROR)


def _addresses(host: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None)})
    return []


# In a job --------------------------------------------------------------------------------------------------

_was_asked = False


def log_once(hard_timeout: float, *, is_wanted: bool) -> threading.Thread | None:
    """Logs the findings at the first call in this process, in a thread: looking up a name may take seconds.

    Args:
        hard_timeout: the wrapper's, in seconds.
        is_wanted: whether this is the process that logs them for the job.
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
