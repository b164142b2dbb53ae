"""Sockets that this process holds but did not open here: who is at the other end, and shutting them down.

Python's own ``socket.socket(fileno=…)`` is no use for this: where ``socket.setdefaulttimeout`` was called it
makes the descriptor non-blocking, and with it every duplicate, the owner's included. These are the plain
system calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import ipaddress
import logging
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)
_SOCKADDR_SIZE = 128  # sizeof(struct sockaddr_storage)
_Sockaddr = ctypes.c_char * _SOCKADDR_SIZE
_FAMILY, _PORT = struct.Struct("=H"), struct.Struct("!H")


@contextlib.contextmanager
def duplicate(fd: int, inode: int | None = None, *, listening: bool = False) -> Iterator[int | None]:
    """Holds a duplicate of a socket, so that no one can put another file in its place meanwhile.

    Args:
        fd: file descriptor, as it was seen; it may be closed or stand for another file by now.
        inode: the socket's inode number, where it is known.
        listening: whether it is to be a listening socket; otherwise it is to be none.

    Returns:
        A context manager giving the duplicate; None where ``fd`` is closed, or something else than is said
        above.
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


def shut_down(fd: int, how: int = socket.SHUT_RDWR) -> bool:
    """Ends a connection, and anyone who waits on it wakes.

    Args:
        fd: file descriptor of a connected or connecting socket. It stays open.
        how: ``SHUT_RDWR`` wakes the other end as well; of ``SHUT_RD`` that learns nothing.

    Returns:
        False when it was not connected any more.

    Raises:
        OSError: the system call failed otherwise.
    """
    if _libc.shutdown(fd, how) == 0:
        return True
    error = ctypes.get_errno()
    if error == errno.ENOTCONN:
        return False
    raise OSError(error, os.strerror(error))


def local_address(fd: int) -> tuple[str, int] | None:
    """Returns a TCP socket's own address and port; None where it has none.

    Args:
        fd: file descriptor of the socket.
    """
    named = _name(_libc.getsockname, fd)
    return None if named is None else _address(named)


def shut_down_clients(host: str, port: int) -> int:
    """Shuts down this process's connections to a server. No other socket is touched.

    Args:
        host: name or address of the server. A name is looked up, once, when there is a connection to
            the port.
        port: the server's TCP port.

    Returns:
        How many connections were shut down.
    """
    count = 0
    for name in os.listdir("/proc/self/fd"):
        if not _is_client_of(int(name), host, port):
            continue  # most are not; only what looks right is held, and looked at again
        with duplicate(int(name)) as fd:
            if fd is not None and _is_client_of(fd, host, port) and shut_down(fd):
                count += 1
    return count


def _is_client_of(fd: int, host: str, port: int) -> bool:
    named = _name(_libc.getpeername, fd)
    if named is None or _PORT.unpack_from(named, 2) != (port,):
        return False  # of nearly all descriptors, in every restart: nothing more is made of them
    peer = _address(named)
    return peer is not None and peer[0] in _addresses(host)


def _listens(fd: int) -> bool:
    value, size = ctypes.c_int(0), ctypes.c_uint32(ctypes.sizeof(ctypes.c_int))
    failed = _libc.getsockopt(
        fd, socket.SOL_SOCKET, socket.SO_ACCEPTCONN, ctypes.byref(value), ctypes.byref(size)
    )
    return failed != 0 or value.value != 0


def _name(call: Callable[..., int], fd: int) -> bytes | None:
    """The ``struct sockaddr`` that ``getpeername`` or ``getsockname`` gives; None where there is none."""
    buffer = _Sockaddr()
    return buffer.raw if call(fd, buffer, ctypes.byref(ctypes.c_uint32(_SOCKADDR_SIZE))) == 0 else None


def _address(named: bytes) -> tuple[str, int] | None:
    """Address and port of a ``struct sockaddr``; None if it is of neither family of the internet."""
    (family,) = _FAMILY.unpack_from(named)
    (port,) = _PORT.unpack_from(named, 2)
    if family == socket.AF_INET:
        return _plain(ipaddress.ip_address(named[4:8])), port
    if family == socket.AF_INET6:
        return _plain(ipaddress.ip_address(named[8:24])), port
    return None


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
    # The last part of a link-local IPv6 address ("%eth0") is not in what the kernel reports.
    return frozenset(_plain(ipaddress.ip_address(str(entry[4][0]).partition("%")[0])) for entry in found)
