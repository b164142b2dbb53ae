"""What an agent asks of the other nodes: rounds, news, how to leave."""

import collections
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from torch.distributed import DistError
from torch.distributed.elastic import rendezvous as elastic

from ..exception import StoreError
from ..monitor.service import service_name
from ..protocol.notice import Notice
from ..store.bounded import in_background
from .rounds import BAD_NODE, COMMAND_LINE, INFRASTRUCTURE, JobResult, News, Round, What

#: Seconds for which a node whose ranks are done waits for the other nodes, by default; as in torch's agents.
EXIT_BARRIER_TIMEOUT = 300.0


class CannotStart(Exception):
    """No rank could be started."""


class BadNode(elastic.RendezvousError):
    """This node cannot take part, whatever the other nodes do."""


# The others ------------------------------------------------------------------------------------------------


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
        self._changed = threading.Condition()
        self.term = 0
        self._attended = True
        self._looks = 0

    def fileno(self) -> int:
        """Readable when there is news."""
        return self._read_end.fileno()

    def begin_term(self) -> None:
        """From now on only news of this new round counts."""
        with self._changed:
            self.term += 1

    def put(self, term: int, news: News) -> None:
        """Adds news; from any thread, and without harm after the end.

        Args:
            term: the round that it belongs to.
            news: the news.
        """
        with self._changed:
            self._items.append((term, news))
            self._wake()

    def take(self) -> list[News]:
        """Takes out the news of this round. Does not block."""
        with self._changed:
            with suppress(BlockingIOError):
                self._read_end.recv(4096)
            self._note_look()
            items = [news for term, news in self._items if term == self.term]
            self._items.clear()
            return items

    def is_attended(self, timeout: float) -> bool:
        """Wakes the loop that waits for news, and waits until it has looked; from any thread.

        Args:
            timeout: seconds that it may take.

        Returns:
            Whether it has; True at once while it is not supposed to look.
        """
        with self._changed:
            before = self._looks
            self._wake()
            return self._changed.wait_for(lambda: self._looks > before or not self._attended, timeout)

    @contextmanager
    def unattended(self) -> Iterator[None]:
        """Within it the loop does not look: it waits for something else, with its own timeout."""
        with self._changed:
            self._attended = False
            self._note_look()
        try:
            yield
        finally:
            with self._changed:
                self._attended = True

    def close(self) -> None:
        """Closes the sockets."""
        with self._changed:
            self._attended = False
            self._note_look()
            self._read_end.close()
            self._write_end.close()

    def _wake(self) -> None:
        with suppress(OSError):  # it is readable, or closed
            self._write_end.send(b"!")

    def _note_look(self) -> None:
        self._looks += 1
        self._changed.notify_all()


class Nodes:
    """This node's link to the other nodes. Its agent uses it in the main thread, except for `inbox`.

    The methods here are for a node that has nothing to say to others.

    Attributes:
        inbox: news from the other nodes.
        agent: what this node's ranks find in ``FT_WRAPPER_AGENT``.
        store: address of the store in which wrapped ranks of the current round agree; empty before the first.
    """

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.store = ""
        self.agent = service_name()

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
        """Looks whether this node has its place among the other nodes. Bounded.

        Called before a rank is restarted: this node may have been evicted without its knowledge, and
        another node may have its ranks.

        Returns:
            Whether it is known to have its place now; and why the last look that ended failed, empty if it
            did not.
        """
        return True, ""

    def states(self) -> dict[str, int]:
        """How many nodes are in which of `metrics.NODE_STATES`. From memory; empty if it is not known."""
        return {}

    def have_formed(self) -> bool:
        """Whether the ranks are known to have formed a wrapped job. From memory; False if it is not known."""
        return False

    def leave(self, why: str) -> None:
        """A signal ends this node's part: other nodes go on without it, or learn that they cannot. Bounded.

        Args:
            why: for people.
        """

    def drain(self, within: float, why: str, notice: Notice | None = None) -> str:
        """Asks that all ranks of this node leave the job, in order: `What.DRAIN` follows. Bounded.

        Args:
            within: seconds after which ranks that have not left are ended.
            why: for people.
            notice: what all ranks get before, if they may leave.

        Returns:
            Why they may not leave; empty if they may.
        """
        return "the nodes of this job do not agree on such things; use --rdzv-backend ft or etcd"

    def notice(self, notice: Notice) -> str:
        """Asks that the ranks of all nodes get a notice: `What.NOTICE` follows. Bounded.

        Args:
            notice: the notice. Without an id it is not for ranks: it says that this node is about to end.

        Returns:
            Why it cannot be passed on; empty if it can.
        """
        return "the nodes of this job do not agree on such things; use --rdzv-backend ft or etcd"

    @property
    def keeps_others(self) -> bool:
        """Whether the other nodes cannot go on once this node's agent has ended: it hosts a store."""
        return False

    def fail(self, why: str, result: str = "") -> None:
        """Ends the job on all nodes. Bounded.

        Args:
            why: for people, on all nodes.
            result: how the job has ended, a `JobResult` as text; empty for a loss.
        """

    def closed_with(self) -> JobResult | None:
        """How the job has ended, if it has and that is known. From memory."""
        return None

    def await_others(self, said: str, *, as_host_only: bool) -> bool:
        """This node is done: starts to wait for the other nodes, which may still be busy.

        Args:
            said: how the ranks of this node ended, a `JobResult` as text; empty if they are lost.
            as_host_only: this node's ranks are lost; it stays only if the other nodes need what it hosts.

        Returns:
            Whether they are waited for: the end comes as news, `What.CLOSED`.
        """
        return False

    def _await(self, wait: Callable[[], News]) -> None:
        """Waits for the other nodes in a thread, and puts the outcome into the inbox.

        Args:
            wait: waits; returns the other nodes' result, and why it gave up, if it did.
        """
        term = self.inbox.term

        def run() -> None:
            try:
                news = wait()
            except Exception as error:
                why = f"the other nodes are not waited for: {error}"
                news = News(What.CLOSED, why, result=JobResult(INFRASTRUCTURE, why))
            self.inbox.put(term, news)

        in_background("exit barrier", run)

    def finish(self, result: str) -> None:
        """All is done, or the other nodes do not need this node: ends its part. Bounded.

        Args:
            result: how the job has ended, a `JobResult` as text.
        """

    def close(self) -> None:
        """Closes everything, whatever state it is in."""
        self.inbox.close()


def exit_code_of(error: BaseException | None) -> int:
    """The exit code if a round does not begin because of this error."""
    if isinstance(error, BadNode):
        return BAD_NODE
    lost = (elastic.RendezvousConnectionError, elastic.RendezvousTimeoutError, StoreError)
    return INFRASTRUCTURE if isinstance(error, (*lost, DistError, TimeoutError)) else COMMAND_LINE
