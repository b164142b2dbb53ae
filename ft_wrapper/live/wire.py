"""How ranks communicate about a state: signed gathers, votes, transfers.

The process group is used only for what comes before connections of our own: Python's calls of sockets end at
once when the rank is interrupted. The receiver connects, and sends a hello that only the two ranks know, for
one connection. Any program may connect.

A process group is not the job's own: whoever writes gloo's keys in the store first takes part in its
collectives. So the result of a collective is read as JSON, and only once its signature is verified.
"""

import base64
import contextlib
import errno
import functools
import hmac
import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .plan import Route
from .tree import Flat, empty_like, extend, joined, layout, pieces, share, spread

Sign = Callable[[str, bytes], bytes]
"""Signs bytes in an iteration: takes what they are, with whose, and them; empty in an open job."""


def unsigned(what: str, said: bytes) -> bytes:
    """How an open job signs."""
    return b""


def verified(sign: Sign, rank: int, what: str, text: bytes) -> bytes:
    """The bytes that an active rank has signed.

    Args:
        sign: of the iteration.
        rank: which one.
        what: they are.
        text: the bytes, with the signature behind them.

    Raises:
        RuntimeError: they are not signed with the job's secret.
    """
    end = len(text) - len(sign("", b""))
    if not hmac.compare_digest(text[end:], sign(what, text[:end])):
        raise RuntimeError(
            f"live state: what came as active rank {rank}'s is not signed with the job's secret, and was not "
            "used: somebody outside the job takes part in this iteration"
        )
    return text[:end]


class Gather:
    """Gathers what all active ranks say; collective.

    Args:
        sign: of the iteration.
        group: of all active ranks, for host memory.
    """

    def __init__(self, sign: Sign, group: Any = None) -> None:
        self._sign, self._group, self._turn = sign, group, 0

    def __call__(self, mine: Any) -> list[Any]:
        """Returns what each active rank says, by rank, as JSON gives it: tuples and sets are lists.

        Args:
            mine: what this rank says.

        Raises:
            RuntimeError: what came as a rank's is not signed with the job's secret.
        """
        said = json.dumps(mine, default=sorted).encode()
        size = max(map(int.from_bytes, self._swap(len(said).to_bytes(8))))
        return [json.loads(one) for one in self._swap(said.ljust(size))]  # JSON may end with spaces

    def _swap(self, said: bytes) -> list[bytes]:
        """Gathers bytes, as many from each rank."""
        self._turn += 1
        whats = [f"gather {self._turn} {rank}" for rank in range(dist.get_world_size())]
        mine = bytearray(said + self._sign(whats[dist.get_rank()], said))
        texts = [bytearray(len(mine)) for _ in whats]
        views = [torch.frombuffer(one, dtype=torch.uint8) for one in (mine, *texts)]
        dist.all_gather(views[1:], views[0], self._group)
        return [verified(self._sign, rank, what, bytes(texts[rank])) for rank, what in enumerate(whats)]


# Connections ------------------------------------------------------------------------------------------------

_HELLO = 16  # bytes
_STRANGERS = 64
"""Connections without a hello that a rank has, besides those that it waits for."""


class Address(NamedTuple):
    """Where a rank listens.

    Args:
        family: of the address.
        name: the address itself.
        nonce: of this listener. In an open job, only the ranks know rank 0's.
    """

    family: int
    name: Any
    nonce: str


Addresses = Sequence[Sequence[Any]]
"""Those of all active ranks, by rank, as they are or as JSON gives them."""


def hello(sign: Sign, purpose: str, nonces: Sequence[str], hearer: int, speaker: int) -> bytes:
    """What opens the one connection of two ranks for a purpose.

    Args:
        sign: of the iteration; where it signs nothing, rank 0's nonce does.
        purpose: of the connection.
        nonces: of all active ranks' addresses.
        hearer: the rank that connects, and says this.
        speaker: the rank that listens.
    """
    what = f"hello {purpose} {nonces[speaker]} {hearer} {speaker}"
    return sign(what, b"") or hmac.digest(nonces[0].encode(), what.encode(), "sha256")[:_HELLO]


class Lines:
    """A rank's connections that are for one purpose.

    Args:
        rank: the caller's active rank.
        host: address to listen on, at which the other ranks reach this one.
        timeout: seconds to wait for another rank.
        sign: of the iteration.

    Attributes:
        purpose: for errors.
        address: for the other ranks.
        to: connections that ranks which hear from this one have opened; by rank.
        since: connections to the ranks that this one hears from.

    Raises:
        OSError: this host cannot listen there.
    """

    purpose = "transfer"

    def __init__(self, rank: int, host: str, timeout: float, sign: Sign = unsigned) -> None:
        self.to: dict[int, socket.socket] = {}
        self.since: dict[int, socket.socket] = {}
        self._rank, self._timeout, self._sign = rank, timeout, sign
        self._accepted = 0
        self._unknown: dict[socket.socket, bytes] = {}  # what they sent; the one silent for longest is first
        self._sockets = contextlib.ExitStack()
        family, _, _, _, name = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        server = socket.create_server(name, family=family, backlog=socket.SOMAXCONN)
        self._server = self._sockets.enter_context(server)
        self._server.setblocking(False)
        self.address = Address(int(family), self._server.getsockname(), secrets.token_hex(16))

    def connect(self, addresses: Addresses, to: Iterable[int], since: Iterable[int]) -> None:
        """Connects to these ranks; collective. Unknown clients do not delay it.

        Args:
            addresses: of all active ranks, by rank.
            to: the ranks that this one will send to.
            since: the ranks that it will hear from.

        Raises:
            ConnectionError: a rank is gone.
            TimeoutError: a rank did not come.
        """
        families, names, nonces = zip(*addresses, strict=True)
        say = functools.partial(hello, self._sign, self.purpose, nonces)
        due = {say(rank, self._rank): rank for rank in to}
        deadline = time.monotonic() + self._timeout
        rank = self._rank
        try:
            for rank in since:
                line = self._own(socket.socket(families[rank]))
                line.connect(tuple(names[rank]))
                line.sendall(say(self._rank, rank))
                self.since[rank] = line
            with selectors.DefaultSelector() as selector:
                selector.register(self._server, selectors.EVENT_READ)
                while due:
                    rank = min(due.values())
                    late = time.monotonic() - deadline
                    ready = selector.select(max(-late, 0))
                    # Late, too: if this process was stopped, the other ranks' hellos are there by now.
                    if not ready or late > self._timeout:
                        raise TimeoutError
                    # Clients come first: so who is silent is known when one too many is accepted.
                    for key, _ in sorted(ready, key=lambda one: one[0].fileobj is self._server):
                        self._welcome(selector, key.fileobj, due)
                self._server.close()
        except OSError as error:
            raise self._failure(rank, error) from error
        finally:
            for line in self._unknown:
                line.close()

    def connect_around(self, addresses: Addresses, steps: Iterable[int]) -> list[tuple[int, int]]:
        """Connects to the ranks these numbers of steps further, and from those as many steps before.

        Returns:
            The two ranks of each step.
        """
        size = len(addresses)
        pairs = [((self._rank + step) % size, (self._rank - step) % size) for step in steps]
        self.connect(addresses, [to for to, _ in pairs], [since for _, since in pairs])
        return pairs

    def _welcome(self, selector: selectors.BaseSelector, line: Any, due: dict[bytes, int]) -> None:
        if line is self._server:
            self._accept(selector, _STRANGERS + len(due))
            return
        said = self._unknown.pop(line)
        more = b""
        with contextlib.suppress(OSError):  # it is gone already
            more = line.recv(_HELLO - len(said))
        said += more
        if more and len(said) < _HELLO:
            self._unknown[line] = said
            return
        selector.unregister(line)
        if said in due:
            self.to[due.pop(said)] = self._own(line)
        else:
            line.close()  # a stranger's, or of another iteration

    def _accept(self, selector: selectors.BaseSelector, most: int) -> None:
        """Accepts a connection; the one that is silent for longest makes room."""
        try:
            line = self._server.accept()[0]
        except (BlockingIOError, ConnectionError):  # it is gone already
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._unknown:
                raise
            most = 0
        else:
            line.setblocking(False)
            self._accepted += 1
            self._unknown[line] = b""
            selector.register(line, selectors.EVENT_READ)
        if len(self._unknown) > most:
            silent = next(iter(self._unknown))
            del self._unknown[silent]
            selector.unregister(silent)
            silent.close()

    def _own(self, line: socket.socket) -> socket.socket:
        line.settimeout(self._timeout)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small messages must not wait
        return self._sockets.enter_context(line)

    def _failure(self, rank: int, error: OSError) -> OSError:
        """Names the rank at the other end of a connection that has failed."""
        if isinstance(error, TimeoutError):
            strangers = self._accepted - len(self.to)
            text = f"active rank {rank} has not come to a {self.purpose} in {self._timeout:g} s"
            return TimeoutError(f"{text}; strangers came: {strangers}" if strangers else text)
        return ConnectionError(f"active rank {rank} is gone: no connection for a {self.purpose} ({error})")

    def abort(self) -> None:
        """Ends this rank's waits, from any thread. Other ranks do not notice."""
        for line in [self._server, *self.to.values(), *self.since.values()]:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Closes the connections. A rank that still waits for this one fails."""
        self._sockets.close()


# Votes ------------------------------------------------------------------------------------------------------
#
# The vote is the one wait of a step that nothing hides. Gloo's all-reduce goes around the ring twice, with a
# thread on the way at each rank. Here a vote takes log2(ranks) messages in sequence, all in the caller's
# thread, and ends at once when the rank is interrupted.

Values = tuple[int, ...]

_VALUES = struct.Struct("!qqqq")
_SIZE = struct.Struct("!Q")


class Ballot(Lines):
    """A rank's connections for the votes of one iteration.

    Votes go by dissemination: in round k each rank sends what it knows to the rank 2**k further, and hears
    from the one 2**k before. After the last round it has heard of all. See Hensgen, Finkel, Manber: Two
    algorithms for barrier synchronization, International Journal of Parallel Programming 17(1), 1988.
    """

    purpose = "vote"

    def open(self, addresses: Addresses) -> None:
        """Connects; all active ranks call it.

        Args:
            addresses: of all active ranks, by rank.

        Raises:
            ConnectionError: a rank is gone.
            TimeoutError: a rank did not come.
        """
        steps = [1 << number for number in range((len(addresses) - 1).bit_length())]
        self._rounds = self.connect_around(addresses, steps)

    def vote(self, values: Values) -> Values:
        """Returns once all ranks have called it.

        Args:
            values: this rank's.

        Returns:
            The least of all ranks', for each.

        Raises:
            ConnectionError: a rank is gone.
            TimeoutError: a rank did not come.
        """
        for to, since in self._rounds:
            self._say(to, _VALUES.pack(*values))
            values = tuple(map(min, values, _VALUES.unpack(self._hear(since, _VALUES.size))))
        return values

    def tell(self, said: bytes) -> bytes:
        """Broadcasts bytes from rank 0, along a binomial tree of the votes' connections; collective.

        Args:
            said: rank 0's; ignored on the other ranks.

        Returns:
            What rank 0 said.

        Raises:
            ConnectionError: a rank is gone.
            TimeoutError: a rank did not come.
        """
        depth = self._rank.bit_length()
        if self._rank:
            _, since = self._rounds[depth - 1]
            (size,) = _SIZE.unpack(self._hear(since, _SIZE.size))
            said = self._hear(since, size)
        for to, _ in self._rounds[depth:]:
            if to > self._rank:  # otherwise it has wrapped around
                self._say(to, _SIZE.pack(len(said)) + said)
        return said

    def _say(self, to: int, said: bytes) -> None:
        try:
            self.to[to].sendall(said)
        except OSError as error:
            raise self._failure(to, error) from error

    def _hear(self, since: int, size: int) -> bytes:
        said = bytearray()
        try:
            while len(said) < size:
                more = self.since[since].recv(size - len(said))
                if not more:
                    raise ConnectionError("closed by the peer")
                said += more
        except OSError as error:
            raise self._failure(since, error) from error
        return bytes(said)


# Transfers --------------------------------------------------------------------------------------------------
#
# A rank does all its sending and receiving with one selector, in the caller's thread. So it leaves nothing
# behind but sockets, which a ``with`` block closes whatever happens. A receiver opens a connection to each
# holder. The holder sends its part of the bytes and the part's checksum, and the receiver confirms with one
# byte.

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
    """

    flat: Flat | None = None
    bytes: int = 0


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
    flat = source() if any(rank in route.holders for route in routes) else Flat(b"", [])
    is_first = any(route.holders[0] == rank for route in routes)
    received = Flat(b"", [])
    going, coming = dict[int, _Part](), dict[int, _Part]()
    with contextlib.closing(Lines(rank, host, timeout, sign)) as lines:
        skeleton = base64.b64encode(flat.skeleton).decode() if is_first else ""
        offer = lines.address, layout(flat.tensors), skeleton
        addresses, layouts, skeletons = zip(*gather(offer), strict=True)
        for route in routes:
            # The same state may be laid out in another way: tensors that share memory at one holder need not
            # at another. Such a holder does not send.
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
    return Moved(received if coming else None, total)


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
        """Sends or receives what it can without waiting.

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
            # Taken before it reads: if this process was stopped, the other ranks' bytes are there by now.
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
