"""Transfers of states between ranks, over sockets of our own.

The process group is not used: Python's calls of sockets end at once when the rank is interrupted. A rank
does all its sending and receiving with one selector, in the caller's thread. So it leaves nothing behind but
sockets, which a ``with`` block closes whatever happens.

A receiver opens a connection to each holder and says the nonce of this move and its rank. The holder sends
its part of the bytes and the part's checksum, and the receiver confirms with one byte.
"""

import contextlib
import dataclasses
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from .plan import Route
from .tree import Flat, empty_like, extend, joined, layout, pieces, share, spread

_NONCE_SIZE = 16
_HELLO = struct.Struct(f"!{_NONCE_SIZE}sI")  # nonce, rank of the receiver
_CHECKSUM = struct.Struct("!Q")
_CONFIRMED = b"\1"

_Task = Generator[int, None, None]
"""What is done with one socket: yields the event that it waits for, and goes on once it is there."""


@dataclasses.dataclass(frozen=True)
class Moved:
    """What a move did on this rank.

    Args:
        flat: what was received, in memory of its own; None if nothing was.
        bytes: how many were sent and received.
        seconds: how long it took.
    """

    flat: Flat | None = None
    bytes: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class _Offer:
    """What a rank tells all others before a move.

    Args:
        nonce: rank 0's opens all connections.
        address: family and address where a sender listens.
        layout: of a sender's tensors.
        skeleton: of a sender's state, if some rank receives it from this one first.
    """

    nonce: bytes
    address: tuple[int, Any] | None = None
    layout: tuple[int, int] = (0, 0)
    skeleton: bytes | None = None


def move(
    routes: Sequence[Route],
    rank: int,
    source: Callable[[], Flat],
    gather: Callable[[object], list[Any]],
    *,
    host: str,
    timeout: float,
    at: Callable[[str], None] = lambda point: None,
) -> Moved:
    """Carries out the transfers of a plan; all active ranks call it with the same routes.

    Each holder of a route sends an equal part, and the receiver reads from all at once. A sender returns
    once all its receivers have confirmed. Its state must not change meanwhile.

    Args:
        routes: the transfers; without any it returns at once.
        rank: the caller's active rank.
        source: gives the caller's state; called only if it sends.
        gather: an all-gather over all active ranks, in their order.
        host: address to listen on, at which the other ranks reach this one.
        timeout: seconds without a single byte from or to a rank after which it counts as stalled.
        at: called with ``"transfer"`` after each piece sent and each received, for tests.

    Raises:
        ConnectionError: a rank has closed its connection, or could not be reached.
        TimeoutError: ranks have stalled.
        RuntimeError: what a rank sent has another checksum.
    """
    if not routes:
        return Moved()
    began = time.monotonic()
    sends = any(rank in route.holders for route in routes)
    flat = source() if sends else None
    received: Flat | None = None
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(host)) if sends else None
        offers: list[_Offer] = gather(_offer(routes, rank, server, flat))
        exchange = _Exchange(stack, rank, offers[0].nonce, timeout, at)
        for route in routes:
            first = offers[route.holders[0]]
            # The same state may be laid out in another way: what shares its memory at one holder need not
            # at another. Who has it so does not send.
            holders = [holder for holder in route.holders if offers[holder].layout == first.layout]
            if route.receiver == rank and first.skeleton is not None:
                received = empty_like(first.skeleton)
            for index, holder in enumerate(holders):
                if route.receiver == rank and received is not None:
                    coming = _Part(holder, "sent", received.tensors, index, len(holders))
                    exchange.receive(coming, offers[holder])
                elif holder == rank and flat is not None:
                    exchange.send(_Part(route.receiver, "taken", flat.tensors, index, len(holders)))
        exchange.run(server)
    return Moved(received, exchange.bytes, time.monotonic() - began)


def _listen(host: str) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family)


def _offer(routes: Sequence[Route], rank: int, server: socket.socket | None, flat: Flat | None) -> _Offer:
    nonce = secrets.token_bytes(_NONCE_SIZE) if rank == 0 else b""
    if server is None or flat is None:
        return _Offer(nonce)
    is_first = any(route.holders[0] == rank for route in routes)
    return _Offer(
        nonce,
        (int(server.family), server.getsockname()),
        layout(flat.tensors),
        flat.skeleton if is_first else None,
    )


class _Part:
    """A part of a state, on its way from or to another rank.

    Args:
        rank: the other one; -1 while it has not said who it is.
        verb: what the other one does with it.
        tensors: all of the state.
        index: which part.
        count: of how many.

    Attributes:
        pieces: all of it.
        done: bytes of the pieces that are through.
        heard: when its last byte came or went.
    """

    def __init__(
        self, rank: int, verb: str, tensors: Sequence[torch.Tensor] = (), index: int = 0, count: int = 1
    ) -> None:
        begin, end = share(tensors, index, count)
        self.rank = rank
        self.pieces = pieces(tensors, begin, end)
        self.done = 0
        self.heard = time.monotonic()
        self._verb = verb
        self._size = end - begin

    def read(self, line: socket.socket, into: memoryview | bytearray) -> _Task:
        """Fills the memory with what comes."""
        rest = memoryview(into)
        while rest:
            try:
                count = line.recv_into(rest)
            except BlockingIOError:
                yield selectors.EVENT_READ
                continue
            except OSError as error:
                raise self.gone() from error
            if not count:
                raise self.gone()
            rest = rest[count:]
            self.heard = time.monotonic()

    def write(self, line: socket.socket, data: memoryview | bytearray | bytes) -> _Task:
        """Sends all of it."""
        rest = memoryview(data)
        while rest:
            try:
                count = line.send(rest)
            except BlockingIOError:
                yield selectors.EVENT_WRITE
                continue
            except OSError as error:
                raise self.gone() from error
            rest = rest[count:]
            self.heard = time.monotonic()

    def gone(self) -> ConnectionError:
        """The error of a connection that is closed or cannot be opened."""
        return ConnectionError(f"rank {self.rank} is gone: {self.progress}")

    @property
    def progress(self) -> str:
        """How far it has come."""
        return f"it had {self._verb} {self.done / 1e6:.1f} of {self._size / 1e6:.1f} MB"


class _Exchange:
    """All that a rank sends and receives in a move.

    Args:
        stack: closes the sockets.
        rank: the caller's active rank.
        nonce: opens the connections of this move.
        timeout: seconds without a byte until a part counts as stalled.
        at: called after each piece.

    Attributes:
        bytes: sent and received so far.
    """

    def __init__(
        self, stack: contextlib.ExitStack, rank: int, nonce: bytes, timeout: float, at: Callable[[str], None]
    ) -> None:
        self.bytes = 0
        self._stack = stack
        self._rank = rank
        self._nonce = nonce
        self._timeout = timeout
        self._at = at
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._open: set[_Part] = set()
        self._expected: dict[int, _Part] = {}  # by receiver: those that have not connected

    def receive(self, part: _Part, offer: _Offer) -> None:
        """Begins to receive a part from the rank that made the offer."""
        family, address = offer.address or (socket.AF_INET, None)
        self._open.add(part)
        line = self._stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        self._start(line, self._receive(line, address, part))

    def send(self, part: _Part) -> None:
        """Will send a part, once its receiver connects."""
        self._open.add(part)
        self._expected[part.rank] = part

    def run(self, server: socket.socket | None) -> None:
        """Sends and receives until all parts are through.

        Args:
            server: where this rank's receivers connect.
        """
        if server is not None:
            self._start(server, self._accept(server))
        while self._open:
            # Taken before it reads: if this process was stopped, the others' bytes are there by now.
            since = time.monotonic() - self._timeout
            patience = min(part.heard for part in self._open) - since
            for key, _ in self._selector.select(max(patience, 0)):
                self._resume(key)
            stalled = sorted((part for part in self._open if part.heard < since), key=lambda part: part.rank)
            if stalled:
                names = ", ".join(f"rank {part.rank} ({part.progress})" for part in stalled)
                raise TimeoutError(f"not a byte for {self._timeout:g} s between this rank and {names}")

    # ---- tasks

    def _start(self, line: socket.socket, task: _Task) -> None:
        line.setblocking(False)
        events = next(task, 0)
        if events:
            self._selector.register(line, events, (line, task))
        else:
            line.close()

    def _resume(self, key: selectors.SelectorKey) -> None:
        line, task = key.data
        events = next(task, 0)
        if not events:
            self._selector.unregister(line)
            line.close()
        elif events != key.events:
            self._selector.modify(line, events, key.data)

    def _receive(self, line: socket.socket, address: Any, part: _Part) -> _Task:
        try:
            line.connect(address)
        except BlockingIOError:
            yield selectors.EVENT_WRITE  # connected, or writing says why not
        except OSError as error:
            raise part.gone() from error
        yield from part.write(line, _HELLO.pack(self._nonce, self._rank))
        total = 0
        for views in part.pieces:
            piece = views[0] if len(views) == 1 else bytearray(sum(map(len, views)))
            yield from part.read(line, piece)
            if len(views) > 1:
                spread(piece, views)
            total = extend(total, piece)
            self._count(part, piece)
            yield selectors.EVENT_READ  # a piece from each in turn
        said = bytearray(_CHECKSUM.size)
        yield from part.read(line, said)
        if said != _CHECKSUM.pack(total):
            raise RuntimeError(f"what rank {part.rank} sent was damaged on the way")
        yield from part.write(line, _CONFIRMED)
        self._open.discard(part)

    def _accept(self, server: socket.socket) -> _Task:
        while True:
            yield selectors.EVENT_READ
            try:
                line = self._stack.enter_context(server.accept()[0])
            except (BlockingIOError, ConnectionError):
                continue  # it is gone already
            self._start(line, self._send(line))

    def _send(self, line: socket.socket) -> _Task:
        hello = bytearray(_HELLO.size)
        try:
            yield from _Part(-1, "said").read(line, hello)
        except ConnectionError:
            return
        nonce, rank = _HELLO.unpack(hello)
        if not secrets.compare_digest(nonce, self._nonce) or rank not in self._expected:
            return  # not of this move
        part = self._expected.pop(rank)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the checksum is not to wait
        total = 0
        for views in part.pieces:
            piece = joined(views)
            total = extend(total, piece)
            yield from part.write(line, piece)
            self._count(part, piece)
            yield selectors.EVENT_WRITE
        yield from part.write(line, _CHECKSUM.pack(total))
        yield from part.read(line, bytearray(len(_CONFIRMED)))
        self._open.discard(part)

    def _count(self, part: _Part, piece: memoryview | bytearray) -> None:
        part.done += len(piece)
        self.bytes += len(piece)
        self._at("transfer")
