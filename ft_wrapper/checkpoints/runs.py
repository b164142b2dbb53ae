"""Which job uses a folder of checkpoints: runs, and the locks by which a second job is found.

Each job that uses a folder has a run there, with the next number, and a file in it on which all its active
ranks hold a shared lock. The kernel takes a lock away when its process ends, however it ends. So a process
that gets that lock for itself alone knows that the job has no process left.

Locks are those of ``lockf``: unlike those of ``flock``, a forked worker of a data loader does not hold them,
too, and they mostly work on NFS. They go with the first descriptor of their file that the process closes: so
what a job says of itself is in another file.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from .folders import JOB_FILE, LOCK_FILE, run_numbers, sync, write_through

log = logging.getLogger(__name__)

_HELD = (errno.EACCES, errno.EAGAIN)
_PAUSE = 0.1  # seconds; neither a lock nor a file that a server shows late has an event with a timeout
_LAUNCH = "TORCHELASTIC_RUN_ID"
_NO_LAUNCH = ("", "none")  # torchrun's default


class InUse(Exception):
    """Another job uses the folder. The message says which one."""


class Run:
    """A job's part of the folder, with this process's lock on it.

    Args:
        root: the folder.
        number: of the run.
        fd: the file with the lock, open.

    Attributes:
        is_locked: whether there are locks here at all.

    Raises:
        OSError: another process holds the lock for itself.
    """

    def __init__(self, root: Path, number: int, fd: int) -> None:
        self.root = root
        self.number = number
        self._fd: int | None = fd
        try:
            self.is_locked = _lock(fd, root)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets go of the lock. May be called twice."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def withdraw(self) -> None:
        """Removes the run, if nothing was written in it yet: the folder is another job's."""
        path = self.root / f"run-{self.number}"
        with contextlib.suppress(OSError):
            if set(os.listdir(path)) <= {JOB_FILE, LOCK_FILE}:
                shutil.rmtree(path)
        self.close()


def find(root: Path, job: str) -> Run | None:
    """The job's run, which another process of it has begun; None if there is none."""
    # The highest: one that was paused before it could say which run it had begun may yet go on.
    for number in reversed(run_numbers(root)):
        if _about(root, number).get("job") == job:
            return open_run(root, number, job)
    return None


def open_run(root: Path, number: int, job: str) -> Run | None:
    """A run of which rank 0 has told; None if it is not there."""
    if _about(root, number).get("job") != job:
        return None
    try:
        fd = os.open(_lock_file(root, number), os.O_RDWR)
    except FileNotFoundError:
        return None
    return Run(root, number, fd)


def begin(root: Path, job: str) -> Run:
    """Begins a run, with the next number. It is locked before others can see it.

    Raises:
        OSError: the folder cannot be written to.
    """
    whole = root / f".run-{secrets.token_hex(6)}"
    whole.mkdir()
    about = {
        "job": job,
        "launch": os.environ.get(_LAUNCH, ""),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "began": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    run = None
    try:
        write_through(whole / JOB_FILE, json.dumps(about) + "\n")
        run = Run(root, 0, os.open(whole / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666))
        while True:
            run.number = max(run_numbers(root), default=0) + 1
            try:
                os.rename(whole, root / f"run-{run.number}")
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
                continue  # another job was faster
            sync(root)
            return run
    except BaseException:
        shutil.rmtree(whole, ignore_errors=True)
        if run is not None:
            run.close()
        raise


def check_alone(run: Run, job: str, seconds: float) -> None:
    """Makes sure that no other job uses the folder.

    Processes of an earlier start of the same job may still be about to end: they are given some time.

    Args:
        run: the job's; of two jobs that begin at once the one with the higher number finds the other.
        job: its name.
        seconds: how long to wait for the end of processes that the same launch has started.

    Raises:
        InUse: another one does.
    """
    if not run.is_locked:
        return
    for number in run_numbers(run.root):
        about = _about(run.root, number)
        if number >= run.number or about.get("job") == job:
            continue
        is_same = about.get("launch") == os.environ.get(_LAUNCH, "") not in _NO_LAUNCH
        for _ in tries(seconds if is_same else min(seconds, LASTS)):
            if not _is_held(_lock_file(run.root, number)):
                break
        else:
            raise InUse(
                f"{run.root} is in use by another job: run {number}, begun {about.get('began', '?')} by "
                f"process {about.get('pid', '?')} on {about.get('host', '?')}; give each job a folder of its "
                "own, or end that job"
            )


#: Seconds for which processes that were killed may still be there.
LASTS = 5.0


def tries(seconds: float) -> Iterator[None]:
    """Comes at once, and again and again until the time is over."""
    deadline = time.monotonic() + seconds
    yield
    while time.monotonic() < deadline:
        time.sleep(_PAUSE)
        yield


def _lock_file(root: Path, number: int) -> Path:
    return root / f"run-{number}" / LOCK_FILE


def _about(root: Path, number: int) -> dict[str, object]:
    """What the job's file says; nothing if it cannot be read."""
    try:
        about = json.loads((root / f"run-{number}" / JOB_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def _lock(fd: int, root: Path) -> bool:
    """Takes a shared lock; False where there are no locks."""
    error = None
    for _ in tries(LASTS):  # another job's look at it takes no time
        try:
            fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        except OSError as caught:
            error = caught
            if caught.errno not in _HELD:
                break
    assert error is not None
    if error.errno in _HELD:
        raise error
    log.warning("%s has no locks (%s): a second job in it would not be noticed", root, error.strerror)
    return False


def _is_held(path: Path) -> bool:
    """Whether a process holds a lock on a job's file."""
    try:
        with open(path, "r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.filename is None and error.errno in _HELD:
            return True
        log.warning("cannot tell whether another job uses %s: %s", path.parent, error.strerror)
    return False
