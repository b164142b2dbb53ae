"""Shutting down exactly the sockets of this process's gloo groups.

Gloo has no abort: a collective behind a hung peer waits until its timeout. But once the sockets below it are
shut down, it raises at once. Which ones these are, the kernel knows: a gloo device has one thread, named
``gloo_tcp_loop``, that sits in ``epoll_wait``; the first argument of that system call is the epoll
descriptor, and that descriptor's ``fdinfo`` lists every watched descriptor with its inode number.

Only their receiving side is shut down, and duplicates keep them open until all ranks have left. For gloo
loses a send whose write fails at once: its loop thread has taken the buffer off the queue by then and tells
no one, and what waits for that buffer waits until the timeout. So no write may fail, here or at a peer,
while somebody is still inside. The end of the receiving side fails all that is queued, sends too.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import socket
import struct
import threading
import time
from collections.abc import Callable

from .sockets import duplicate, local_address, shut_down

log = logging.getLogger(__name__)
_THREAD_NAME = "gloo_tcp_loop"
# epoll_wait, epoll_pwait, epoll_pwait2
_EPOLL_SYSCALLS = {"x86_64": {232, 281, 441}, "aarch64": {22, 441}}
_COMM_SIZE = 64  # bytes; a thread's name takes up to 16
_CONNECT_TIMEOUT = 0.2
_WATCHED = re.compile(r"^tfd:\s*(\d+).*?\bino:\s*([0-9a-f]+)", re.MULTILINE)

_held: dict[int, int] = {}  # inode number: duplicate
_held_lock = threading.Lock()


def shut_down_gloo_sockets(being_made: Callable[[], int] = int, timeout: float = 1.0) -> int:
    """Shuts down the connections of all gloo groups of this process, for this process only.

    Listening sockets, and sockets that are not gloo's, are not touched. The connections stay open, and
    the peers learn nothing, until `close_aborted_sockets`.

    A group being made may wait for a peer to connect to it, and there is no socket yet to shut down. Then
    it gets its connections from here, and they are shut down at once.

    Args:
        being_made: gives the size of the group that is being made; 0 for none. Asked if there is a group.
        timeout: seconds to wait for event loops that are busy with a transfer; what they watch is left
            alone after that, with a warning.

    Returns:
        How many connections were shut down.
    """
    count = 0
    pending = named_threads(_THREAD_NAME)
    newest = pending[-1:]
    size = being_made() if pending else 0
    deadline = time.monotonic() + timeout
    while pending:
        busy = []
        for tid in pending:
            try:
                epoll = _hold_epoll(tid)
            except ProcessLookupError:
                continue
            except OSError as error:
                log.warning("gloo's sockets cannot be found on this machine: %s", error)
                return count
            if epoll is None:
                busy.append(tid)
                continue
            try:
                watched = _watched(epoll)
                count += _shut_down_connections(watched)
                if size and tid in newest:
                    _connect_for_peers(watched, size)
            finally:
                os.close(epoll)
        pending = busy
        if pending and time.monotonic() > deadline:
            log.warning("%d gloo event loops were busy for %g s; not aborted", len(pending), timeout)
            break
        if pending:
            time.sleep(0.0005)  # nothing signals that a thread has entered a system call
    return count


def close_aborted_sockets() -> None:
    """Closes the connections that an abort has shut down.

    To be called once no rank is any more inside what was aborted: a peer that is might hang otherwise.
    """
    with _held_lock:
        while _held:
            os.close(_held.popitem()[1])


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


def _shut_down_connections(watched: list[tuple[int, int]]) -> int:
    count = 0
    for number, inode in watched:
        with duplicate(number, inode) as fd:
            if fd is not None:
                _hold(fd, inode)
                count += shut_down(fd, socket.SHUT_RD)
    return count


def _hold(fd: int, inode: int) -> None:
    with _held_lock:
        if inode not in _held:
            _held[inode] = os.dup(fd)


def _connect_for_peers(watched: list[tuple[int, int]], size: int) -> None:
    """Connects to a gloo device's own listening socket in the place of each peer, and closes.

    Who connects to a gloo device says first which pair of ranks it means: a number that counts from 0, as
    eight bytes. The device hands the connection to the one that waits for that number, or keeps it.
    """
    for number, inode in watched:
        # Held until the end: as long as it listens, no one else's socket has its address.
        with duplicate(number, inode, listening=True) as fd:
            address = None if fd is None else local_address(fd)
            if address is None:
                continue
            for pair in range(size + 1):
                try:
                    with socket.create_connection(address, timeout=_CONNECT_TIMEOUT) as peer:
                        peer.sendall(struct.pack("=q", pair))
                except OSError as error:
                    log.debug("no connection to gloo at %s: %s", address, error)
                    break
