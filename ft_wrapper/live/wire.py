"""Connections from rank to rank, of our own.

The process group is not used: Python's calls of sockets end at once when the rank is interrupted. Who is to
receive connects, and says a hello that only the two ranks know, for one connection. Anybody may connect.
"""

import contextlib
import errno
import functools
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .gathering import Sign, unsigned

_HELLO = 16  # bytes
_STRANGERS = 64
"""Connections without a hello that a rank has, beside those that it waits for."""


class Address(NamedTuple):
    """Where a rank listens.

    Args:
        family: of the address.
        name: the address itself.
        nonce: of this listener. Rank 0's is what only the ranks know in an open job.
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
        address: for the others.
        to: connections to the ranks that hear from this one, who have opened them; by rank.
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
        self._unknown: dict[socket.socket, bytes] = {}  # their words; who is silent for longest is first
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
                    # Late, too: if this process was stopped, the others' hellos are there by now.
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
        """Connects to the ranks so many steps further, and from those so many steps before.

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
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what is small is not to wait
        return self._sockets.enter_context(line)

    def _failure(self, rank: int, error: OSError) -> OSError:
        """Names the rank at the other end of a connection that has failed."""
        if isinstance(error, TimeoutError):
            strangers = self._accepted - len(self.to)
            text = f"active rank {rank} has not come to a {self.purpose} in {self._timeout:g} s"
            return TimeoutError(f"{text}; strangers came: {strangers}" if strangers else text)
        return ConnectionError(f"active rank {rank} is gone: no connection for a {self.purpose} ({error})")

    def abort(self) -> None:
        """Ends what this rank waits for, from any thread. Other ranks do not notice."""
        for line in [self._server, *self.to.values(), *self.since.values()]:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Closes the connections. A rank that still waits for this one fails."""
        self._sockets.close()
