"""The life of a node: round after round, until the job is over, here or everywhere.

And what an agent asks of the other nodes: rounds, news, and how to leave.
"""

import dataclasses
import logging
import selectors
import shlex
from collections.abc import Callable, Sequence
from typing import Protocol

from torch.distributed import DistError
from torch.distributed.elastic import rendezvous as elastic

from ..exception import StoreError
from ..log_lines import note_node
from ..monitor.service import service_name
from ..store.bounded import in_background
from .outputs import Failure
from .signals import Inbox, News, Signalled, SignalQueue, What, signal_name
from .verdict import BAD_NODE, COMMAND_LINE, DONE, INFRASTRUCTURE, PROGRAM, JobResult, worst

log = logging.getLogger(__name__)

#: Seconds for which a node whose ranks are done waits for the others, by default; as in torch's agents.
EXIT_BARRIER_TIMEOUT = 300.0


class CannotStart(Exception):
    """No rank could be started."""


class BadNode(elastic.RendezvousError):
    """This node cannot take part, whatever the others do."""


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
        lost: whether no rank of this node is left in a job that goes on elsewhere.
        closed: whether the other nodes have stopped waiting for each other.
        drained: whether all ranks of this node were asked to leave, and have.
        node: what this node is called; empty if there is no other.
        elsewhere: how the job has ended, as the other ranks or nodes say.
        left: how this node's part has ended, if that was before the job's end.
    """

    failures: list[Failure] = dataclasses.field(default_factory=list)
    signum: int | None = None
    forgiven: list[Failure] = dataclasses.field(default_factory=list)
    again: bool = False
    failed: str = ""
    ended_by: str = ""
    lost: bool = False
    closed: bool = False
    drained: bool = False
    node: str = ""
    elsewhere: JobResult | None = None
    left: JobResult | None = None

    def result(self) -> JobResult:
        """What this end means: for the job, or for this node's part if that ended before."""
        if self.signum is not None:
            return JobResult(128 + self.signum, f"it was ended by {signal_name(self.signum)}")
        if self.ended_by:
            return self.elsewhere or JobResult(INFRASTRUCTURE, self.ended_by)
        own = result_of_failures(self.failures, self.node) if self.failures else None
        return self.left or worst((own, self.elsewhere)) or JobResult(DONE)


def result_of_failures(failures: Sequence[Failure], node: str) -> JobResult:
    """What the failures of a node's ranks mean for the job.

    A process that gave up, or exited by itself, would do so again. One that was killed counts as a loss,
    unless one was killed by the same signal in the round before, and no job has formed.

    Args:
        failures: those that count, the first one first; at least one.
        node: what the node is called; empty if there is no other.
    """
    first = next((one for one in failures if one.gave_up), failures[0])
    is_lost = (first.exitcode < 0 and not first.came_before) or first.was_stranded
    code = INFRASTRUCTURE if is_lost and not first.gave_up else PROGRAM
    culprit = f"rank {first.rank} (pid {first.pid}{node and f', node {node}'})"
    return JobResult(code, f"{first.how()}{first.error and f': {first.error}'}", culprit)


# The others ------------------------------------------------------------------------------------------------


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
        """How many nodes stand how, see `metrics.NODE_STATES`. From memory; empty if it is not known."""
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
        """All is done, or this node is not needed any more: ends its part. Bounded.

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

    def wait(self, signals: SignalQueue) -> End:
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
            return End(signum=signalled.signum)
        except elastic.RendezvousGracefulExitError as error:
            log.info("%s", error)
            return End(elsewhere=nodes.closed_with())
        except (OSError, StoreError, ValueError, DistError, elastic.RendezvousError) as error:
            why = _words(error)
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
        end = workers.wait(signals)
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


def _words(error: Exception) -> str:
    """What an error says; torch's handlers raise some that say nothing."""
    if isinstance(error, elastic.RendezvousClosedError) and not str(error):
        return "the job is over: its rendezvous is closed"
    return str(error) or type(error).__name__


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
                    log.warning("%s: this node leaves; its ranks had ended", signal_name(signum))
                    nodes.leave(f"it was ended by {signal_name(signum)}")
                    return dataclasses.replace(end, signum=signum)
            for news in nodes.inbox.take():
                if news.what in (What.DRAIN, What.NOTICE):
                    continue  # no rank is left here
                if news.why:
                    log.warning("%s", news.why)
                if news.what is What.GONE:
                    continue  # no node waits for it any more
                if news.what is What.COME:
                    return dataclasses.replace(end, again=True)
                if news.what is What.OVER:
                    return dataclasses.replace(end, ended_by=news.why, elsewhere=news.result)
                end = dataclasses.replace(end, closed=True, elsewhere=worst((end.elsewhere, news.result)))
                if end.lost and news.result is not None and news.result.exit_code == DONE:
                    return dataclasses.replace(end, failures=[], forgiven=[*end.forgiven, *end.failures])
                return end
