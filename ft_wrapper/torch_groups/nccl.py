"""Ends NCCL's communicators from outside: wakes service threads, frees blocked initializations.

A communicator has two service threads that wait in ``poll`` for half a second at a time, and its end waits
for theirs. An abort sets a flag, which they read when they wake, and wakes neither. A destroy wakes one of
them (``ncclProxyService``, ``ncclProxyServiceUDS`` and ``ncclProxyStop`` in src/proxy.cc, NCCL 2.19 to 2.30).
On an H100 that was 500 of the 531 ms of a restart, for each communicator. So this module wakes them: the
listening thread with a connection, closed at once, and the other one with a datagram.

The kernel shows which sockets these are: such a thread is in ``poll`` with a timeout of 500 ms, and the last
descriptor in its list is the socket. It never connects to a communicator that stays in use: the thread would
block in ``accept`` and serve no peer (NCCL issue 1808). A datagram is harmless unless it is empty: then
``ncclIpcSocketRecvMsg`` reads a stale errno, and may retry forever.

An initialization waits for its peers in ``accept``, where torch's abort does not reach it. But ``accept``
fails on a socket that was shut down, and so does NCCL.
"""

import contextlib
import gc
import ipaddress
import os
import platform
import socket
import struct
import threading
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from ..monitor.frames import current_frames, locations
from ..store.bounded import in_background
from .sockets import bound_to, duplicate, shut_down, system_call, watched_by

_SERVICE_PERIOD = 500  # milliseconds
_DATAGRAMS = b"tmp/nccl-socket-"  # start of the datagram socket's name, after one byte
# poll, and ppoll, whose timeout is a pointer to seconds and nanoseconds
_POLL, _PPOLL = {"x86_64": (7, 271), "aarch64": (None, 73)}.get(platform.machine(), (None, None))
# Seconds between two wake-ups. One wake-up is enough for the only rank on a host. With other ranks on the
# host, the thread has to wake once more, soon after its communicator has sent "stop". So the pauses grow by
# half.
_PAUSES = tuple(0.001 * 1.5**n for n in range(15))
# A thread that makes a communicator is in one of these: a group's first operation may be in a backward pass.
_FOLDERS = tuple(f"{os.path.dirname(torch.__file__)}/{name}/" for name in ("distributed", "autograd"))

_at_entry: set[int] | None = None  # inode numbers of the files open at entry; None: NCCL cannot be in use
_aborts = 0  # number of aborts since the entry


def mark_entry() -> None:
    """Notes the open files as the function is entered: none belongs to a communicator that it makes."""
    global _at_entry, _aborts
    is_needed = dist.is_nccl_available() or dist.Backend._plugins
    _at_entry, _aborts = _inodes(os.listdir("/proc/self/fd")) if is_needed else None, 0


@contextlib.contextmanager
def service_threads_awake(*, aborted: bool) -> Iterator[None]:
    """Within it, communicators end without the half second of their service threads.

    Args:
        aborted: True if all communicators made since the entry are aborted, False if some are destroyed.
    """
    over = threading.Event()
    thread = in_background("waking NCCL's service threads", lambda: _wake_until(over, aborted))
    try:
        yield
    finally:
        over.set()
        thread.join()  # before the next iteration makes its communicators


def free_pending_init() -> None:
    """Frees a thread that waits for a peer in NCCL's initialization or destroy, from the second abort on.

    Call it at each abort of the iteration; other waits end at the first abort. If a thread is in
    ``torch.distributed`` or in a backward pass, it shuts down sockets that listen at one address since the
    entry. It spares Python's sockets, and sockets in a thread's ``poll`` or in an epoll.
    """
    global _aborts
    _aborts += 1
    if _at_entry is None or _aborts == 1 or _PPOLL is None:
        return
    try:
        system_call(threading.get_native_id())
    except OSError:  # the kernel does not show which threads poll, so the sockets' owners are unknown
        return
    files = (place.file for frame in current_frames().values() for place in locations(frame))
    if not any(file.startswith(_FOLDERS) for file in files):
        return
    pythons = (each.fileno() for each in gc.get_objects() if issubclass(type(each), socket.SocketType))
    others = _at_entry | _polled() | _inodes(pythons)
    for number in os.listdir("/proc/self/fd"):
        with duplicate(int(number), listening=True) as fd:
            if fd is None or _inodes([fd]) & others:
                continue
            name = bound_to(fd)
            if isinstance(name, tuple) and not ipaddress.ip_address(name[0]).is_unspecified:
                shut_down(fd, socket.SHUT_RD)


def _wake_until(over: threading.Event, aborted: bool) -> None:
    for pause in _PAUSES:
        if over.wait(pause):
            return
        for address in _service_sockets():
            if aborted or isinstance(address, bytes):
                _wake(address)


def _service_sockets() -> Iterator[tuple[str, int] | bytes]:
    """The addresses of NCCL's service threads that are waiting now."""
    for polled, timeout in _polls():
        if timeout != _SERVICE_PERIOD or not polled:
            continue
        with duplicate(polled[-1], listening=len(polled) > 1) as fd:
            name = None if fd is None else bound_to(fd)
            if isinstance(name, bytes) and name[1:].startswith(_DATAGRAMS):
                yield name
            if isinstance(name, tuple) and not _inodes(polled[-1:]) & (_at_entry or set()):
                yield name


def _wake(address: tuple[str, int] | bytes) -> None:
    inet = socket.AF_INET6 if isinstance(address, tuple) and ":" in address[0] else socket.AF_INET
    kind = (inet, socket.SOCK_STREAM) if isinstance(address, tuple) else (socket.AF_UNIX, socket.SOCK_DGRAM)
    with contextlib.suppress(OSError), socket.socket(*kind) as one:  # the thread may have ended
        one.setblocking(False)  # on the same host it connects at once
        one.connect(address)
        one.send(b"\0")


def _polls() -> Iterator[tuple[list[int], int]]:
    """The descriptors that each thread polls now, and for how many milliseconds; 0 means forever.

    Yields nothing if the kernel does not show them.
    """
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for tid in os.listdir("/proc/self/task"):
            # The thread may have ended or left the call. Then `pread` fails; using the pointer would crash.
            with contextlib.suppress(OSError, struct.error):
                number, array, count, timeout, *_ = system_call(int(tid)) or (None, 0, 0, 0)
                if number is None or number not in (_POLL, _PPOLL):
                    continue
                if number == _PPOLL and timeout:
                    seconds, nanoseconds = struct.unpack("qq", os.pread(memory.fileno(), 16, timeout))
                    timeout = seconds * 1000 + nanoseconds // 1_000_000
                polled = os.pread(memory.fileno(), 8 * min(count, 4096), array)
                yield [fd for fd, _, _ in struct.iter_unpack("ihh", polled)], timeout


def _polled() -> set[int]:
    """Inode numbers of the files that threads poll, or that are in an epoll."""
    found = _inodes(fd for polled, _ in _polls() for fd in polled)
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{number}") == "anon_inode:[eventpoll]":
                found.update(inode for _, inode in watched_by(int(number)))
    return found


def _inodes(descriptors: Iterable[int | str]) -> set[int]:
    found = set()
    for fd in descriptors:
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(os.fstat(int(fd)).st_ino)
    return found
