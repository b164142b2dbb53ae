"""Many clients of one TCPStore in one process: each a store of its own to the protocol's code.

A client of torch's occupies a thread while it waits, so 16,384 of them do not fit into a process. Here each
thread of a simulated rank, and of its monitor, is a greenlet on a `WireStore` that speaks the server's own
language, and one loop serves the sockets of all. What goes over the wire is what torch's client sends for
the same operation, except that requests on a shared connection which are made at the same moment leave in one
piece.
"""

from __future__ import annotations

import collections
import functools
import heapq
import itertools
import random
import select
import socket
import struct
import threading
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
_LIST_KEYS = bytes([17])
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


def _strings(data: bytes, at: int) -> tuple[list[bytes], int] | None:
    number = _integer(data, at)
    if number is None:
        return None
    count, at = number
    found = []
    for _ in range(count):
        one = _string(data, at)
        if one is None:
            return None
        found.append(one[0])
        at = one[1]
    return found, at


def _cancelled(data: bytes, at: int) -> tuple[int, int] | None:
    """Of a wait that was cancelled at once: if the key was there, the word for the cancelling follows."""
    if len(data) <= at:
        return None
    if data[at] == 1:
        return 1, at + 1
    return (1, at + 2) if len(data) > at + 1 else None


def _sized(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return _size.pack(len(data)) + data


@functools.lru_cache(maxsize=256)  # all ranks use the same few
def _key(key: str) -> bytes:
    return _sized(_KEY_PREFIX + key.encode())


class Loop:
    """Serves the connections of a process, and runs its simulated ranks, a greenlet for each thread."""

    def __init__(self) -> None:
        self.dirty: dict[Connection, None] = {}  # have something to send
        self.running = 0  # tasks that have not ended
        self.connections: dict[int, Connection] = {}
        self._hub = greenlet.getcurrent()
        self._poll = select.epoll()
        self._ready: collections.deque[Callable[[], object]] = collections.deque()
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._sentinels: dict[bytes, Sentinel] = {}
        self._idle: list[Connection] = []  # those of sentinels that have been told

    def add(self, connection: Connection) -> None:
        """Serves a connection from now on."""
        self.connections[connection.socket.fileno()] = connection
        self._poll.register(connection.socket, select.EPOLLIN)

    def remove(self, connection: Connection) -> None:
        """Serves it no more."""
        self._poll.unregister(connection.socket)
        del self.connections[connection.socket.fileno()]
        self.dirty.pop(connection, None)

    def spawn(self, task: Callable[[], object]) -> None:
        """Begins something that may use stores and events of this loop, as a thread would."""
        self.call(greenlet.greenlet(task, parent=self._hub).switch)

    def start(self, task: Callable[[], object]) -> None:
        """The same for a task that `run` waits for."""
        self.running += 1

        def run() -> None:
            try:
                task()
            finally:
                self.running -= 1

        self.spawn(run)

    def call(self, function: Callable[[], object]) -> None:
        """Calls a function soon."""
        self._ready.append(function)

    def call_at(self, deadline: float, function: Callable[[], object]) -> None:
        """Calls a function then, in monotonic seconds."""
        heapq.heappush(self._due, (deadline, next(self._order), function))

    def run_until(self, done: Callable[[], bool]) -> None:
        """Serves the ranks until something holds, with all of their requests sent."""
        while True:
            self._advance()
            if done():
                return
            timeout = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            for file, _ in self._poll.poll(timeout, 4096):
                if file in self.connections:
                    self.connections[file].receive()
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()

    def run(self) -> None:
        """Serves the ranks until all of their tasks have ended."""
        self.run_until(lambda: self.running == 0)

    def sentinel(self, request: bytes, near: Connection) -> Sentinel:
        """What waits for a key for all who share connections.

        Args:
            request: the wait.
            near: a connection to the same server.
        """
        found = self._sentinels.get(request)
        if found is None:
            connection = self._idle.pop() if self._idle else Connection(self, *near.address)
            found = self._sentinels[request] = Sentinel(request, connection)
        return found

    def told(self, sentinel: Sentinel) -> None:
        """A sentinel's key is there."""
        del self._sentinels[sentinel.request]
        self._idle.append(sentinel.connection)

    def close(self) -> None:
        """Closes all connections."""
        for connection in self.connections.values():
            connection.socket.close()
        self._poll.close()

    def _advance(self) -> None:
        while self._ready or self.dirty:
            while self._ready:
                self._ready.popleft()()
            connections, self.dirty = self.dirty, {}
            for connection in connections:
                connection.flush()


class Event:
    """What `threading.Event` is to threads. The first wait ends early: those who begin together spread.

    Args:
        loop: runs those who wait.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._is_set = False
        self._waiting: set[Any] = set()
        self._spread = True

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Wakes all who wait."""
        self._is_set = True
        waiting, self._waiting = self._waiting, set()
        for one in waiting:
            self._loop.call(one.switch)

    def clear(self) -> None:
        """Sets it back."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is set, or the time is over; tells whether it is set."""
        if self._is_set:
            return True
        me = greenlet.getcurrent()
        self._waiting.add(me)
        if timeout is not None:
            seconds = timeout * random.random() if self._spread else timeout
            self._spread = False

            def end() -> None:
                if me in self._waiting:
                    self._waiting.discard(me)
                    me.switch()

            self._loop.call_at(time.monotonic() + max(0.0, seconds), end)
        me.parent.switch()
        return self._is_set


class Threading:
    """Stands for the module `threading` in code that is simulated: its threads are greenlets of a loop.

    Args:
        loop: runs them.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)

    def Event(self) -> Event:
        """An event for them."""
        return Event(self._loop)

    def Thread(self, *, target: Callable[..., object], args: Any = (), **_: Any) -> Thread:
        """A thread that is none."""
        return Thread(self._loop, functools.partial(target, *args))


class Thread:
    """What `threading.Thread` stands for here; it cannot be joined.

    Args:
        loop: runs it.
        target: what it runs.
    """

    def __init__(self, loop: Loop, target: Callable[[], object]) -> None:
        self._loop = loop
        self._target = target

    def start(self) -> None:
        """Begins it."""
        self._loop.spawn(self._target)

    def join(self, timeout: float | None = None) -> None:
        """Does not wait."""


class Sentinel:
    """Waits for a key on behalf of all ranks of a process that wait for it on shared connections.

    The server keeps one wait for a connection, in whose answer's way all others would be. So the ranks' own
    waits go out when they are answered at once: when the key is there, or, with a word to cancel them, when
    their time is over.

    Args:
        request: the wait.
        connection: of its own.
    """

    def __init__(self, request: bytes, connection: Connection) -> None:
        self.request = request
        self.connection = connection
        self.waiting: dict[WireStore, None] = {}
        connection.loop.call(lambda: connection.ask(request, _byte, self))

    def resume(self, _: Any) -> None:
        """The key is there."""
        self.connection.loop.told(self)
        waiting, self.waiting = self.waiting, {}
        for store in waiting:
            store.connection.ask(self.request, _byte, store)

    def add(self, store: WireStore, timeout: float) -> None:
        """Waits on behalf of a rank, too."""
        self.waiting[store] = None
        if timeout < _LONG:
            wait = store.waits

            def expire() -> None:
                if store.waits == wait and self.waiting.pop(store, self) is None:
                    store.count_cancel()
                    store.connection.ask(self.request + _CANCEL_WAIT, _cancelled, store)

            self.connection.loop.call_at(time.monotonic() + timeout, expire)

    received = 0  # of no rank


class Connection:
    """One connection to the server, of one simulated client or of several.

    Args:
        loop: serves it.
        host: where the server is.
        port: where it listens.
        is_shared: whether several clients use it.
    """

    def __init__(self, loop: Loop, host: str, port: int, is_shared: bool = False) -> None:
        self.loop = loop
        self.address = host, port
        self.is_shared = is_shared
        self._asked: collections.deque[tuple[Reader | None, WireStore | Sentinel]] = collections.deque()
        self._out: list[bytes] = []
        self._received = b""
        self._cancelled = False
        self.socket = socket.create_connection(self.address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(_VALIDATE + struct.pack("<I", _MAGIC) + _PING + bytes(4))
        if self.socket.recv(4, socket.MSG_WAITALL) != bytes(4):
            raise RuntimeError("the server does not answer as the TCPStore of torch 2.13 does")
        self.socket.setblocking(False)
        loop.add(self)

    def close(self) -> None:
        """Closes it; pending requests get no answer."""
        self.loop.remove(self)
        self.socket.close()

    def tell(self, request: bytes) -> None:
        """Sends a request that is not answered."""
        self._out.append(request)
        self.loop.dirty[self] = None

    def ask(self, request: bytes, reader: Reader, store: WireStore | Sentinel) -> None:
        """Sends a request that is answered; the answer resumes who asked."""
        self._out.append(request)
        self._asked.append((reader, store))
        self.loop.dirty[self] = None

    def wait(self, request: bytes, store: WireStore, timeout: float) -> None:
        """Sends a wait; its end resumes the rank with 0, its timeout with 1."""
        if self.is_shared:
            self.loop.sentinel(request, self).add(store, timeout)
            return
        self._out.append(request)
        self._asked.append((None, store))
        self.loop.dirty[self] = None
        if timeout < _LONG:
            wait = store.waits

            def expire() -> None:
                if store.waiting and store.waits == wait:
                    self._cancelled = True
                    store.count_cancel()
                    self.tell(_CANCEL_WAIT)

            self.loop.call_at(time.monotonic() + timeout, expire)

    def flush(self) -> None:
        """Sends what is to be sent."""
        if not self._out or self.socket.fileno() < 0:
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
        answered: list[tuple[WireStore | Sentinel, Any]] = []
        while self._asked:
            reader, store = self._asked[0]
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
            self._asked.popleft()
            answered.append((store, value))
        self._received = data[at:]
        for store, value in answered:
            store.resume(value)


class WireStore(StoreMixin):
    """One client of a simulated rank: its own, or one of its threads' or its monitor's. Counts what it does.

    Args:
        connection: its own one, or one that it shares.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.is_lost = False
        """Whether its host is: then it gets no more answers, and asks nothing."""
        self.waiting = False
        self.waits = 0
        self._asking: Any = None
        self.reset_counts()

    def reset_counts(self) -> None:
        """Counts from zero."""
        self.operations = 0  # requests, as the server sees them
        self.sent = 0  # bytes to the server, without those of TCP and IP
        self.received = 0
        self.looks = 0  # waits that timed out

    def resume(self, value: Any) -> None:
        """Goes on with an answer; returns when the rank has its next question."""
        if not self.is_lost:
            self._asking.switch(value)

    def count_cancel(self) -> None:
        """Counts the word that a wait is over."""
        self.operations += 1
        self.sent += len(_CANCEL_WAIT)

    def _await(self) -> Any:
        self._asking = greenlet.getcurrent()
        return self._asking.parent.switch()

    def _tell(self, request: bytes) -> None:
        self.operations += 1
        self.sent += len(request)
        self.connection.tell(request)

    def _ask(self, request: bytes, reader: Reader) -> Any:
        self.operations += 1
        self.sent += len(request)
        self.connection.ask(request, reader, self)
        return self._await()

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
        self.waiting = True
        self.waits += 1
        self.connection.wait(request, self, _LONG if timeout is None else timeout.total_seconds())
        outcome = self._await()
        self.waiting = False
        if outcome != 0:
            self.looks += 1
            raise DistStoreError(f"wait {keys} timed out")

    def list_keys(self) -> list[str]:
        answer: list[bytes] = self._ask(_LIST_KEYS, _strings)
        return [key.decode().removeprefix(_KEY_PREFIX.decode()) for key in answer]

    # One request: the same as in the product.
    reads_by_compare_set = TCPStore.reads_by_compare_set
