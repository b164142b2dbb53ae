"""Files and streams of this process."""

import contextlib
import ctypes
import errno
import logging
import os
import resource
import select
import stat

log = logging.getLogger(__name__)


def owners_only(path: str, flags: int) -> int:
    """Opens a file of this user for writing. Only its owner may read a new one. For ``open(…, opener=…)``.

    Another user who knows the path may have put a link, a file or a pipe there. Those are refused. A device
    is accepted: only root can make one.

    Args:
        path: the file.
        flags: as for ``os.open``.

    Raises:
        OSError: the file belongs to another user, or cannot be opened.
    """
    # Without O_NONBLOCK, a pipe that has no reader would block here forever.
    fd = os.open(path, flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    found = os.fstat(fd)
    if not (stat.S_ISCHR(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid())):
        os.close(fd)
        raise PermissionError(errno.EPERM, "Not a regular file of this user", path)
    if flags & os.O_TRUNC and found.st_size:
        os.ftruncate(fd, 0)
    return fd


def check_own_file(name: str, path: str) -> None:
    """Checks that `owners_only` can open a file; creates it if it does not exist.

    Args:
        name: of the setting or variable that names the file, for the error.
        path: the file.

    Raises:
        OSError: it cannot. The message says why, and what to do.
    """
    try:
        os.close(owners_only(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC))
    except OSError as error:
        way_out = "name a regular file of this user, not a link, or a new one in an existing folder"
        raise OSError(f"{name}={path}: {error.strerror}; {way_out}") from error


def check_open_files(more: int, who: str) -> None:
    """Checks that this process may open as many files as it is going to.

    Args:
        more: how many, in addition to those already open.
        who: names the process in the error.

    Raises:
        OSError: it may not (EMFILE). The message says how many it needs, and what to do.
    """
    needed = len(os.listdir("/proc/self/fd")) + more
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        limit = "limit (ulimit -n)" if soft < hard else "hard limit (ulimit -Hn)"
        words = f"{os.strerror(errno.EMFILE)}: {who} needs {needed} and may have {soft}; raise the {limit}"
        raise OSError(errno.EMFILE, words)


def quiet_torch() -> None:
    """Makes torch's C++ code log only errors, in this process and its forks, unless the user has set a level.

    Otherwise a TCPStore's server logs a stack trace for each connection that sends garbage. That takes 8 ms,
    in which it answers no client. ``TORCH_CPP_LOG_LEVEL`` itself is read once, when torch is imported, and
    child processes inherit it. A build of torch without this C++ variable is left alone.
    """
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        with contextlib.suppress(OSError, ValueError):
            ctypes.c_int.in_dll(ctypes.CDLL("libc10.so"), "FLAGS_caffe2_log_level").value = 2  # GLOG_ERROR


def replace_broken_streams() -> None:
    """Sends stdout and stderr to /dev/null if nothing reads their pipe or terminal.

    Otherwise each ``print`` raises, and the function is restarted repeatedly.
    """
    for name, fd in (("stdout", 1), ("stderr", 2)):
        poll = select.poll()
        poll.register(fd, 0)
        events = poll.poll(0)
        if events and events[0][1] & (select.POLLERR | select.POLLHUP):
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), fd, inheritable=True)
            log.warning("%s of process %d has no reader (EPIPE): its output is lost", name, os.getpid())


def raise_file_limit() -> None:
    """Raises this process's limit of open files to its hard limit.

    Each connection to a server is a file, and the default limit is 1,024. Forked processes get the old limit
    back: a program that calls ``select`` relies on getting no descriptor above 1,023. Processes started in
    another way inherit the raised limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:
        log.warning("the limit on open files stays at %d: %s", soft, error)
    else:
        os.register_at_fork(after_in_child=lambda: _lower_file_limit(soft))


def _lower_file_limit(soft: int) -> None:
    """Runs in a freshly forked process, and must not fail."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard), hard))
