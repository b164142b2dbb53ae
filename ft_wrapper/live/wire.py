"""Connections from rank to rank, of our own.

The process group is not used: Python's calls of sockets end at once when the rank is interrupted. Who
is to receive connects, and says a nonce that the ranks have exchanged and its rank.
"""

import contextlib
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

_HELLO = struct.Struct("!16sI")  # nonce, rank of who connects


class Address(NamedTuple):
    """Where a rank listens.

    Args:
        family: of the address.
        name: the address itself.
        nonce: opens all connections, if this is rank 0's.
    """

    family: int
    name: Any
    nonce: bytes


class Lines:
    """A rank's connections that are for one purpose.

    Args:
        rank: the caller's active rank.
        host: address to listen on, at which the other ranks reach this one.
        timeout: seconds to wait for another rank.

    Attributes:
        purpose: for errors.
        address: for the others.
        to: connections to the ranks that hear from this one, who have opened them; by rank.
        since: connections to the ranks that this one hears from.

    Raises:
        OSError: this host cannot listen there.
    """

    purpose = "transfer"

    def __init__(self, rank: int, host: str, timeout: float) -> None:
        self.to: dict[int, socket.socket] = {}
        self.since: dict[int, socket.socket] = {}
        self._rank, self._timeout = rank, timeout
        self._sockets = contextlib.ExitStack()
        family, _, _, _, name = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._server = self._sockets.enter_context(socket.create_server(name, family=family, backlog=128))
        self._server.setblocking(False)
        self.address = Address(int(family), self._server.getsockname(), secrets.token_bytes(16))

    def connect(self, addresses: Sequence[Address], to: Iterable[int], since: Iterable[int]) -> None:
        """Connects to these ranks; collective. Unknown clients do not delay it.

        Args:
            addresses: of all active ranks, by rank.
            to: the ranks that this one will send to.
            since: the ranks that it will hear from.

        Raises:
            ConnectionError: a rank is gone.
            TimeoutError: a rank did not come.
        """
        hellos = [_HELLO.pack(addresses[0].nonce, rank) for rank in range(len(addresses))]
        due = {hellos[rank]: rank for rank in to}
        deadline = time.monotonic() + self._timeout
        rank = self._rank
        try:
            for rank in since:
                line = self._own(socket.socket(addresses[rank].family))
                line.connect(addresses[rank].name)
                line.sendall(hellos[self._rank])
                self.since[rank] = line
            with selectors.DefaultSelector() as selector:
                selector.register(self._server, selectors.EVENT_READ, self._server)
                while due:
                    rank = min(due.values())
                    ready = selector.select(max(deadline - time.monotonic(), 0))
                    if not ready:
                        raise TimeoutError
                    for key, _ in ready:
                        self._welcome(selector, key.data, due)
                for key in selector.get_map().values():
                    key.data.close()  # silent clients, and the server
        except OSError as error:
            raise self._failure(rank, error) from error

    def connect_around(self, addresses: Sequence[Address], steps: Iterable[int]) -> list[tuple[int, int]]:
        """Connects to the ranks so many steps further, and from those so many steps before.

        Returns:
            The two ranks of each step.
        """
        size = len(addresses)
        pairs = [((self._rank + step) % size, (self._rank - step) % size) for step in steps]
        self.connect(addresses, [to for to, _ in pairs], [since for _, since in pairs])
        return pairs

    def _welcome(self, selector: selectors.BaseSelector, line: socket.socket, due: dict[bytes, int]) -> None:
        if line is self._server:
            with contextlib.suppress(BlockingIOError, ConnectionError):  # it is gone already
                line = self._own(line.accept()[0])
                selector.register(line, selectors.EVENT_READ, line)
            return
        selector.unregister(line)
        hello = b""
        with contextlib.suppress(ConnectionError):
            hello = line.recv(_HELLO.size)  # all of it: so few bytes are one packet
        if hello in due:
            self.to[due.pop(hello)] = line
        else:
            line.close()  # a stranger's, or of another iteration

    def _own(self, line: socket.socket) -> socket.socket:
        line.settimeout(self._timeout)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what is small is not to wait
        return self._sockets.enter_context(line)

    def _failure(self, rank: int, error: OSError) -> OSError:
        """Names the rank at the other end of a connection that has failed."""
        if isinstance(error, TimeoutError):
            return TimeoutError(f"active rank {rank} has not come to a {self.purpose} in {self._timeout:g} s")
        return ConnectionError(f"active rank {rank} is gone: no connection for a {self.purpose} ({error})")

    def abort(self) -> None:
        """Ends what this rank waits for, from any thread. Other ranks do not notice."""
        for line in [self._server, *self.to.values(), *self.since.values()]:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Closes the connections. A rank that still waits for this one fails."""
        self._sockets.close()
