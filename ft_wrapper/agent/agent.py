"""The agent of a node: its ranks, its part among the other nodes, its health endpoint, from start to end."""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable

from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.metrics.api import put_metric

from . import health
from .group import Group
from .loop import Launch, Loop
from .nodes import Nodes, run_rounds
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
            RuntimeError: it has run before.
        """
        if self.group.state is not WorkerState.INIT:
            raise RuntimeError("an agent runs once; make another one, with a new rendezvous handler")
        try:
            with contextlib.ExitStack() as cleanup:
                queue = cleanup.enter_context(queued(self._launch.signals))
                nodes = meet()
                cleanup.callback(nodes.close)
                cleanup.enter_context(self._answer(self.group, nodes, self._launch.job.run_id))
                end = run_rounds(nodes, self._open_loop(nodes, program, cleanup), queue)
                self.group.finished(end)
                return end
        except BaseException:
            self.group.become(WorkerState.UNKNOWN)
            raise

    def _open_loop(self, nodes: Nodes, program: Program | None, cleanup: contextlib.ExitStack) -> Loop:
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
        launch = dataclasses.replace(launch, job=job, program=program or launch.program)
        return cleanup.enter_context(Loop(launch, nodes, self.group))


def report_state(group: Group) -> None:
    """Reports a group's state to torch's metrics."""
    log.debug("[%s] the workers are %s", group.role, group.state.name)
    put_metric(f"workers.{group.role}.remaining_restarts", group.remaining_restarts)
    put_metric(f"workers.{group.role}.{group.state.name.lower()}", 1)
