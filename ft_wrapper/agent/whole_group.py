"""Workers that are started and ended together, by the three methods of an agent."""

from __future__ import annotations

import logging
import os
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from .group import Group
from .nodes import End, Nodes, Round, What
from .outputs import Failure
from .signals import SignalQueue, signal_name

if TYPE_CHECKING:
    from .elastic import SimpleElasticAgent

log = logging.getLogger(__name__)


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
        counted = [
            Failure(rank, one.pid, one.exitcode, one.timestamp, one.message, "", error_file=_file(one))
            for rank, one in failures.items()
        ]
        words = "" if again else f"rank {counted[0].rank}: {counted[0].how()}"
        return End(counted, again=again, failed=words)

    def _stop(self, signum: int) -> None:
        self._agent._stop_workers(self._group.copy(), signum)


def _file(failure: ProcessFailure) -> str:
    path: str = failure.error_file
    return path if os.path.isfile(path) else ""
