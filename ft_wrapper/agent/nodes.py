"""What an agent asks of the other nodes: rounds, news, and how to leave. Here: there are no others."""

import collections
import contextlib
import dataclasses
import enum
import socket
import threading
from collections.abc import Callable, Iterator

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousError

from ..exception import StoreError
from ..store import TCPStoreServer
from ..store.address import host_port, loopback
from ..store.bounded import in_background
from .outputs import Failure

EXIT_BARRIER_TIMEOUT = 300.0
"""Seconds for which a node whose ranks are done waits for the others, by default; as in torch's agents."""


class CannotStart(Exception):
    """No rank could be started."""


@dataclasses.dataclass(frozen=True)
class Round:
    """One formation of the job, as one node sees it: from one start of all ranks to the next.

    Args:
        address: ``host:port`` of the store that the ranks of all nodes use.
        world_size: ranks of all nodes.
        base_rank: the first rank of this node, and its slot; those of the others follow.
        group_rank: this node's number.
        group_world_size: number of nodes.
        role_rank: number of the first rank of this node among those of the same role.
        role_world_size: ranks of this role on all nodes.
        formation_size: ranks that the job began with; more may have come later.
        restarts: how often all ranks were restarted, if that is known for all nodes; None if each agent
            counts for itself.
        formed: whether the ranks have formed a wrapped job already, which those of this node are to join.
        node: what to call this node in messages; empty if there is no other.
        agreed_in: address of the store in which wrapped ranks agree, if that is another one; it outlives all
            nodes then.
    """

    address: str
    world_size: int
    base_rank: int
    group_rank: int
    group_world_size: int
    role_rank: int
    role_world_size: int
    formation_size: int
    restarts: int | None = None
    formed: bool = False
    node: str = ""
    agreed_in: str = ""

    @property
    def store(self) -> str:
        """Address of the store in which wrapped ranks agree."""
        return self.agreed_in or self.address

    def rank(self, local_rank: int) -> int:
        """The rank, and slot, of one of this node's ranks."""
        return self.base_rank + local_rank


def alone(address: str, nproc: int) -> Round:
    """The round of a job on one node: its ranks are all there are."""
    return Round(address, nproc, 0, 0, 1, 0, nproc, nproc)


@dataclasses.dataclass(frozen=True)
class End:
    """How the ranks of this node ended, for a round or for good.

    Args:
        failures: those that count, in the order of happening.
        signum: the signal that ended the job, or None.
        forgiven: those that the job finished without.
        again: whether all are to be restarted, in the next round.
        failed: why the job cannot go on, on any node; empty if it can, or has finished.
        ended_by: why another node has ended the job; empty if none has.
        error_elsewhere: the error of another node's rank that ended the job, if that is why all failed here.
        lost: whether no rank of this node is left in a job that goes on elsewhere.
        closed: whether the other nodes have stopped waiting for each other.
        node: what this node is called; empty if there is no other.
    """

    failures: list[Failure] = dataclasses.field(default_factory=list)
    signum: int | None = None
    forgiven: list[Failure] = dataclasses.field(default_factory=list)
    again: bool = False
    failed: str = ""
    ended_by: str = ""
    error_elsewhere: str = ""
    lost: bool = False
    closed: bool = False
    node: str = ""


# The others ------------------------------------------------------------------------------------------------


class What(enum.Enum):
    """What news from the other nodes is about."""

    COME = enum.auto()
    """All nodes meet again: this one ends its ranks, and takes part in the next round."""
    GONE = enum.auto()
    """A node is lost, or has left. The same, unless the ranks of this node are done."""
    OVER = enum.auto()
    """The job has failed: this node ends its ranks."""
    LOST = enum.auto()
    """The rendezvous is lost. The same, unless the ranks of this node are done."""
    CLOSED = enum.auto()
    """The job has ended: the nodes do not wait for each other any more."""

    @property
    def ends(self) -> bool:
        """Whether it ends the ranks of this node for good."""
        return self in (What.OVER, What.LOST)


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
    """News that other threads have put here; one can `select` on it.

    Attributes:
        term: which round it is, for `put`.
    """

    def __init__(self) -> None:
        self._items: collections.deque[tuple[int, News]] = collections.deque()
        self._read_end, self._write_end = socket.socketpair()
        self._read_end.setblocking(False)
        self._write_end.setblocking(False)
        self._lock = threading.Lock()
        self.term = 0
        self._attended = True
        self._knocks: list[threading.Event] = []

    def fileno(self) -> int:
        """Readable when there is news."""
        return self._read_end.fileno()

    def begin_term(self) -> None:
        """From now on only news of this new round counts."""
        with self._lock:
            self.term += 1

    def put(self, term: int, news: News) -> None:
        """Adds news; from any thread, and without harm after the end.

        Args:
            term: the round that it belongs to.
            news: what there is.
        """
        with self._lock:
            self._items.append((term, news))
            self._wake()

    def take(self) -> list[News]:
        """Takes out the news of this round. Does not block."""
        with self._lock:
            with contextlib.suppress(BlockingIOError):
                self._read_end.recv(4096)
            self._answer()
            items = [news for term, news in self._items if term == self.term]
            self._items.clear()
            return items

    def knock(self) -> threading.Event:
        """Wakes the loop that waits for news; from any thread.

        Returns:
            An event that is set once the loop has looked; or at once, while it is not supposed to look.
        """
        answered = threading.Event()
        with self._lock:
            self._knocks.append(answered)
            if self._attended:
                self._wake()
            else:
                self._answer()
        return answered

    @contextlib.contextmanager
    def unattended(self) -> Iterator[None]:
        """For a while the loop does not look: it waits for something else, with a timeout of its own."""
        with self._lock:
            self._attended = False
            self._answer()
        try:
            yield
        finally:
            with self._lock:
                self._attended = True

    def close(self) -> None:
        """Closes the sockets."""
        with self._lock:
            self._attended = False
            self._answer()
            self._read_end.close()
            self._write_end.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it is readable, or closed
            self._write_end.send(b"!")

    def _answer(self) -> None:
        for answered in self._knocks:
            answered.set()
        self._knocks.clear()


class Nodes:
    """This node's part among the others, as its agent uses it: in the main thread, but for `inbox`.

    The methods do here what they do for a node without others.

    Attributes:
        inbox: news from the others.
    """

    def __init__(self) -> None:
        self.inbox = Inbox()

    def next_round(self) -> Round:
        """Waits until the next round has formed, for as long as that takes. A signal handler may raise in it.

        Raises:
            RendezvousClosedError: the job is over.
            RendezvousGracefulExitError: it is over, and this node was a spare.
            RendezvousError: the round cannot form; says why.
            StoreError: there is no store for the ranks.
            ValueError: something that this node was started with is wrong.
        """
        raise NotImplementedError

    def look_for_place(self) -> tuple[bool, str]:
        """Looks whether this node has its place among the others. Bounded.

        Asked before a rank is started again: where the others have taken the node out, it may not know yet,
        and another one may have its ranks.

        Returns:
            Whether it is known to have its place now; and why the last look that ended failed, empty if it
            did not.
        """
        return True, ""

    def have_formed(self) -> bool:
        """Whether the ranks are known to have formed a wrapped job. From memory; False if it is not known."""
        return False

    def leave(self, why: str) -> None:
        """A signal ends this node's part: the others go on without it, or hear that they cannot. Bounded.

        Args:
            why: for people.
        """

    def fail(self, why: str) -> None:
        """Ends the job on all nodes. Bounded.

        Args:
            why: for people, on all nodes.
        """

    def await_others(self, *, as_host_only: bool) -> bool:
        """This node is done: begins to wait for the others, which may be busy yet.

        Args:
            as_host_only: this node's ranks are lost; it stays only if the others need what it hosts.

        Returns:
            Whether they are waited for: the end comes as news, `What.CLOSED`.
        """
        return False

    def _await(self, wait: Callable[[], str]) -> None:
        """Waits for the others in a thread, and puts the end of that into the inbox.

        Args:
            wait: does it; returns why it was too long, empty if it was not.
        """
        term = self.inbox.term

        def run() -> None:
            why = ""
            try:
                why = wait()
            except (RendezvousError, StoreError, DistError) as error:
                why = f"the other nodes are not waited for: {error}"
            finally:
                self.inbox.put(term, News(What.CLOSED, why))

        in_background("exit barrier", run)

    def finish(self) -> None:
        """All is done, or this node is not needed any more: ends its part. Bounded."""

    def close(self) -> None:
        """Closes everything, whatever state it is in."""
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

    def close(self) -> None:
        self._end_server()
        super().close()

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
