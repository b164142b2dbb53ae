"""Shuts down exactly the sockets of this process's gloo groups.

Gloo has no abort: a collective with a hung peer waits until its timeout. But once its sockets are shut down,
it raises at once. The kernel shows which sockets these are. A gloo device has one thread, named
``gloo_tcp_loop``, that waits in ``epoll_wait``. The first argument of this system call is the epoll
descriptor, and its ``fdinfo`` lists every watched descriptor with its inode number.

Only the receiving side of a socket is shut down, and a duplicate keeps the socket open until all ranks have
left. The reason: if a write fails at once, gloo loses the send. Its loop thread has already taken the buffer
off the queue and notifies no thread, so a wait for the buffer lasts until the timeout. So no write may fail,
here or at a peer, while any rank is inside a collective. The end of the receiving side fails everything that
is queued, including sends.
"""

import contextlib
import logging
import os
import platform
import socket
import struct
import threading
import time
from collections.abc import Callable

import torch
from torch.torch_version import TorchVersion

from .sockets import bound_to, duplicate, named_threads, shut_down, system_call, watched_by

log = logging.getLogger(__name__)
_THREAD_NAME = "gloo_tcp_loop"
_NAMES_THREADS = TorchVersion(torch.__version__) >= "2.13"  # 2.8 does not; versions between are unknown
# epoll_wait, epoll_pwait, epoll_pwait2
_EPOLL_SYSCALLS = {"x86_64": {232, 281, 441}, "aarch64": {22, 441}}
_CONNECT_TIMEOUT = 0.2
_BUSY_LIMIT = 1.0  # seconds to wait for event loops that are busy with a transfer

_held: dict[int, int] = {}  # inode number: duplicate
_held_lock = threading.Lock()


def shut_down_gloo_sockets(being_made: Callable[[], int] = int) -> None:
    """Shuts down the connections of all gloo groups of this process, on this side only.

    It touches no listening sockets, and only gloo's sockets. The connections stay open, and the peers notice
    nothing, until `close_aborted_sockets`.

    A group that is being made may wait for a peer to connect, without a socket to shut down. Then this
    function connects in the peer's place, and shuts the connection down.

    Args:
        being_made: returns the size of the group that is being made, 0 for none; called if there are groups.
    """
    pending = named_threads(_THREAD_NAME) or _unnamed_loops()
    newest = pending[-1:]
    size = being_made() if pending else 0
    deadline = time.monotonic() + _BUSY_LIMIT
    while pending:
        busy = []
        for tid in pending:
            try:
                watched = _watched_by_thread(tid)
            except ProcessLookupError:
                continue
            except OSError as error:
                log.warning("gloo's sockets cannot be found on this machine: %s", error)
                return
            if watched is None:
                busy.append(tid)
                continue
            _shut_down_connections(watched)
            if size and tid in newest:
                _connect_for_peers(watched, size)
        pending = busy
        if pending and time.monotonic() > deadline:
            log.warning("%d gloo event loops were busy for %g s; not aborted", len(pending), _BUSY_LIMIT)
            break
        if pending:
            time.sleep(0.0005)  # nothing signals that a thread has entered a system call


def close_aborted_sockets() -> None:
    """Closes the connections that an abort has shut down.

    Call it once all ranks have left the aborted operations: a peer that is still inside might hang.
    """
    with _held_lock:
        while _held:
            os.close(_held.popitem()[1])


def unnamed_threads() -> list[int]:
    """Returns the ids of the threads that C++ started without a name, oldest first.

    Returns none if this torch names its threads.
    """
    if _NAMES_THREADS:
        return []
    with open("/proc/self/comm", encoding="utf-8", errors="replace") as file:
        inherited = file.read().rstrip("\n")
    pythons = {thread.native_id for thread in threading.enumerate()}
    return [tid for tid in named_threads(inherited) if tid not in pythons]


def _unnamed_loops() -> list[int]:
    """The ids of the unnamed threads of gloo devices: they wait in ``epoll_wait``, and on no eventfd."""
    loops = []
    for tid in unnamed_threads():
        with contextlib.suppress(OSError):  # the thread has ended
            watched = _watched_by_thread(tid)
            # A TCPStore's server runs libuv, which wakes its loop with an eventfd. Gloo has none.
            kinds = [os.readlink(f"/proc/self/fd/{fd}") for fd, _ in watched or ()]
            if watched is not None and not any("eventfd" in kind for kind in kinds):
                loops.append(tid)
    return loops


def _watched_by_thread(tid: int) -> list[tuple[int, int]] | None:
    """What a thread's epoll descriptor watches; None while the thread is not waiting on one."""
    fd = _epoll_fd(tid)
    if fd is None:
        return None
    try:
        held = os.dup(fd)
    except OSError:
        return None
    try:
        # The thread waited on this number before and after `dup`, so it was the same file all along.
        return watched_by(held) if _epoll_fd(tid) == fd else None
    finally:
        os.close(held)


def _epoll_fd(tid: int) -> int | None:
    called = system_call(tid)
    return called[1] if called and called[0] in _EPOLL_SYSCALLS.get(platform.machine(), ()) else None


def _shut_down_connections(watched: list[tuple[int, int]]) -> None:
    for number, inode in watched:
        with duplicate(number, inode) as fd:
            if fd is not None:
                with _held_lock:
                    if inode not in _held:
                        _held[inode] = os.dup(fd)
                shut_down(fd, socket.SHUT_RD)


def _connect_for_peers(watched: list[tuple[int, int]], size: int) -> None:
    """Connects to a gloo device's listening socket in place of each peer, and disconnects.

    A peer first sends which pair of ranks its connection is for: a number from 0 up, as eight bytes. The
    device passes the connection to the pair that waits for this number, or keeps it.
    """
    for number, inode in watched:
        # Held until the end: as long as it listens, no other socket gets its address.
        with duplicate(number, inode, listening=True) as fd:
            name = None if fd is None else bound_to(fd)
            if not isinstance(name, tuple):
                continue
            for pair in range(size + 1):
                try:
                    with socket.create_connection(name, timeout=_CONNECT_TIMEOUT) as peer:
                        peer.sendall(struct.pack("=q", pair))
                except OSError as error:
                    log.debug("no connection to gloo at %s: %s", name[0], error)
                    break
