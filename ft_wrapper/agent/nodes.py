"""What an agent asks of the other nodes: rounds, news, and how to leave. Here: there are no others."""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import enum
import socket
import threading
from collections.abc import Iterator

from .._addresses import host_port, loopback
from ..exception import StoreError
from ..store import TCPStoreServer
from .round import Round, alone


class What(enum.Enum):
    """What news from the other nodes are about."""

    COME = enum.auto()
    """All nodes meet again: this one ends its ranks, and takes part in the next round."""
    GONE = enum.auto()
    """A node is lost, or has left. The same, unless the ranks of this node have done all they had to."""
    OVER = enum.auto()
    """The job has failed: this node ends its ranks."""
    LOST = enum.auto()
    """No one can be asked any more. The same, unless the ranks of this node have done all they had to."""
    CLOSED = enum.auto()
    """The job has ended, and no one is waited for any more."""


@dataclasses.dataclass(frozen=True)
class News:
    """Something that the other nodes have done.

    Args:
        what: what follows.
        why: for people; empty if there is nothing to say.
    """

    what: What
    why: str = ""


class Inbox:
    """News that other threads have put here, as something that one can wait for with other things."""

    def __init__(self) -> None:
        self._items: collections.deque[tuple[int, News]] = collections.deque()
        self._read_end, self._write_end = socket.socketpair()
        self._read_end.setblocking(False)
        self._write_end.setblocking(False)
        self._lock = threading.Lock()
        self._term = 0
        self._open = True
        self._attended = True
        self._knocks: list[threading.Event] = []

    def fileno(self) -> int:
        """Readable when there are news."""
        return self._read_end.fileno()

    @property
    def term(self) -> int:
        """Which round it is, for `put`."""
        return self._term

    def begin_term(self) -> None:
        """From now on only news of this new round count."""
        with self._lock:
            self._term += 1

    def put(self, term: int, news: News) -> None:
        """Adds news; from any thread, and without harm after the end.

        Args:
            term: the round that they belong to.
            news: what there is.
        """
        with self._lock:
            if not self._open:
                return
            self._items.append((term, news))
            self._wake()

    def take(self) -> list[News]:
        """Takes out the news of this round. Does not block."""
        with self._lock:
            try:
                self._read_end.recv(4096)
            except BlockingIOError:
                pass
            self._answer()
            items = [news for term, news in self._items if term == self._term]
            self._items.clear()
            return items

    def knock(self) -> threading.Event:
        """Wakes anyone who waits for news; from any thread.

        Returns:
            An event that is set once he has looked; or at once, where no one is supposed to.
        """
        answered = threading.Event()
        with self._lock:
            self._knocks.append(answered)
            if self._open and self._attended:
                self._wake()
            else:
                self._answer()
        return answered

    @contextlib.contextmanager
    def unattended(self) -> Iterator[None]:
        """For a while no one looks: something else is waited for, with a timeout of its own."""
        with self._lock:
            self._attended = False
            self._answer()
        try:
            yield
        finally:
            with self._lock:
                self._attended = True

    def close(self) -> None:
        """Lets go of the sockets."""
        with self._lock:
            self._open = False
            self._answer()
            self._read_end.close()
            self._write_end.close()

    def _wake(self) -> None:
        try:
            self._write_end.send(b"!")
        except BlockingIOError:
            pass  # it is readable

    def _answer(self) -> None:
        for answered in self._knocks:
            answered.set()
        self._knocks.clear()


class Nodes(abc.ABC):
    """This node's part among the others, as its agent uses it: in the main thread, but for `inbox`.

    Attributes:
        inbox: news from the others.
    """

    def __init__(self) -> None:
        self.inbox = Inbox()

    @abc.abstractmethod
    def next_round(self) -> Round:
        """Waits until the next round has formed, for as long as that takes. A signal handler may raise in it.

        Raises:
            RendezvousClosedError: the job is over.
            RendezvousGracefulExitError: it is over, and this node was a spare.
            RendezvousError: the round cannot form; says why.
            StoreError: there is no store for the ranks.
            ValueError: something that this node was started with is wrong.
        """

    def has_place(self) -> bool:
        """Whether this node is known to have its place among the others at this time. Bounded.

        Asked before a rank is started again: where the others have taken the node out, it may not know yet,
        and another one may have its ranks.
        """
        return True

    def out_of_reach(self) -> str:
        """Why it could not be found out for long whether this node has its place; empty if it could.

        From memory: about the last look that has ended.
        """
        return ""

    def have_formed(self) -> bool:
        """Whether the ranks are known to have formed a wrapped job. From memory; False if it is not known."""
        return False

    @abc.abstractmethod
    def leave(self, why: str) -> None:
        """A signal ends this node's part: the others go on without it, or hear that they cannot. Bounded.

        Args:
            why: for people.
        """

    @abc.abstractmethod
    def fail(self, why: str) -> None:
        """Ends the job on all nodes. Bounded.

        Args:
            why: for people, on all nodes.
        """

    @abc.abstractmethod
    def await_others(self, *, as_host_only: bool) -> bool:
        """This node has nothing to do any more: begins to wait for the others, who may be busy yet.

        Args:
            as_host_only: this node's ranks are lost; it stays only if the others cannot do without it.

        Returns:
            Whether they are waited for: the end comes as news, `What.CLOSED`.
        """

    @abc.abstractmethod
    def finish(self) -> None:
        """All is done, or this node is needed no more: ends its part. Bounded."""

    def close(self) -> None:
        """Lets go of everything, whatever state it is in."""
        self.inbox.close()


class OneNode(Nodes):
    """No other nodes: this one hosts the store of its ranks, a new one for each round.

    Args:
        nproc: number of ranks.
        address: of this host; the loopback when None, where only this host reaches the store.
        port: where the store listens; 0 for a free port, another one in each round.
    """

    def __init__(self, nproc: int, address: str | None = None, port: int = 0) -> None:
        super().__init__()
        self._nproc = nproc
        self._address = address or loopback()
        self._port = port
        self._server: TCPStoreServer | None = None

    def next_round(self) -> Round:
        self._end_server()
        try:
            server = TCPStoreServer(self._port, self._address, ranks=self._nproc)
        except StoreError as error:
            if not self._port:
                raise
            raise StoreError(
                f"--master-port {self._port} cannot be used on this host: {error.__cause__}; choose another "
                "port, or leave it out"
            ) from error
        self._server = server
        return alone(host_port(self._address, server.port), self._nproc)

    def leave(self, why: str) -> None:
        pass

    def fail(self, why: str) -> None:
        pass

    def await_others(self, *, as_host_only: bool) -> bool:
        return False

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self._end_server()
        super().close()

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
