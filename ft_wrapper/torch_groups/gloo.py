"""Shutting down exactly the sockets of this process's gloo groups, and its connections to a store.

Gloo has no abort: a collective behind a hung peer waits until its timeout. But once the sockets below it are
shut down, it raises at once. Which ones these are, the kernel knows: a gloo device has one thread, named
``gloo_tcp_loop``, that sits in ``epoll_wait``; the first argument of that system call is the epoll
descriptor, and that descriptor's ``fdinfo`` lists every watched descriptor with its inode number.

Only their receiving side is shut down, and duplicates keep them open until all ranks have left. For gloo
loses a send whose write fails at once: its loop thread has taken the buffer off the queue by then and tells
no one, and what waits for that buffer waits until the timeout. So no write may fail, here or at a peer,
while somebody is still inside. The end of the receiving side fails all that is queued, sends too.
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
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch
from torch.torch_version import TorchVersion

log = logging.getLogger(__name__)
_THREAD_NAME = "gloo_tcp_loop"
_NAMES_THREADS = TorchVersion(torch.__version__) >= "2.13"  # 2.8 does not; between was not looked at
# epoll_wait, epoll_pwait, epoll_pwait2
_EPOLL_SYSCALLS = {"x86_64": {232, 281, 441}, "aarch64": {22, 441}}
_COMM_SIZE = 64  # bytes; a thread's name takes up to 16
_CONNECT_TIMEOUT = 0.2
_BUSY_LIMIT = 1.0  # seconds to wait for event loops that are busy with a transfer
_libc = ctypes.CDLL(None, use_errno=True)
_Sockaddr = ctypes.c_char * 128  # sizeof(struct sockaddr_storage); a type is costly to make
_WATCHED = re.compile(r"^tfd:\s*(\d+).*?\bino:\s*([0-9a-f]+)", re.MULTILINE)

_held: dict[int, int] = {}  # inode number: duplicate
_held_lock = threading.Lock()


def shut_down_gloo_sockets(being_made: Callable[[], int] = int) -> None:
    """Shuts down the connections of all gloo groups of this process, for this process only.

    Listening sockets, and sockets that are not gloo's, are not touched. The connections stay open, and
    the peers learn nothing, until `close_aborted_sockets`.

    A group being made may wait for a peer to connect to it, and there is no socket yet to shut down. Then
    it gets its connections from here, and they are shut down at once.

    Args:
        being_made: gives the size of the group that is being made; 0 for none. Asked if there is a group.
    """
    pending = named_threads(_THREAD_NAME) or _unnamed_loops()
    newest = pending[-1:]
    size = being_made() if pending else 0
    deadline = time.monotonic() + _BUSY_LIMIT
    while pending:
        busy = []
        for tid in pending:
            try:
                epoll = _hold_epoll(tid)
            except ProcessLookupError:
                continue
            except OSError as error:
                log.warning("gloo's sockets cannot be found on this machine: %s", error)
                return
            if epoll is None:
                busy.append(tid)
                continue
            try:
                watched = _watched(epoll)
                _shut_down_connections(watched)
                if size and tid in newest:
                    _connect_for_peers(watched, size)
            finally:
                os.close(epoll)
        pending = busy
        if pending and time.monotonic() > deadline:
            log.warning("%d gloo event loops were busy for %g s; not aborted", len(pending), _BUSY_LIMIT)
            break
        if pending:
            time.sleep(0.0005)  # nothing signals that a thread has entered a system call


def close_aborted_sockets() -> None:
    """Closes the connections that an abort has shut down.

    To be called once no rank is any more inside what was aborted: a peer that is might hang otherwise.
    """
    with _held_lock:
        while _held:
            os.close(_held.popitem()[1])


def unnamed_threads() -> list[int]:
    """Returns the ids of threads that C++ has started and given no name, the oldest first.

    Empty where torch names its own.
    """
    if _NAMES_THREADS:
        return []
    with open("/proc/self/comm", encoding="utf-8", errors="replace") as file:
        inherited = file.read().rstrip("\n")
    pythons = {thread.native_id for thread in threading.enumerate()}
    return [tid for tid in named_threads(inherited) if tid not in pythons]


def _unnamed_loops() -> list[int]:
    """The same of gloo's devices: in ``epoll_wait``, on nothing that another library would have there."""
    loops = []
    for tid in unnamed_threads():
        with contextlib.suppress(OSError):  # it has ended
            epoll = _hold_epoll(tid)
            if epoll is None:
                continue
            try:
                # libuv, which a TCPStore's server runs, wakes its loop by an eventfd; gloo has no such thing.
                kinds = [os.readlink(f"/proc/self/fd/{fd}") for fd, _ in _watched(epoll)]
            finally:
                os.close(epoll)
            if not any("eventfd" in kind for kind in kinds):
                loops.append(tid)
    return loops


def named_threads(name: str) -> list[int]:
    """Returns the ids of this process's threads with a name, the oldest first.

    Args:
        name: as the kernel shows it, at most 15 characters.
    """
    found = []
    wanted = name.encode() + b"\n"
    for tid in os.listdir("/proc/self/task"):
        try:
            # Not `open`, which takes three times as long: this is a part of every restart.
            comm = os.open(f"/proc/self/task/{tid}/comm", os.O_RDONLY | os.O_CLOEXEC)
            try:
                if os.read(comm, _COMM_SIZE) == wanted:
                    found.append(int(tid))
            finally:
                os.close(comm)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
    return found


def _hold_epoll(tid: int) -> int | None:
    """Returns a duplicate of the epoll descriptor that a thread waits on; None while it is not waiting."""
    fd = _epoll_fd(tid)
    if fd is None:
        return None
    try:
        held = os.dup(fd)
    except OSError:
        return None
    # Waiting on it before and after: the thread never left its loop, so this is no other file's number.
    try:
        same = _epoll_fd(tid) == fd
    except BaseException:
        os.close(held)
        raise
    if not same:
        os.close(held)
        return None
    return held


def _epoll_fd(tid: int) -> int | None:
    directory = f"/proc/self/task/{tid}"
    try:
        with open(f"{directory}/syscall", encoding="ascii") as file:
            words = file.read().split()
    except FileNotFoundError:
        if os.path.exists(directory):
            raise  # a kernel without this file
        raise ProcessLookupError(f"thread {tid} has ended") from None
    if not words:
        raise ProcessLookupError(f"thread {tid} has ended")
    if words[0] == "running" or int(words[0]) not in _EPOLL_SYSCALLS.get(platform.machine(), ()):
        return None
    return int(words[1], 16)


def _watched(epoll: int) -> list[tuple[int, int]]:
    """Descriptors and inode numbers that an epoll descriptor watches."""
    with open(f"/proc/self/fdinfo/{epoll}", encoding="ascii") as file:
        return [(int(fd), int(inode, 16)) for fd, inode in _WATCHED.findall(file.read())]


def _shut_down_connections(watched: list[tuple[int, int]]) -> None:
    for number, inode in watched:
        with duplicate(number, inode) as fd:
            if fd is not None:
                with _held_lock:
                    if inode not in _held:
                        _held[inode] = os.dup(fd)
                shut_down(fd, socket.SHUT_RD)


def _connect_for_peers(watched: list[tuple[int, int]], size: int) -> None:
    """Connects to a gloo device's own listening socket in the place of each peer, and closes.

    Who connects to a gloo device says first which pair of ranks it means: a number that counts from 0, as
    eight bytes. The device hands the connection to the one that waits for that number, or keeps it.
    """
    for number, inode in watched:
        # Held until the end: as long as it listens, no one else's socket has its address.
        with duplicate(number, inode, listening=True) as fd:
            named = None if fd is None else _sockaddr(_libc.getsockname, fd)
            address = None if named is None else _address(named)
            if named is None or address is None:
                continue
            for pair in range(size + 1):
                try:
                    with socket.create_connection((address, _port(named)), timeout=_CONNECT_TIMEOUT) as peer:
                        peer.sendall(struct.pack("=q", pair))
                except OSError as error:
                    log.debug("no connection to gloo at %s: %s", address, error)
                    break


# ---- sockets that this process holds but did not open here
#
# Python's own ``socket.socket(fileno=…)`` is no use for this: where ``socket.setdefaulttimeout`` was called,
# it makes the descriptor non-blocking, and with it every duplicate, the owner's included. These are the
# plain system calls.


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


def shut_down(fd: int, how: int) -> None:
    """Ends a connection, and anyone who waits on it wakes; one that is not connected any more is left alone.

    Args:
        fd: file descriptor of a connected or connecting socket. It stays open.
        how: ``SHUT_RDWR`` wakes the other end as well; of ``SHUT_RD`` that learns nothing.

    Raises:
        OSError: the system call failed otherwise.
    """
    if _libc.shutdown(fd, how) != 0 and ctypes.get_errno() != errno.ENOTCONN:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def shut_down_clients(host: str, port: int) -> None:
    """Shuts down this process's connections to a server. No other socket is touched.

    Args:
        host: name or address of the server. A name is looked up, once, when there is a connection to
            the port.
        port: the server's TCP port.
    """
    for name in os.listdir("/proc/self/fd"):
        if not _is_client_of(int(name), host, port):
            continue  # most are not; only what looks right is held, and looked at again
        with duplicate(int(name)) as fd:
            if fd is not None and _is_client_of(fd, host, port):
                shut_down(fd, socket.SHUT_RDWR)


def _is_client_of(fd: int, host: str, port: int) -> bool:
    named = _sockaddr(_libc.getpeername, fd)
    if named is None or _port(named) != port:
        return False  # of nearly all descriptors, in every restart: nothing more is made of them
    return _address(named) in _addresses(host)


def _listens(fd: int) -> bool:
    value, size = ctypes.c_int(0), ctypes.c_uint32(ctypes.sizeof(ctypes.c_int))
    failed = _libc.getsockopt(
        fd, socket.SOL_SOCKET, socket.SO_ACCEPTCONN, ctypes.byref(value), ctypes.byref(size)
    )
    return failed != 0 or value.value != 0


def _sockaddr(call: Callable[..., int], fd: int) -> bytes | None:
    """The ``struct sockaddr`` that ``getpeername`` or ``getsockname`` gives; None where there is none."""
    buffer = _Sockaddr()
    return buffer.raw if call(fd, buffer, ctypes.byref(ctypes.c_uint32(len(buffer)))) == 0 else None


def _port(named: bytes) -> int:
    return int.from_bytes(named[2:4], "big")


def _address(named: bytes) -> str | None:
    """The address in a ``struct sockaddr``; None if it is of neither family of the internet."""
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
    # The last part of a link-local IPv6 address ("%eth0") is not in what the kernel reports.
    return frozenset(_plain(ipaddress.ip_address(str(entry[4][0]).partition("%")[0])) for entry in found)
