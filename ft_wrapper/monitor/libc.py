"""The C library's calls that Python does not offer: shared mappings, robust mutexes, semaphores.

Everything takes plain addresses: the owner of the memory keeps it alive. The calls release the GIL, so
that a blocked one stops only its own thread.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
import time
from typing import Any

MUTEX_SIZE = 64
"""Bytes set aside for a ``pthread_mutex_t``; 40 to 48 on the platforms that torch supports."""
SEMAPHORE_SIZE = 32
"""Bytes of a ``sem_t``."""

_PTHREAD_PROCESS_SHARED = 1
_PTHREAD_MUTEX_ROBUST = 1
_PYBUF_WRITE = 0x200
_MAP_FAILED = ctypes.c_void_p(-1).value
_CALLS = (
    "mmap",
    "munmap",
    "pthread_mutex_init",
    "pthread_mutex_lock",
    "pthread_mutex_timedlock",
    "pthread_mutex_consistent",
    "pthread_mutex_unlock",
    "pthread_mutexattr_init",
    "pthread_mutexattr_setpshared",
    "pthread_mutexattr_setrobust",
    "pthread_mutexattr_destroy",
    "sem_init",
    "sem_post",
    "sem_timedwait",
)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


@functools.cache
def _libc() -> Any:
    """The C library, with the calls needed here checked and typed.

    Raises:
        RuntimeError: the platform lacks one of them.
    """
    missing = [] if hasattr(os, "memfd_create") else ["memfd_create"]
    library = ctypes.CDLL(None, use_errno=True)
    missing += [name for name in _CALLS if not hasattr(library, name)]
    if missing:
        raise RuntimeError(
            f"this platform ({sys.platform}) lacks {', '.join(missing)}, which watching a rank needs; "
            "ft_wrapper runs on Linux with glibc"
        )
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library


def require() -> None:
    """Makes sure that the platform has what this module needs.

    Raises:
        RuntimeError: it lacks a call; the message names it.
    """
    _libc()


def map_shared(fd: int, size: int) -> int:
    """Maps a file's first bytes, shared, and returns their address.

    Not ``mmap.mmap``: that keeps a duplicate of the descriptor, which a forked child that closes what is
    not its own would close behind its back.

    Args:
        fd: descriptor of the file; may be closed afterwards.
        size: number of bytes.

    Raises:
        OSError: the mapping failed.
        RuntimeError: the platform lacks a call that is needed.
    """
    address: int | None = _libc().mmap(
        None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, ctypes.c_int(fd), 0
    )
    if address is None or address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mapping {size} bytes of file descriptor {fd}: {os.strerror(code)}")
    return address


def view(address: int, size: int) -> memoryview:
    """Returns bytes at an address as a writable view. It must be released before the memory goes."""
    make = ctypes.pythonapi.PyMemoryView_FromMemory
    make.restype = ctypes.py_object
    make.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
    result: memoryview = make(address, size, _PYBUF_WRITE)
    return result


def unmap(address: int, size: int) -> None:
    """Undoes `map_shared`. Nothing may use the memory any more."""
    _libc().munmap(address, size)


def mutex_init(address: int) -> None:
    """Makes a robust mutex that processes share, in ``MUTEX_SIZE`` bytes at an address."""
    libc = _libc()
    attributes = ctypes.create_string_buffer(64)
    _check(libc.pthread_mutexattr_init(attributes), "pthread_mutexattr_init")
    try:
        _check(
            libc.pthread_mutexattr_setpshared(attributes, _PTHREAD_PROCESS_SHARED),
            "pthread_mutexattr_setpshared",
        )
        _check(
            libc.pthread_mutexattr_setrobust(attributes, _PTHREAD_MUTEX_ROBUST), "pthread_mutexattr_setrobust"
        )
        _check(libc.pthread_mutex_init(ctypes.c_void_p(address), attributes), "pthread_mutex_init")
    finally:
        libc.pthread_mutexattr_destroy(attributes)


def mutex_lock(address: int, timeout: float | None = None) -> bool:
    """Locks a robust mutex; one whose owner died is made consistent.

    Args:
        address: where the mutex is.
        timeout: seconds to wait at most; for ever when None.

    Returns:
        Whether it is locked now; False only at the timeout.
    """
    libc, mutex = _libc(), ctypes.c_void_p(address)
    if timeout is None:
        code = libc.pthread_mutex_lock(mutex)
    elif hasattr(libc, "pthread_mutex_clocklock"):  # glibc 2.30
        deadline = _deadline(time.CLOCK_MONOTONIC, timeout)
        code = libc.pthread_mutex_clocklock(mutex, time.CLOCK_MONOTONIC, ctypes.byref(deadline))
    else:
        code = libc.pthread_mutex_timedlock(mutex, ctypes.byref(_deadline(time.CLOCK_REALTIME, timeout)))
    if code == errno.ETIMEDOUT:
        return False
    if code == errno.EOWNERDEAD:
        code = libc.pthread_mutex_consistent(mutex)
    _check(code, "pthread_mutex_lock")
    return True


def mutex_unlock(address: int) -> None:
    """Unlocks a mutex that the calling thread holds."""
    _check(_libc().pthread_mutex_unlock(ctypes.c_void_p(address)), "pthread_mutex_unlock")


def semaphore_init(address: int) -> None:
    """Makes a semaphore at 0, in ``SEMAPHORE_SIZE`` bytes at an address, for the threads of one process."""
    _check_errno(_libc().sem_init(ctypes.c_void_p(address), 0, 0), "sem_init")


def semaphore_post(address: int) -> None:
    """Counts a semaphore up by one."""
    _check_errno(_libc().sem_post(ctypes.c_void_p(address)), "sem_post")


def semaphore_post_function() -> Any:
    """C's ``int sem_post(sem_t *)`` itself, for those who hand a function pointer to C."""
    return _libc().sem_post


def semaphore_wait(address: int, timeout: float) -> bool:
    """Waits until a semaphore is above 0 and counts it down.

    Args:
        address: where the semaphore is.
        timeout: seconds to wait at most.

    Returns:
        False at the timeout. A signal may also end the wait early, which counts as a timeout.
    """
    libc, semaphore = _libc(), ctypes.c_void_p(address)
    if hasattr(libc, "sem_clockwait"):  # glibc 2.30
        deadline = _deadline(time.CLOCK_MONOTONIC, timeout)
        code = libc.sem_clockwait(semaphore, time.CLOCK_MONOTONIC, ctypes.byref(deadline))
    else:
        code = libc.sem_timedwait(semaphore, ctypes.byref(_deadline(time.CLOCK_REALTIME, timeout)))
    if code == 0:
        return True
    if ctypes.get_errno() in (errno.ETIMEDOUT, errno.EINTR):
        return False
    _check_errno(code, "sem_timedwait")
    return False


def _deadline(clock: int, timeout: float) -> _Timespec:
    nanoseconds = time.clock_gettime_ns(clock) + int(max(timeout, 0.0) * 1e9)
    return _Timespec(*divmod(nanoseconds, 1_000_000_000))


def _check(code: int, call: str) -> None:
    if code != 0:
        raise OSError(code, f"{call}: {os.strerror(code)}")


def _check_errno(code: int, call: str) -> None:
    if code != 0:
        _check(ctypes.get_errno(), call)
