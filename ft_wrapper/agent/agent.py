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
from .process import Job
from .rounds import End
from .signals import queued
from .torch_api.timers import watchdog

log = logging.getLogger(__name__)

Answer = Callable[[Group, Nodes, str], contextlib.AbstractContextManager[object]]


def group_of(job: Job) -> Group:
    """The ranks of a job on this node, which any thread may read; their state goes to torch's metrics."""
    return Group(job.role, job.nproc, job.max_restarts, _report_state)


def run_agent(launch: Launch, group: Group, meet: Callable[[], Nodes], answer: Answer = health.health) -> End:
    """Runs the ranks of a job on this node as processes, to their end; in the main thread.

    Args:
        launch: what it runs, and how.
        group: the ranks, as `group_of` has made them.
        meet: makes this node's part among the others, which does not connect yet.
        answer: answers whether the agent is alive, meanwhile.

    Raises:
        CannotStart: the nodes did not meet, or no rank could be started.
        OSError: something that ranks need cannot be had.
    """
    try:
        with contextlib.ExitStack() as cleanup:
            queue = cleanup.enter_context(queued(launch.signals))
            nodes = meet()
            cleanup.callback(nodes.close)
            cleanup.enter_context(answer(group, nodes, launch.job.run_id))
            launch = dataclasses.replace(launch, job=_served_job(launch, cleanup))
            end = run_rounds(nodes, cleanup.enter_context(Loop(launch, nodes, group, queue)), queue)
            group.finished(end)
            return end
    except BaseException:
        group.become(WorkerState.UNKNOWN)
        raise


def _served_job(launch: Launch, cleanup: contextlib.ExitStack) -> Job:
    """The job with what this agent serves its ranks."""
    locks = os.memfd_create("ft_wrapper_devices")
    cleanup.callback(os.close, locks)
    if launch.job.shares_processor():
        log.info("OMP_NUM_THREADS=1 for each rank, so that they share the processor; set it to tune")
    return dataclasses.replace(
        launch.job,
        timer_file=cleanup.enter_context(watchdog(launch.job.run_id)),
        signals=",".join(signum.name for signum in launch.signals),
        devices=f"/proc/{os.getpid()}/fd/{locks}:{launch.devices}" if launch.devices else "",
    )


def _report_state(group: Group) -> None:
    log.debug("[%s] the workers are %s", group.role, group.state.name)
    put_metric(f"workers.{group.role}.remaining_restarts", group.remaining_restarts)
    put_metric(f"workers.{group.role}.{group.state.name.lower()}", 1)
