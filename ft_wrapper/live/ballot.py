"""Votes of all active ranks, over connections of their own.

The vote is the one wait of a step that nothing hides. Gloo's all-reduce goes around the ring twice, with a
thread on the way at each rank. Here a vote takes log2 of the number of ranks messages one after the other,
all in the caller's thread, and ends at once when the rank is interrupted.
"""

import contextlib
import dataclasses
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

Values = tuple[int, int, int, int]

_NONCE_SIZE = 16
_HELLO = struct.Struct(f"!{_NONCE_SIZE}sI")  # nonce, number of the round
_VALUES = struct.Struct("!qqqq")
_HELLO_TIMEOUT = 5.0  # seconds; who connects says it at once, unless it is a stranger


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a rank listens.

    Args:
        family: of the address.
        name: the address itself.
        nonce: opens all connections, if this is rank 0's.
    """

    family: int
    name: Any
    nonce: bytes


@dataclasses.dataclass(frozen=True)
class _Round:
    """A round of a vote.

    Args:
        receiver: the rank that this one sends to.
        sender: the rank that it hears from.
    """

    receiver: int
    sender: int
    to: socket.socket
    since: socket.socket


class Ballot:
    """A rank's connections for the votes of one iteration.

    Votes go by dissemination: in round k each rank sends what it knows to the rank 2**k further, and hears
    from the one 2**k before. After the last round it has heard of all. See Hensgen, Finkel, Manber: Two
    algorithms for barrier synchronization, International Journal of Parallel Programming 17(1), 1988.

    Args:
        rank: the caller's active rank.
        host: address to listen on, at which the other ranks reach this one.
        timeout: seconds to wait for another rank.

    Attributes:
        address: for the others.

    Raises:
        OSError: this host cannot listen there.
    """

    def __init__(self, rank: int, host: str, timeout: float) -> None:
        self._rank = rank
        self._timeout = timeout
        self._rounds: list[_Round] = []
        self._sockets = contextlib.ExitStack()
        family, _, _, _, name = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._server = self._sockets.enter_context(socket.create_server(name, family=family, backlog=128))
        self.address = Address(int(family), self._server.getsockname(), secrets.token_bytes(_NONCE_SIZE))

    def open(self, addresses: Sequence[Address]) -> None:
        """Connects; all active ranks call it.

        Args:
            addresses: of all active ranks, by rank.

        Raises:
            ConnectionError: a rank is gone.
            TimeoutError: a rank did not come.
        """
        size, nonce = len(addresses), addresses[0].nonce
        steps = [1 << number for number in range((size - 1).bit_length())]
        receivers = [(self._rank + step) % size for step in steps]
        senders = [(self._rank - step) % size for step in steps]
        lines = []
        for number, receiver in enumerate(receivers):
            address = addresses[receiver]
            line = self._sockets.enter_context(socket.socket(address.family, socket.SOCK_STREAM))
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.settimeout(self._timeout)
            try:
                line.connect(address.name)
                line.sendall(_HELLO.pack(nonce, number))
            except OSError as error:
                raise self._failure(receiver, error) from error
            lines.append(line)
        came: dict[int, socket.socket] = {}
        deadline = time.monotonic() + self._timeout
        while len(came) < len(steps):
            try:
                number, line = self._welcome(nonce, deadline)
            except OSError as error:
                missing = next(rank for number, rank in enumerate(senders) if number not in came)
                raise self._failure(missing, error) from error
            came[number] = line
        self._server.close()
        self._rounds = [
            _Round(receiver, sender, lines[number], came[number])
            for number, (receiver, sender) in enumerate(zip(receivers, senders, strict=True))
        ]

    def _welcome(self, nonce: bytes, deadline: float) -> tuple[int, socket.socket]:
        """Waits for a connection of this iteration; returns its round."""
        while True:
            self._server.settimeout(max(deadline - time.monotonic(), 0.001))
            line = self._sockets.enter_context(self._server.accept()[0])
            line.settimeout(_HELLO_TIMEOUT)
            with contextlib.suppress(OSError):
                said, number = _HELLO.unpack(_read(line, _HELLO.size))
                if secrets.compare_digest(said, nonce):
                    line.settimeout(self._timeout)
                    return number, line
            line.close()  # a stranger's, or of another iteration

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
        for each in self._rounds:
            try:
                each.to.sendall(_VALUES.pack(*values))
            except OSError as error:
                raise self._failure(each.receiver, error) from error
            try:
                heard = self._hear(each.since)
            except OSError as error:
                raise self._failure(each.sender, error) from error
            one, two, three, four = map(min, values, heard)
            values = one, two, three, four
        return values

    def _hear(self, line: socket.socket) -> Values:
        heard: Values = _VALUES.unpack(_read(line, _VALUES.size))
        return heard

    def _failure(self, rank: int, error: OSError) -> OSError:
        if isinstance(error, TimeoutError):
            return TimeoutError(f"active rank {rank} has not voted within {self._timeout:g} s")
        return ConnectionError(f"active rank {rank} is gone: its connection for votes is closed ({error})")

    def abort(self) -> None:
        """Ends what this rank waits for, from any thread. Other ranks do not notice."""
        for line in (self._server, *(one.since for one in self._rounds)):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Closes the connections. A rank that still votes fails."""
        self._sockets.close()


def _read(line: socket.socket, size: int) -> bytes:
    said = b""
    while len(said) < size:
        more = line.recv(size - len(said))
        if not more:
            raise ConnectionError("closed by the peer")
        said += more
    return said
