"""The life of a node: round after round, until the job is over, here or everywhere.

And what an agent asks of the other nodes: rounds, news, and how to leave. Here: there are no others.
"""

import dataclasses
import logging
import selectors
import shlex
import threading
from collections.abc import Callable
from typing import Protocol

from torch.distributed import DistError
from torch.distributed.elastic import rendezvous as elastic

from ..exception import StoreError
from ..log_lines import note_node
from ..store import TCPStoreServer
from ..store.address import host_port, loopback
from ..store.bounded import in_background
from .outputs import Failure
from .proving import NO_PROOF, Proof, await_proof
from .signals import Inbox, News, Signalled, SignalQueue, What, signal_name

log = logging.getLogger(__name__)

#: Seconds for which a node whose ranks are done waits for the others, by default; as in torch's agents.
EXIT_BARRIER_TIMEOUT = 300.0


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
            except (elastic.RendezvousError, StoreError, DistError) as error:
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
        proof: what the node has to pass before each round.
    """

    def __init__(
        self, nproc: int, address: str | None = None, port: int = 0, proof: Proof = NO_PROOF
    ) -> None:
        super().__init__()
        self._proof = proof
        self._nproc = nproc
        self._address = address or loopback()
        self._port = port
        self._server: TCPStoreServer | None = None

    def next_round(self) -> Round:
        self._end_server()
        await_proof(self._proof, "this node", lambda why: None, threading.Event().wait)
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


# Round after round -----------------------------------------------------------------------------------------


class Workers(Protocol):
    """What runs on this node in each round."""

    def start(self, where: Round) -> None:
        """Starts all; those of the round before have ended.

        Raises:
            OSError: they cannot be started.
            StoreError: the store of the round does not answer.
        """

    def wait(self, signals: SignalQueue) -> End:
        """Waits until all have ended for this round. Signals and news of the other nodes end them."""


def run_rounds(nodes: Nodes, workers: Workers, signals: SignalQueue) -> End:
    """Runs the workers of this node until the job is over, or this node's part in it.

    Args:
        nodes: the others.
        workers: this node's.
        signals: what ends the job, and SIGCHLD.

    Raises:
        CannotStart: the first round does not form, or its workers cannot be started; says why.
    """
    is_first = True
    while True:
        try:
            with nodes.inbox.unattended(), signals.raised():
                where = nodes.next_round()
            note_node(where.group_rank)
            workers.start(where)
            if where.group_rank == 0:
                log.info("see how the job stands: ftrun status %s", shlex.quote(where.store))
        except Signalled as signalled:
            name = signal_name(signalled.signum)
            log.warning("%s: this node leaves before the rendezvous is complete", name)
            nodes.leave(f"it was ended by {name}")
            return End(signum=signalled.signum)
        except elastic.RendezvousGracefulExitError as error:
            log.info("%s", error)
            return End()
        except (OSError, StoreError, ValueError, elastic.RendezvousError) as error:
            why = _words(error)
            nodes.leave(f"it could not go on: {why}")
            if is_first:
                raise CannotStart(why) from error
            return End(ended_by=f"the next round has not begun: {why}")
        is_first = False
        end = workers.wait(signals)
        if end.signum is None and not end.again and not end.ended_by:
            end = _await_others(end, nodes, signals)
        if end.signum is not None or not end.again:
            return end


def _words(error: Exception) -> str:
    """What an error says; torch's handlers raise some that say nothing."""
    if isinstance(error, elastic.RendezvousClosedError) and not str(error):
        return "the job is over: its rendezvous is closed"
    return str(error) or type(error).__name__


def _await_others(end: End, nodes: Nodes, signals: SignalQueue) -> End:
    """This node's ranks have ended for good: what that means for the others, and what they do yet."""
    if end.failed:
        nodes.fail(end.failed)
        return end
    if not end.closed and nodes.await_others(as_host_only=end.lost):
        log.info("the ranks of this node have ended; waiting for the other nodes")
        end = _wait(end, nodes, signals)
        if end.again or end.signum is not None or end.ended_by:
            return end
    elif end.lost:
        nodes.leave("its ranks are lost")
        return end
    nodes.finish()
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
                    log.warning("%s: this node leaves; its ranks had ended", signal_name(signum))
                    nodes.leave(f"it was ended by {signal_name(signum)}")
                    return dataclasses.replace(end, signum=signum)
            for news in nodes.inbox.take():
                if news.why:
                    log.warning("%s", news.why)
                if news.what is What.GONE:
                    continue  # no node waits for it any more
                if news.what is What.COME:
                    return dataclasses.replace(end, again=True)
                if news.what is What.OVER:
                    return dataclasses.replace(end, ended_by=news.why)
                return dataclasses.replace(end, closed=True)
