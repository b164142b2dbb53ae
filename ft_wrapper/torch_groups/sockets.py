"""Sockets that C++ has opened in this process, found through the kernel's view of its threads.

Plain system calls end them, not Python's ``socket.socket(fileno=…)``: after ``socket.setdefaulttimeout``,
that makes the descriptor non-blocking, and every duplicate with it, including the owner's.
"""

import contextlib
import ctypes
import errno
import functools
import ipaddress
import logging
import os
import platform
import re
import socket
import stat
import sys
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)
#: System calls that wait for descriptors: poll, ppoll, epoll_wait, epoll_pwait, epoll_pwait2.
POLLS = {"x86_64": (7, 271, 232, 281, 441), "aarch64": (73, 22, 441)}.get(platform.machine(), ())
_ENOUGH = 256  # bytes; a thread's name takes up to 16, its call nine numbers
_libc = ctypes.CDLL(None, use_errno=True)
_Sockaddr = ctypes.c_char * 128  # sizeof(struct sockaddr_storage); a type is costly to make
_WATCHED = re.compile(r"^tfd:\s*(\d+).*?\bino:\s*([0-9a-f]+)", re.MULTILINE)

# Threads ------------------------------------------------------------------------------------------------


def named_threads(name: str) -> list[int]:
    """Returns the ids of this process's threads with a name, the oldest first.

    Args:
        name: as the kernel shows it, at most 15 characters.
    """
    found = []
    wanted = name.encode() + b"\n"
    for tid in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            if _read_of_thread(tid, "comm") == wanted:
                found.append(int(tid))
    return found


def system_call(tid: int) -> tuple[int, ...] | None:
    """Returns the system call that a thread of this process waits in.

    Args:
        tid: the thread's id.

    Returns:
        The number of the call and its six arguments; None while the thread runs.

    Raises:
        ProcessLookupError: the thread has ended.
        OSError: this kernel does not show it.
    """
    try:
        words = _read_of_thread(tid, "syscall").split()
    except FileNotFoundError:
        if os.path.exists(f"/proc/self/task/{tid}"):
            raise  # a kernel without this file
        raise ProcessLookupError(f"thread {tid} has ended") from None
    if not words:
        raise ProcessLookupError(f"thread {tid} has ended")
    if len(words) < 7:
        return None  # it runs, or waits outside of a call (-1)
    return int(words[0]), *(int(word, 16) for word in words[1:7])


def _read_of_thread(tid: int | str, what: str) -> bytes:
    # Not `open`, which takes three times as long: every restart does this.
    fd = os.open(f"/proc/self/task/{tid}/{what}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _ENOUGH)
    finally:
        os.close(fd)


def watched_by(epoll: int) -> list[tuple[int, int]]:
    """The descriptors, with inode numbers, that an epoll descriptor watches."""
    with open(f"/proc/self/fdinfo/{epoll}", encoding="ascii") as file:
        return [(int(fd), int(inode, 16)) for fd, inode in _WATCHED.findall(file.read())]


# Sockets ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def duplicate(fd: int, inode: int | None = None, *, listening: bool = False) -> Iterator[int | None]:
    """Holds a duplicate of a socket, so that no other file can take its place meanwhile.

    Args:
        fd: file descriptor, as last seen; it may since have been closed or reused for another file.
        inode: the socket's inode number; None if unknown.
        listening: whether the socket has to be a listening one, or must not be one.

    Returns:
        A context manager that gives the duplicate, or None if ``fd`` is closed or not such a socket.
    """
    try:
        held = os.dup(fd)
    except OSError:
        yield None
        return
    try:
        status = os.fstat(held)
        is_it = stat.S_ISSOCK(status.st_mode) and inode in (None, status.st_ino)
        yield held if is_it and _listens(held) == listening else None
    finally:
        os.close(held)


def shut_down(fd: int, how: int) -> None:
    """Ends a connection and wakes threads that wait on it; does nothing if it is no longer connected.

    Args:
        fd: file descriptor of a connected or connecting socket. It stays open.
        how: ``SHUT_RDWR``, which also wakes the other end, or ``SHUT_RD``, which the other end cannot notice.

    Raises:
        OSError: the system call failed otherwise.
    """
    if _libc.shutdown(fd, how) != 0 and ctypes.get_errno() != errno.ENOTCONN:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def shut_down_clients(host: str, port: int) -> None:
    """Shuts down this process's connections to a server. No other socket is touched.

    Args:
        host: name or address of the server. A name is looked up once, if there is a connection to the port.
        port: the server's TCP port.
    """
    for name in os.listdir("/proc/self/fd"):
        if not _is_client_of(int(name), host, port):
            continue  # most are not; only a likely one is duplicated and checked again
        with duplicate(int(name)) as fd:
            if fd is not None and _is_client_of(fd, host, port):
                shut_down(fd, socket.SHUT_RDWR)


def _is_client_of(fd: int, host: str, port: int) -> bool:
    named = _sockaddr(_libc.getpeername, fd)
    if named is None or named[2:4] != port.to_bytes(2, "big"):
        return False  # true of nearly all descriptors, at every restart, so this check comes first
    return _address(named) in _addresses(host)


def bound_to(fd: int) -> tuple[str, int] | bytes | None:
    """Returns what a socket is bound to: address and port, or the name of a Unix socket; None for others.

    Args:
        fd: the socket's file descriptor.
    """
    named = _sockaddr(_libc.getsockname, fd)
    if named is None:
        return None
    if int.from_bytes(named[:2], sys.byteorder) == socket.AF_UNIX:
        return named[2:]
    address = _address(named)
    return None if address is None else (address, int.from_bytes(named[2:4], "big"))


def _listens(fd: int) -> bool:
    value, size = ctypes.c_int(0), ctypes.c_uint32(ctypes.sizeof(ctypes.c_int))
    failed = _libc.getsockopt(
        fd, socket.SOL_SOCKET, socket.SO_ACCEPTCONN, ctypes.byref(value), ctypes.byref(size)
    )
    return failed != 0 or value.value != 0


def _sockaddr(call: Callable[..., int], fd: int) -> bytes | None:
    """The ``struct sockaddr`` from ``getpeername`` or ``getsockname``; None if the call fails."""
    buffer, size = _Sockaddr(), ctypes.c_uint32(ctypes.sizeof(_Sockaddr))
    return buffer.raw[: size.value] if call(fd, buffer, ctypes.byref(size)) == 0 else None


def _address(named: bytes) -> str | None:
    """The address in a ``struct sockaddr``; None if it is neither IPv4 nor IPv6."""
    family = int.from_bytes(named[:2], sys.byteorder)
    if family not in (socket.AF_INET, socket.AF_INET6):
        return None
    return _plain(ipaddress.ip_address(named[4:8] if family == socket.AF_INET else named[8:24]))


def _plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """One spelling per address: torch connects to IPv4 addresses through IPv6 sockets."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _addresses(host: str) -> frozenset[str]:
    try:
        return _look_up(host)
    except OSError as error:
        log.warning("cannot resolve %r, so connections to it are not shut down: %s", host, error)
        return frozenset()


@functools.lru_cache(maxsize=64)
def _look_up(host: str) -> frozenset[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    # The kernel reports a link-local IPv6 address without its last part ("%eth0").
    return frozenset(_plain(ipaddress.ip_address(str(entry[4][0]).partition("%")[0])) for entry in found)
