"""The life of a node: round after round, until the job is over, here or everywhere.

And workers that are started and ended together in each round, by the three methods of an agent.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import selectors
import shlex
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

from torch.distributed.elastic import rendezvous as elastic
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ..exception import StoreError
from ..log_lines import note_node
from .group import Group
from .nodes import CannotStart, End, Nodes, Round, What
from .outputs import Failure
from .signals import Signalled, SignalQueue, signal_name

if TYPE_CHECKING:
    from .elastic import SimpleElasticAgent

log = logging.getLogger(__name__)


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


# Workers that are started and ended together ---------------------------------------------------------------


class WholeGroup:
    """Carries rounds out for a `SimpleElasticAgent`.

    Args:
        agent: its ``_start_workers``, ``_wait_workers`` and ``_stop_workers`` are called.
        group: told what happens.
        nodes: the others.
        cleanup: stops the workers at the end.
    """

    def __init__(self, agent: SimpleElasticAgent, group: Group, nodes: Nodes, cleanup: ExitStack) -> None:
        self._agent = agent
        self._group = group
        self._nodes = nodes
        self._restarts = 0
        cleanup.callback(self._stop, signal.SIGKILL)

    def start(self, where: Round) -> None:
        self._group.begin_round(where)
        if where.restarts is not None:
            self._restarts = where.restarts
        self._group.count_restarts(self._restarts)
        for local_rank, worker_id in self._agent._start_workers(self._group.copy()).items():
            self._group.started(local_rank, worker_id)
        self._group.all_started()

    def wait(self, signals: SignalQueue) -> End:
        while True:
            failures = self._agent._wait_workers(self._group.copy(), (signals.fd, self._nodes.inbox))
            if failures is None:
                end = self._look_outside(signals)
                if end is not None:
                    return end
            elif failures:
                return self._fail(failures)
            else:
                for worker in self._group.copy().workers:
                    self._group.ended(worker.local_rank)
                return End()

    def _look_outside(self, signals: SignalQueue) -> End | None:
        for signum in signals.read():
            if signum in signals.ending:
                self._nodes.leave(f"it was ended by {signal_name(signum)}")
                self._stop(signum)
                return End(signum=signum)
        for news in self._nodes.inbox.take():
            if news.what is What.CLOSED:
                continue  # the workers come to their own end
            log.warning("%s", news.why)
            ends = news.what.ends
            if not ends:
                self._group.become(WorkerState.STOPPED)
            self._stop(signal.SIGTERM)
            return End(again=not ends, ended_by=news.why if ends else "")
        return None

    def _fail(self, failures: dict[int, ProcessFailure]) -> End:
        again = self._restarts < self._group.spec.max_restarts
        first = self._group.copy().workers[0].global_rank
        for rank in failures:
            self._group.failed(rank - first)
        if again:
            self._restarts += 1
            self._group.count_restarts(self._restarts)
            self._group.become(WorkerState.STOPPED)
        self._stop(signal.SIGTERM)
        counted = []
        for rank, one in failures.items():
            file = one.error_file if os.path.isfile(one.error_file) else ""
            what = Failure(rank, one.pid, one.exitcode, one.timestamp, one.message, "", error_file=file)
            counted.append(what)
        words = "" if again else f"rank {counted[0].rank}: {counted[0].how()}"
        return End(counted, again=again, failed=words)

    def _stop(self, signum: int) -> None:
        self._agent._stop_workers(self._group.copy(), signum)
