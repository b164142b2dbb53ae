"""Nothing may be left behind: checked after each test, and once more after the whole run.

Processes: children of this process, and all that carry the mark of this run in their environment, so that
those are found too whose parent has died. Threads: those that are not daemons, and all that run code of
ft_wrapper. Signal handlers, environment variables, shared memory. After the whole run: file descriptors.

What is on its way out gets `GRACE` seconds; what is left then fails the test, and is removed so that no other
test is blamed for it.

With pytest-xdist each worker is such a run, with a mark of its own, and checks its own tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import select
import signal
import sys
import threading
import time
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    # Imported where it is used: a run that tests nothing of it need not import torch.
    from ft_wrapper.testing import EtcdServer
    from ft_wrapper.testing.etcd_server import EtcdNotFound

MARK = "FT_WRAPPER_TEST_RUN"
# Longer than termination_grace_time, for which a monitor tries to reach a store that ended with its job.
GRACE = 60.0
ENDS = "FT_WRAPPER_TEST_ENDS"  # of support/ends.py, which a copy of this file elsewhere would not find
SHARED_MEMORY = Path("/dev/shm")
UNIT = Path(__file__).parent / "unit"
_EXEC_LASTS = 0.2  # seconds

# Helpers that Python keeps until its own end.
_PYTHONS_OWN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
# Variables that pytest, torch, Lightning and DeepSpeed change themselves; the last when it is imported, late.
_OTHERS_OWN = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK"}

# The same examples in every run, for as long as a busy machine takes.
settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")

_run_id = uuid.uuid4().hex
# Who first had a descriptor open after it: for the message at the end.
_first_seen: dict[tuple[int, str], str] = {}


def pytest_configure(config: pytest.Config) -> None:
    """Marks all processes that will be started; a run within a run keeps the outer mark as well."""
    os.environ[MARK] = f"{os.environ.get(MARK, '')}:{_run_id}"
    if _is_controller(config):
        # Workers share the processor: torch's threads would wait for each other.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Nightly runs have whole ends.
    os.environ.setdefault(ENDS, "quick" if "not nightly" in config.option.markexpr else "whole")
    # torch looks up the name of each peer's address; a lost answer would cost 5 s, longer than some timeouts.
    os.environ.setdefault("RES_OPTIONS", "use-vc timeout:1 attempts:1")
    # With it a print is several writes, between which other ranks' may come.
    os.environ.pop("PYTHONUNBUFFERED", None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's background job ignores Ctrl-C, and so would all that it starts.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # so does nohup with a hangup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Turns the garbage collector off while modules are imported, and spares it what they have made.

    That is no garbage. Tests that collect, in a process that knows thousands of tests, would take 90 s of
    processor time in a run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _is_controller(config: pytest.Config) -> bool:
    """Whether the tests run in other processes, the workers of pytest-xdist."""
    return bool(getattr(config.option, "tx", None))


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What there is now."""

    processes: dict[int, float]
    threads: set[threading.Thread]
    handlers: dict[int, object]
    environment: dict[str, str]
    shared_memory: set[str]

    @classmethod
    def take(cls) -> Snapshot:
        """Looks."""
        return cls(
            processes={process.pid: process.create_time() for process in _processes()},
            threads=set(threading.enumerate()),
            handlers=_handlers(),
            environment=_environment(),
            shared_memory=_shared_memory(),
        )


def leftovers(before: Snapshot) -> list[str]:
    """Says what was not there before, once it has had its time to go; and removes it."""
    deadline = time.monotonic() + GRACE
    return [
        *_left_processes(before, deadline),
        *_left_threads(before, deadline),
        *_left_handlers(before),
        *_left_environment(before),
        *_left_shared_memory(before, deadline),
    ]


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves something behind; those of ``unit`` start nothing that could stay."""
    if UNIT in request.path.parents:
        yield
        return
    before = Snapshot.take()
    yield
    left = leftovers(before)
    for descriptor in _descriptors().items():
        _first_seen.setdefault(descriptor, request.node.nodeid)
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def ends(request: pytest.FixtureRequest, nothing_left_behind: None) -> Iterator[None]:
    """Has the processes of a test that is marked `whole_ends` end as they do without us."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("whole_ends") is not None:
            patch.setenv(ENDS, "whole")
        yield


@pytest.fixture(autouse=True, scope="session")
def nothing_left_behind_at_the_end() -> Iterator[None]:
    """The same for the whole run, and for file descriptors, some of which only the collector closes."""
    _let_torch_open_what_it_keeps()
    before, descriptors = Snapshot.take(), _descriptors()
    yield
    left = leftovers(before)
    gc.collect()
    for number, target in sorted(_descriptors().items() - descriptors.items()):
        if _matters(target):
            test = _first_seen.get((number, target), "the fixtures' end")
            left.append(f"file descriptor {number} -> {target}, first seen after {test}")
    if left:
        pytest.fail("left behind by the whole run:\n  " + "\n  ".join(left), pytrace=False)


# Where modules with ftruns and other forked Pythons have them from.
_FTRUNS = ("FTRUN", "start_ftrun", "start_python", "run_python", "FtRun", "Cluster", "Training")


@pytest.fixture(scope="session")
def warm_process() -> Iterator[None]:
    """Has ftruns forked from a process that has imported torch."""
    from support.warm_ftrun import warm

    with warm():
        yield


@pytest.fixture(scope="module", autouse=True)
def forked_ftruns(request: pytest.FixtureRequest) -> None:
    """Starts that process before the first test of a module with ftruns: none is blamed for it."""
    if any(hasattr(request.module, name) for name in _FTRUNS):
        request.getfixturevalue("warm_process")


# Processes ---------------------------------------------------------------------------------------------


def _processes() -> list[psutil.Process]:
    found = {pid: process for pid in _descendants(os.getpid()) if (process := _process(pid)) is not None}
    mark = f"{MARK}=".encode()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in found or int(entry) == os.getpid():
            continue
        try:
            environment = _environment_of(Path("/proc", entry))
        except OSError:
            continue  # another user's, or gone
        if mark in environment and _run_id.encode() in environment:
            process = _process(int(entry))
            if process is not None:
                found[process.pid] = process
    return [process for process in found.values() if not _is_pythons_own(process)]


def _descendants(pid: int) -> list[int]:
    """The children of a process, and theirs: those whose environment does not tell."""
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # a thread that has ended
                for child in map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()):
                    found += [child, *_descendants(child)]
    return found


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _environment_of(process: Path) -> bytes:
    """The environment of a process, which in the middle of an exec has none for a moment."""
    deadline = time.monotonic() + _EXEC_LASTS
    while True:
        environment = Path(process, "environ").read_bytes()
        if environment or time.monotonic() > deadline:
            return environment
        os.readlink(process / "exe")  # an error for zombies and the kernel's threads: they have none for good
        time.sleep(0.001)  # nothing tells when an exec is through


def _is_pythons_own(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(name in command for name in _PYTHONS_OWN)


def _left_processes(before: Snapshot, deadline: float) -> list[str]:
    left = []
    for process in _processes():
        try:
            if before.processes.get(process.pid) == process.create_time():
                continue
            _wait_for_end(process.pid, deadline)
            if process.is_running() and not _is_anothers_zombie(process):
                left.append(_describe(process))
                process.kill()
        except psutil.NoSuchProcess:
            continue
    return left


def _wait_for_end(pid: int, deadline: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(pidfd)


def _is_anothers_zombie(process: psutil.Process) -> bool:
    """It has ended, and is not ours to wait for."""
    return bool(process.status() == psutil.STATUS_ZOMBIE) and process.ppid() != os.getpid()


def _describe(process: psutil.Process) -> str:
    if process.status() == psutil.STATUS_ZOMBIE:
        return f"process {process.pid}, which has ended and was not waited for"
    command = " ".join(process.cmdline())[:200]
    return f"process {process.pid}, child of {process.ppid()}, {process.status()}: {command}"


# Threads -----------------------------------------------------------------------------------------------


def _left_threads(before: Snapshot, deadline: float) -> list[str]:
    left = []
    for thread in set(threading.enumerate()) - before.threads:
        if isinstance(thread, threading._DummyThread) or not _counts(thread):
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            left.append(f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''}{_place(thread)}")
    return left


def _counts(thread: threading.Thread) -> bool:
    if not thread.daemon or thread.name.startswith("ft_wrapper"):
        return True
    if type(thread).__module__.startswith("ft_wrapper"):
        return True
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("ft_wrapper"):
            return True
        frame = frame.f_back
    return False


def _place(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return f" in {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


# Signal handlers, environment, shared memory -------------------------------------------------------------


def _handlers() -> dict[int, object]:
    # SIGALRM is pytest-timeout's: another handler for each test. An agent goes on ignoring forwarded signals.
    from ft_wrapper.agent.signals import FORWARDED

    others = signal.valid_signals() - {signal.SIGALRM, *FORWARDED.values()}
    return {int(signum): signal.getsignal(signum) for signum in others}


def _left_handlers(before: Snapshot) -> list[str]:
    left = []
    for signum, handler in _handlers().items():
        was = before.handlers[signum]
        if handler != was:
            left.append(f"handler of signal {signum}: {handler}, was {was}")
            with contextlib.suppress(OSError, TypeError, ValueError):
                signal.signal(signum, was)  # type: ignore[arg-type]
    return left


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OTHERS_OWN}


def _left_environment(before: Snapshot) -> list[str]:
    after = _environment()
    left = []
    for name in sorted(before.environment.keys() | after.keys()):
        was, value = before.environment.get(name), after.get(name)
        if was != value:
            # Names only: what a machine has in its environment does not belong in a log.
            how = "was added" if was is None else "was removed" if value is None else "has another value"
            left.append(f"environment variable {name} {how}")
            if was is None:
                del os.environ[name]
            else:
                os.environ[name] = was
    return left


def _shared_memory() -> set[str]:
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def _left_shared_memory(before: Snapshot, deadline: float) -> list[str]:
    # Other programs on this machine make files there, too, and use them: those of a test that another worker
    # runs go with that test.
    left = [name for name in sorted(_shared_memory() - before.shared_memory) if not _used_elsewhere(name)]
    while left and time.monotonic() < deadline:
        time.sleep(0.05)  # nothing tells when a file of another process goes
        left = [name for name in left if not _used_elsewhere(name)]
    return [f"shared memory {SHARED_MEMORY / name}" for name in left]


def _used_elsewhere(name: str) -> bool:
    # By inode: a semaphore gets its name after it was mapped.
    try:
        inode = (SHARED_MEMORY / name).stat().st_ino
    except OSError:
        return True
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        proc = Path("/proc", str(process.pid))
        with contextlib.suppress(OSError):
            mapped = (line.split(maxsplit=5) for line in (proc / "maps").read_text().splitlines())
            if any(
                len(f) == 6 and f[4] == str(inode) and f[5].startswith(str(SHARED_MEMORY)) for f in mapped
            ):
                return True
            if any(
                os.readlink(fd).startswith(str(SHARED_MEMORY)) and fd.stat().st_ino == inode
                for fd in (proc / "fd").iterdir()
            ):
                return True
    return not (SHARED_MEMORY / name).exists()  # gone in the meantime


# File descriptors ----------------------------------------------------------------------------------------


def _descriptors() -> dict[int, str]:
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
    return found


def _let_torch_open_what_it_keeps() -> None:
    """With the first TCPStore of a process, libuv makes itself a pipe and never closes it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _matters(target: str) -> bool:
    """Regular files and devices that some library keeps open are its own business."""
    return target.startswith(("socket:", "pipe:", "anon_inode:", "/memfd:", "/dev/shm/")) or target.endswith(
        " (deleted)"
    )


# etcd ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def etcd_if_any() -> Iterator[EtcdServer | EtcdNotFound]:
    """An etcd of one member, for all tests that leave it as it is; or why there is none.

    Anyone who asks for `etcd` by ``getfixturevalue`` names this one, too: or it would seem to be left behind.
    """
    from ft_wrapper.testing import EtcdServer
    from ft_wrapper.testing.etcd_server import EtcdNotFound

    try:
        server = EtcdServer()
    except EtcdNotFound as error:
        yield error
        return
    with server:
        yield server


@pytest.fixture
def etcd(etcd_if_any: EtcdServer | EtcdNotFound) -> EtcdServer:
    """The same. Without an etcd the test fails: `make install` installs one."""
    from ft_wrapper.testing.etcd_server import EtcdNotFound

    if isinstance(etcd_if_any, EtcdNotFound):
        pytest.fail(str(etcd_if_any), pytrace=False)
    return etcd_if_any


@pytest.fixture
def prefix() -> str:
    """A prefix in etcd that no one else has."""
    return f"test/{uuid.uuid4().hex}"
