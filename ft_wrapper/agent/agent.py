"""The agent of a node: its ranks, its part among the other nodes, its health endpoint, from start to end."""

import contextlib
import dataclasses
import logging
import os
import signal
from collections.abc import Callable, Iterable

from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.metrics.api import put_metric

from . import health
from .group import Group
from .loop import Launch, Loop
from .nodes import Nodes, Workers, run_rounds
from .process import Program
from .rounds import End
from .signals import queued
from .torch_api.timers import watchdog

log = logging.getLogger(__name__)

Answer = Callable[[Group, Nodes, str], contextlib.AbstractContextManager[object]]


class Agent:
    """Runs the ranks of a job on this node as processes. It runs once.

    Args:
        launch: what it runs, and how.
        answer: answers whether the agent is alive, meanwhile.

    Attributes:
        group: the ranks, which any thread may read.
    """

    def __init__(self, launch: Launch, answer: Answer = health.health) -> None:
        job = launch.job
        self.group = Group(job.role, job.nproc, job.max_restarts, report_state)
        self._launch = launch
        self._answer = answer

    def run(self, meet: Callable[[], Nodes], program: Program | None = None) -> End:
        """Runs the ranks to their end; in the main thread.

        Args:
            meet: makes this node's part among the others, which does not connect yet.
            program: what each of them runs, if that is known only now.

        Raises:
            CannotStart: the nodes did not meet, or no rank could be started.
            OSError: something that ranks need cannot be had.
        """
        if program is not None:
            self._launch = dataclasses.replace(self._launch, program=program)
        run_id, signals = self._launch.job.run_id, self._launch.signals
        return run_workers(self.group, run_id, signals, meet, self._open_loop, self._answer)

    def _open_loop(self, nodes: Nodes, cleanup: contextlib.ExitStack) -> Loop:
        launch, locks = self._launch, os.memfd_create("ft_wrapper_devices")
        cleanup.callback(os.close, locks)
        job = dataclasses.replace(
            launch.job,
            timer_file=cleanup.enter_context(watchdog(launch.job.run_id)),
            signals=",".join(signum.name for signum in launch.signals),
            devices=f"/proc/{os.getpid()}/fd/{locks}:{launch.devices}" if launch.devices else "",
        )
        if job.shares_processor():
            log.info("OMP_NUM_THREADS=1 for each rank, so that they share the processor; set it to tune")
        return cleanup.enter_context(Loop(launch, job, nodes, self.group))


def run_workers(
    group: Group,
    run_id: str,
    signals: Iterable[signal.Signals],
    meet: Callable[[], Nodes],
    open_workers: Callable[[Nodes, contextlib.ExitStack], Workers],
    answer: Answer = health.health,
) -> End:
    """Runs workers of any kind to their end; in the main thread.

    Args:
        group: their state.
        run_id: of the job.
        signals: what ends them.
        meet: makes this node's part among the others, which does not connect yet.
        open_workers: makes what starts them, and waits for them; the stack ends them, and closes all.
        answer: answers whether the agent is alive, meanwhile.

    Raises:
        CannotStart: the nodes did not meet, or no worker could be started.
        OSError: something that workers need cannot be had.
        RuntimeError: the group has been run before.
    """
    if group.state is not WorkerState.INIT:
        raise RuntimeError("an agent runs once; make another one, with a new rendezvous handler")
    try:
        with contextlib.ExitStack() as cleanup:
            queue = cleanup.enter_context(queued(signals))
            nodes = meet()
            cleanup.callback(nodes.close)
            cleanup.enter_context(answer(group, nodes, run_id))
            end = run_rounds(nodes, open_workers(nodes, cleanup), queue)
            group.finished(end)
            return end
    except BaseException:
        group.become(WorkerState.UNKNOWN)
        raise


def report_state(group: Group) -> None:
    """Reports a group's state to torch's metrics."""
    log.debug("[%s] the workers are %s", group.role, group.state.name)
    put_metric(f"workers.{group.role}.remaining_restarts", group.remaining_restarts)
    put_metric(f"workers.{group.role}.{group.state.name.lower()}", 1)
