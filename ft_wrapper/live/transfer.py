"""Transfers of states between ranks.

A rank does all its sending and receiving with one selector, in the caller's thread. So it leaves nothing
behind but sockets, which a ``with`` block closes whatever happens.

A receiver opens a connection to each holder. The holder sends its part of the bytes and the part's checksum,
and the receiver confirms with one byte.
"""

import base64
import contextlib
import selectors
import struct
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .gathering import Sign, unsigned
from .plan import Route
from .tree import Flat, empty_like, extend, joined, layout, pieces, share, spread
from .wire import Lines

_CHECKSUM = struct.Struct("!Q")
_CONFIRMED = b"\1"
_END = _CHECKSUM.size + len(_CONFIRMED)
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_READ | selectors.EVENT_WRITE

Seam = Callable[[str], None]
Tensors = list[torch.Tensor]
_Part = tuple[int, int]
# What goes through a connection: yields memory that is to be filled (`_READ`) or sent (`_WRITE`).
_Steps = Generator[tuple[int, memoryview | bytearray | bytes], None, None]


def _idle(point: str) -> None:
    """Does nothing; tests inject faults here."""


class Moved(NamedTuple):
    """What a move did on this rank.

    Args:
        flat: what was received, in memory of its own; None if nothing was.
        bytes: how many were sent and received.
        seconds: how long it took.
    """

    flat: Flat | None = None
    bytes: int = 0
    seconds: float = 0.0


def move(
    routes: Sequence[Route],
    rank: int,
    source: Callable[[], Flat],
    gather: Callable[[object], list[Any]],
    *,
    host: str,
    timeout: float,
    sign: Sign = unsigned,
    at: Seam = _idle,
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
        sign: of the iteration.
        at: called with ``"transfer"`` after each piece sent and each received, for tests.

    Raises:
        ConnectionError: a rank has closed its connection, or could not be reached.
        TimeoutError: ranks have stalled.
        RuntimeError: what a rank sent has another checksum.
    """
    if not routes:
        return Moved()
    began = time.monotonic()
    flat = source() if any(rank in route.holders for route in routes) else Flat(b"", [])
    is_first = any(route.holders[0] == rank for route in routes)
    received = Flat(b"", [])
    going, coming = dict[int, _Part](), dict[int, _Part]()
    with contextlib.closing(Lines(rank, host, timeout, sign)) as lines:
        skeleton = base64.b64encode(flat.skeleton).decode() if is_first else ""
        offer = lines.address, layout(flat.tensors), skeleton
        addresses, layouts, skeletons = zip(*gather(offer), strict=True)
        for route in routes:
            # The same state may be laid out in another way: what shares its memory at one holder need not
            # at another. Who has it so does not send.
            holders = [one for one in route.holders if layouts[one] == layouts[route.holders[0]]]
            parts = {holder: (index, len(holders)) for index, holder in enumerate(holders)}
            if route.receiver == rank:
                received, coming = empty_like(base64.b64decode(skeletons[holders[0]])), parts
            elif rank in parts:
                going[route.receiver] = parts[rank]
        lines.connect(addresses, going, coming)
        streams = [Stream(lines, to, True, flat.tensors, part, at) for to, part in going.items()]
        streams += [Stream(lines, of, False, received.tensors, part, at) for of, part in coming.items()]
        carry(streams, timeout)
    total = sum(stream.done - _END for stream in streams)
    return Moved(received if coming else None, total, time.monotonic() - began)


class Stream:
    """Tensors, or a part of all their bytes, on the way to or from another rank.

    Args:
        lines: has the connection.
        rank: the other one.
        sends: this rank does; otherwise it receives.
        tensors: all of them.
        part: its number, and of how many.
        at: called after each piece.

    Attributes:
        rank: the other one.
        line: the connection.
        event: what it waits for; 0 once it is through.
        heard: when its last byte came or went.
        done: bytes that are through, with the end's.
    """

    def __init__(
        self, lines: Lines, rank: int, sends: bool, tensors: Tensors, part: _Part = (0, 1), at: Seam = _idle
    ) -> None:
        begin, end = share(tensors, *part)
        through = pieces(tensors, begin, end)
        self.rank, self.line, self.heard = rank, (lines.to if sends else lines.since)[rank], time.monotonic()
        self._verb, self.done, self._size = "taken" if sends else "sent", 0, end - begin
        self._steps = _send(through, at) if sends else _receive(rank, through, at)
        self._advance()

    def _advance(self) -> None:
        self.event, memory = next(self._steps, (0, b""))
        self._rest = memoryview(memory)

    def go_on(self, ready: int) -> None:
        """Sends or receives what can be without waiting.

        Args:
            ready: the events that have come.

        Raises:
            ConnectionError: the other rank has closed its connection.
        """
        count = 0
        try:
            if self.event == _READ:
                count = self.line.recv_into(self._rest)
            elif not ready & _READ:  # otherwise it is closed: nothing comes before all is sent
                count = self.line.send(self._rest)
            if not count:
                raise ConnectionError("closed by the peer")
        except OSError as error:
            raise ConnectionError(f"rank {self.rank} is gone: {self.progress}") from error
        self.heard = time.monotonic()
        self.done += count
        self._rest = self._rest[count:]
        if not self._rest:
            self._advance()

    @property
    def progress(self) -> str:
        """How far it has come."""
        return f"it had {self._verb} {self.done / 1e6:.1f} of {self._size / 1e6:.1f} MB"


def carry(streams: Iterable[Stream], timeout: float) -> None:
    """Sends and receives until all streams are through.

    Args:
        streams: each with a connection of its own.
        timeout: seconds without a byte until one counts as stalled.

    Raises:
        ConnectionError: a rank has closed its connection.
        TimeoutError: ranks have stalled.
        RuntimeError: what a rank sent has another checksum.
    """
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.line, stream.event, stream)
        while left := [key.data for key in selector.get_map().values()]:
            # Taken before it reads: if this process was stopped, the others' bytes are there by now.
            since = time.monotonic() - timeout
            last = min(left, key=lambda stream: stream.heard)
            for key, ready in selector.select(max(last.heard - since, 0)):
                stream = key.data
                stream.go_on(ready)
                if not stream.event:
                    selector.unregister(stream.line)
                elif stream.event != key.events:
                    selector.modify(stream.line, stream.event, stream)
            if last.heard < since:
                who = f"this rank and rank {last.rank} ({last.progress})"
                raise TimeoutError(f"not a byte for {timeout:g} s between {who}")


def _send(through: Iterable[list[memoryview]], at: Seam) -> _Steps:
    total = 0
    for views in through:
        piece = joined(views)
        total = extend(total, piece)
        yield _WRITE, piece
        at("transfer")
    yield _WRITE, _CHECKSUM.pack(total)
    yield _READ, bytearray(len(_CONFIRMED))


def _receive(rank: int, through: Iterable[list[memoryview]], at: Seam) -> _Steps:
    total = 0
    for views in through:
        piece = views[0] if len(views) == 1 else bytearray(sum(map(len, views)))
        yield _READ, piece
        if len(views) > 1:
            spread(piece, views)
        total = extend(total, piece)
        at("transfer")
    said = bytearray(_CHECKSUM.size)
    yield _READ, said
    if said != _CHECKSUM.pack(total):
        raise RuntimeError(f"what rank {rank} sent was damaged on the way")
    yield _WRITE, _CONFIRMED
