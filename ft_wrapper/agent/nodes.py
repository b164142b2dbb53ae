"""The life of a node: round after round, until the job is over, here or everywhere.

And what an agent asks of the other nodes: rounds, news, and how to leave.
"""

import collections
import dataclasses
import logging
import selectors
import shlex
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from torch.distributed import DistError
from torch.distributed.elastic import rendezvous as elastic

from ..exception import StoreError
from ..log_lines import note_node
from ..monitor.service import service_name
from ..store.bounded import in_background
from .rounds import BAD_NODE, COMMAND_LINE, DONE, INFRASTRUCTURE, End, JobResult, News, Round, What, worst
from .signals import Signalled, SignalQueue, signal_name

log = logging.getLogger(__name__)

#: Seconds for which a node whose ranks are done waits for the others, by default; as in torch's agents.
EXIT_BARRIER_TIMEOUT = 300.0


class CannotStart(Exception):
    """No rank could be started."""


class BadNode(elastic.RendezvousError):
    """This node cannot take part, whatever the others do."""


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
            news: what there is.
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
        """For a while the loop does not look: it waits for something else, with a timeout of its own."""
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
    """This node's part among the others, as its agent uses it: in the main thread, but for `inbox`.

    The methods do here what they do for a node that has nothing to say to others.

    Attributes:
        inbox: news from the others.
        agent: what this node's ranks find in ``FT_WRAPPER_AGENT``.
        store: address of the store in which wrapped ranks of the present round agree; empty before the first.
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
        """Looks whether this node has its place among the others. Bounded.

        Asked before a rank is started again: where the others have taken the node out, it may not know yet,
        and another one may have its ranks.

        Returns:
            Whether it is known to have its place now; and why the last look that ended failed, empty if it
            did not.
        """
        return True, ""

    def states(self) -> dict[str, int]:
        """How many nodes stand how, see `health.NODE_STATES`. From memory; empty if it is not known."""
        return {}

    def have_formed(self) -> bool:
        """Whether the ranks are known to have formed a wrapped job. From memory; False if it is not known."""
        return False

    def leave(self, why: str) -> None:
        """A signal ends this node's part: the others go on without it, or hear that they cannot. Bounded.

        Args:
            why: for people.
        """

    def drain(self, within: float, why: str) -> str:
        """Asks that all ranks of this node leave the job, in order: `What.DRAIN` follows. Bounded.

        Args:
            within: seconds until ranks are ended that have not left.
            why: for people.

        Returns:
            Why they may not leave; empty if they may.
        """
        return "the nodes of this job do not agree on such things; use --rdzv-backend ft or etcd"

    @property
    def keeps_others(self) -> bool:
        """Whether the others cannot go on once this node's agent has ended: it hosts a store."""
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
        """This node is done: begins to wait for the others, which may be busy yet.

        Args:
            said: how the ranks of this node ended, a `JobResult` as text; empty if they are lost.
            as_host_only: this node's ranks are lost; it stays only if the others need what it hosts.

        Returns:
            Whether they are waited for: the end comes as news, `What.CLOSED`.
        """
        return False

    def _await(self, wait: Callable[[], News]) -> None:
        """Waits for the others in a thread, and puts the end of that into the inbox.

        Args:
            wait: waits; returns what the others have said, and why it gave up, if it did.
        """
        term = self.inbox.term

        def run() -> None:
            news = News(What.CLOSED)
            try:
                news = wait()
            except (elastic.RendezvousError, StoreError, DistError) as error:
                why = f"the other nodes are not waited for: {error}"
                news = News(What.CLOSED, why, result=JobResult(INFRASTRUCTURE, why))
            finally:
                self.inbox.put(term, news)

        in_background("exit barrier", run)

    def finish(self, result: str) -> None:
        """All is done, or the others do not need this node: ends its part. Bounded.

        Args:
            result: how the job has ended, a `JobResult` as text.
        """

    def close(self) -> None:
        """Closes everything, whatever state it is in."""
        self.inbox.close()


# Round after round -----------------------------------------------------------------------------------------


class Workers(Protocol):
    """What runs on this node in each round."""

    def start(self, where: Round) -> None:
        """Starts all; those of the round before have ended.

        Raises:
            OSError: they cannot be started.
            StoreError: the store of the round does not answer.
        """

    def wait(self) -> End:
        """Waits until all have ended for this round. Signals and news of the other nodes end them."""


def run_rounds(nodes: Nodes, workers: Workers, signals: SignalQueue) -> End:
    """Runs the workers of this node until the job is over, or this node's part in it.

    Args:
        nodes: the others.
        workers: this node's.
        signals: what ends the job, and what does not.

    Raises:
        CannotStart: the first round does not form, or its workers cannot be started; says why.
    """
    is_first = True
    while True:
        try:
            with nodes.inbox.unattended(), signals.raised():
                where = nodes.next_round()
            nodes.store = where.store
            note_node(where.group_rank)
            workers.start(where)
            if where.group_rank == 0:
                log.info("see how the job stands: ftrun status %s", shlex.quote(where.store))
        except Signalled as signalled:
            name = signal_name(signalled.signum)
            log.warning("%s: this node leaves before the rendezvous is complete", name)
            nodes.leave(f"it was ended by {name}")
            return End(signum=signalled.signum, signal=name)
        except elastic.RendezvousGracefulExitError as error:
            log.info("%s", error)
            return End(elsewhere=nodes.closed_with())
        except (OSError, StoreError, ValueError, DistError, elastic.RendezvousError) as error:
            why = str(error) or type(error).__name__  # torch's handlers raise some that say nothing
            nodes.leave(f"it could not go on: {why}")
            if is_first:
                raise CannotStart(why) from error
            # Others may be done; this node was not.
            code = max(exit_code_of(error), INFRASTRUCTURE)
            own = JobResult(code, f"the next round has not begun: {why}")
            closed = nodes.closed_with()
            return End(
                ended_by=own.why, elsewhere=own if closed is None or closed.verdict == "done" else closed
            )
        is_first = False
        end = workers.wait()
        if end.signum is None and not end.again and not end.ended_by:
            end = _await_others(end, nodes, signals)
        if end.signum is not None or not end.again:
            return end


def exit_code_of(error: BaseException | None) -> int:
    """The exit code if a round does not begin because of this error."""
    if isinstance(error, BadNode):
        return BAD_NODE
    lost = (elastic.RendezvousConnectionError, elastic.RendezvousTimeoutError, StoreError)
    return INFRASTRUCTURE if isinstance(error, (*lost, DistError, TimeoutError)) else COMMAND_LINE


def _await_others(end: End, nodes: Nodes, signals: SignalQueue) -> End:
    """This node's ranks have ended for good: what that means for the others, and what they do yet."""
    if end.failed:
        nodes.fail(end.failed, end.result().to_text())
        return end
    if end.drained and not nodes.keeps_others:
        nodes.leave("it was drained")
        return dataclasses.replace(end, left=JobResult(DONE, "this node was drained", verdict="drained"))
    said = "" if end.lost or end.drained else end.result().to_text()
    if not end.closed and nodes.await_others(said, as_host_only=not said):
        why = "it hosts their store" if end.drained else "waiting for the other nodes"
        log.info("the ranks of this node have ended; %s", why)
        end = _wait(end, nodes, signals)
        if end.again or end.signum is not None or end.ended_by:
            return end
    elif end.lost:
        # Ranks that gave up, or found no others, do so on all nodes.
        is_over = not end.failures or any(one.gave_up or one.was_stranded for one in end.failures)
        if not is_over and nodes.states().get("active", 1) > 1:
            end = dataclasses.replace(end, left=JobResult(BAD_NODE, "its ranks are lost, the others go on"))
        nodes.leave("its ranks are lost")
        return end
    nodes.finish(end.result().to_text())
    return end


def _wait(end: End, nodes: Nodes, signals: SignalQueue) -> End:
    """Waits until the others are done, too; returns the end as it is then."""
    with selectors.DefaultSelector() as selector:
        for waited_for in (signals.fd, nodes.inbox):
            selector.register(waited_for, selectors.EVENT_READ)
        while True:
            selector.select()
            for signum in signals.read():
                if signum in signals.ending:
                    name = signal_name(signum)
                    log.warning("%s: this node leaves; its ranks had ended", name)
                    nodes.leave(f"it was ended by {name}")
                    return dataclasses.replace(end, signum=signum, signal=name)
            for news in nodes.inbox.take():
                if news.what in (What.DRAIN, What.NOTICE):
                    continue  # no rank is left here
                if news.why:
                    log.warning("%s", news.why)
                if news.what is What.GONE:
                    continue  # no node waits for it
                if news.what is What.COME:
                    return dataclasses.replace(end, again=True)
                if news.what is What.OVER:
                    return dataclasses.replace(end, ended_by=news.why, elsewhere=news.result)
                end = dataclasses.replace(end, closed=True, elsewhere=worst((end.elsewhere, news.result)))
                if end.lost and news.result is not None and news.result.exit_code == DONE:
                    return dataclasses.replace(end, failures=[], forgiven=[*end.forgiven, *end.failures])
                return end
