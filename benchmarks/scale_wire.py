"""Many clients of one TCPStore in one process: each a store of its own to the protocol's code.

A client of torch's occupies a thread while it waits, so 16,384 of them do not fit into a process. Here each
simulated rank is a greenlet on a `WireStore` that speaks the server's own language, and one loop serves the
sockets of all. What goes over the wire is what torch's client sends for the same operation, except that
requests which are made at the same moment leave in one piece.
"""

from __future__ import annotations

import collections
import functools
import heapq
import itertools
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import greenlet
from torch.distributed import DistStoreError

from ft_wrapper.store import StoreMixin, TCPStore

# Kinds of requests, by the number that torch gives them.
_VALIDATE, _SET, _COMPARE_SET, _GET, _ADD, _CHECK, _WAIT = (bytes([number]) for number in range(7))
_DELETE, _APPEND, _, _MULTI_SET, _CANCEL_WAIT, _PING = (bytes([number]) for number in range(8, 14))
_MAGIC = 0x3C85F7CE
_KEY_PREFIX = b"/"  # torch's client puts it in front of every key
_LONG = 3600.0  # seconds; a wait that is longer than this one is not timed

_size = struct.Struct("<Q")
_number = struct.Struct("<q")
# For receiving; to make one each time costs more than all else.
_space = memoryview(bytearray(1 << 20))

# A reader takes an answer from what has been received, at a position: the answer and the position after it,
# or None as long as it is not all there.
Reader = Callable[[bytes, int], "tuple[Any, int] | None"]


def _byte(data: bytes, at: int) -> tuple[int, int] | None:
    return (data[at], at + 1) if len(data) > at else None


def _integer(data: bytes, at: int) -> tuple[int, int] | None:
    return (_number.unpack_from(data, at)[0], at + 8) if len(data) >= at + 8 else None


def _string(data: bytes, at: int) -> tuple[bytes, int] | None:
    if len(data) < at + 8:
        return None
    end = at + 8 + int(_size.unpack_from(data, at)[0])
    return (data[at + 8 : end], end) if len(data) >= end else None


def _sized(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return _size.pack(len(data)) + data


@functools.lru_cache(maxsize=256)  # all ranks use the same few
def _key(key: str) -> bytes:
    return _sized(_KEY_PREFIX + key.encode())


class Loop:
    """Serves the connections of a process and runs its simulated ranks."""

    def __init__(self) -> None:
        self.dirty: dict[Connection, None] = {}  # have something to send
        self.running = 0  # ranks whose task has not ended
        self._poll = select.epoll()
        self._connections: dict[int, Connection] = {}
        self._deadlines: list[tuple[float, int, WireStore, int]] = []
        self._order = itertools.count()

    def add(self, connection: Connection) -> None:
        """Serves a connection from now on."""
        self._connections[connection.socket.fileno()] = connection
        self._poll.register(connection.socket, select.EPOLLIN)

    def start(self, store: WireStore, task: Callable[[], None]) -> None:
        """Begins a rank's task; it runs until its first operation that is answered."""
        self.running += 1
        store.connection.running += 1

        def run() -> None:
            try:
                task()
            finally:
                self.running -= 1
                store.connection.running -= 1
                self.dirty[store.connection] = None  # the others on it may all be waiting now

        store.greenlet = greenlet.greenlet(run)
        store.greenlet.switch()

    def run_until(self, done: Callable[[], bool]) -> None:
        """Serves the ranks until something holds, with all of their requests sent."""
        while True:
            self._flush()
            if done():
                return
            timeout = self._deadlines[0][0] - time.monotonic() if self._deadlines else None
            for file, _ in self._poll.poll(None if timeout is None else max(0.0, timeout)):
                self._connections[file].receive()
            self._expire()

    def run(self) -> None:
        """Serves the ranks until all of their tasks have ended."""
        self.run_until(lambda: self.running == 0)

    def all_wait(self) -> bool:
        """Whether every rank waits for a key."""
        return all(
            not connection.asked or connection.waits_only() for connection in self._connections.values()
        )

    def expire_at(self, deadline: float, store: WireStore) -> None:
        """Ends a rank's wait then, if it is still the same one."""
        heapq.heappush(self._deadlines, (deadline, next(self._order), store, store.waits))

    def close(self) -> None:
        """Closes all connections."""
        for connection in self._connections.values():
            connection.socket.close()
        self._poll.close()

    def _flush(self) -> None:
        while self.dirty:
            connections, self.dirty = self.dirty, {}
            for connection in connections:
                connection.flush()

    def _expire(self) -> None:
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, store, wait = heapq.heappop(self._deadlines)
            if store.waiting and store.waits == wait:
                store.connection.cancel_wait()


class Connection:
    """One connection to the server, of one simulated rank or of several.

    The server keeps one wait for a connection. So where ranks share one, their waits are held back until all
    of them wait; then one goes out, and the others once it has been answered. They have no timeout there.

    Args:
        loop: serves it.
        host: where the server is.
        port: where it listens.
    """

    def __init__(self, loop: Loop, host: str, port: int) -> None:
        self.loop = loop
        self.running = 0  # ranks of it whose task has not ended
        self.ranks = 0
        self.asked: collections.deque[tuple[Reader | None, WireStore]] = collections.deque()
        self._out: list[bytes] = []
        self._held: list[tuple[bytes, WireStore]] = []
        self._received = b""
        self._cancelled = False
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(_VALIDATE + struct.pack("<I", _MAGIC) + _PING + bytes(4))
        if self.socket.recv(4, socket.MSG_WAITALL) != bytes(4):
            raise RuntimeError("the server does not answer as the TCPStore of torch 2.13 does")
        self.socket.setblocking(False)
        loop.add(self)

    def tell(self, request: bytes) -> None:
        """Sends a request that is not answered."""
        self._out.append(request)
        self.loop.dirty[self] = None

    def ask(self, request: bytes, reader: Reader, store: WireStore) -> None:
        """Sends a request that is answered; the answer resumes the rank."""
        self._out.append(request)
        self.asked.append((reader, store))
        self.loop.dirty[self] = None

    def wait(self, request: bytes, store: WireStore, timeout: float) -> None:
        """Sends a wait; its end resumes the rank with 0, its timeout with 1."""
        if self.ranks > 1:
            self._held.append((request, store))
        else:
            self._out.append(request)
            self.asked.append((None, store))
            if timeout < _LONG:
                self.loop.expire_at(time.monotonic() + timeout, store)
        self.loop.dirty[self] = None

    def cancel_wait(self) -> None:
        """Tells the server that the wait is over."""
        self._cancelled = True
        self.tell(_CANCEL_WAIT)

    def waits_only(self) -> bool:
        """Whether all answers that are due are those of waits."""
        return all(reader is None for reader, _ in self.asked)

    def flush(self) -> None:
        """Sends what is to be sent."""
        if self._held and len(self._held) == self.running and not self.asked:
            request, store = self._held.pop()
            self._out.append(request)
            self.asked.append((None, store))
        if not self._out:
            return
        data = b"".join(self._out)
        self._out.clear()
        sent = self.socket.send(data)
        if sent < len(data):
            self.socket.setblocking(True)
            self.socket.sendall(data[sent:])
            self.socket.setblocking(False)

    def receive(self) -> None:
        """Takes what has come and resumes the ranks that it answers."""
        size = self.socket.recv_into(_space)
        if size == 0:
            raise RuntimeError("the server has closed a connection")
        data = self._received + _space[:size]
        at = 0
        while self.asked:
            reader, store = self.asked[0]
            answer = (reader or _byte)(data, at)
            if answer is None:
                break
            value, after = answer
            store.received += after - at
            at = after
            if reader is None:
                if self._cancelled and value == 0:
                    continue  # it came in time after all; the word for the cancelling is still to come
                self._cancelled = False
                if self._held:
                    self._release_held(store)
            self.asked.popleft()
            store.resume(value)
        self._received = data[at:]

    def _release_held(self, first: WireStore) -> None:
        """Once a wait was answered: so will be all others for the same key, at once."""
        same = [(request, store) for request, store in self._held if request == first.wait_request]
        self._held = [held for held in self._held if held[0] != first.wait_request]
        for request, store in same:
            self._out.append(request)
            self.asked.append((None, store))
            self.loop.dirty[self] = None


class WireStore(StoreMixin):
    """One simulated rank's client. Counts what it does.

    Args:
        connection: its own one, or one that it shares.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        connection.ranks += 1
        self.greenlet: greenlet.greenlet
        self.waiting = False
        self.waits = 0
        self.wait_request = b""
        self.reset_counts()

    def reset_counts(self) -> None:
        """Counts from zero."""
        self.operations = 0  # requests, as the server sees them
        self.sent = 0  # bytes to the server, without those of TCP and IP
        self.received = 0
        self.looks = 0  # waits that timed out

    def resume(self, value: Any) -> None:
        """Goes on with an answer; returns when the rank has its next question."""
        self.greenlet.switch(value)

    def _tell(self, request: bytes) -> None:
        self.operations += 1
        self.sent += len(request)
        self.connection.tell(request)

    def _ask(self, request: bytes, reader: Reader) -> Any:
        self.operations += 1
        self.sent += len(request)
        self.connection.ask(request, reader, self)
        return self.greenlet.parent.switch()

    def set(self, key: str, value: str | bytes) -> None:
        self._tell(_SET + _key(key) + _sized(value))

    def append(self, key: str, value: str | bytes) -> None:
        self._tell(_APPEND + _key(key) + _sized(value))

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        pairs = b"".join(_key(key) + _sized(value) for key, value in zip(keys, values, strict=True))
        self._tell(_MULTI_SET + _size.pack(len(keys)) + pairs)

    def add(self, key: str, amount: int) -> int:
        answer: int = self._ask(_ADD + _key(key) + _number.pack(amount), _integer)
        return answer

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        request = _COMPARE_SET + _key(key) + _sized(expected) + _sized(desired)
        answer: bytes = self._ask(request, _string)
        return answer

    def check(self, keys: list[str]) -> bool:
        request = _CHECK + _size.pack(len(keys)) + b"".join(map(_key, keys))
        return bool(self._ask(request, _byte) == 0)

    def get(self, key: str) -> bytes:
        self.wait([key])  # as torch's client does
        answer: bytes = self._ask(_GET + _key(key), _string)
        return answer

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(_DELETE + _key(key), _integer))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        request = _WAIT + _size.pack(len(keys)) + b"".join(map(_key, keys))
        self.operations += 1
        self.sent += len(request)
        self.waiting, self.wait_request = True, request
        self.waits += 1
        self.connection.wait(request, self, _LONG if timeout is None else timeout.total_seconds())
        outcome = self.greenlet.parent.switch()
        self.waiting = False
        if outcome != 0:
            self.looks += 1
            raise DistStoreError(f"wait {keys} timed out")

    # One request: the same as in the product.
    try_get = TCPStore.try_get
