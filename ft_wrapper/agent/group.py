"""The workers of a node as torch's agents describe them: a group, with a state, and counts of what happened.

The agent's main thread writes it; the health endpoint and callers of the agent read copies.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
from typing import Any

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.metrics.api import put_metric

from ..store.address import split_host_port
from .nodes import Round

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Counts:
    """What has happened since the agent began.

    Args:
        failures: processes that failed of their own accord.
        replacements: processes that were started alone, in the place of one that had failed.
        restarts: how often all workers were restarted because some had failed.
        rounds: how often they were started at all, also with other nodes than before.
    """

    failures: int = 0
    replacements: int = 0
    restarts: int = 0
    rounds: int = 0


class Group:
    """The worker group of an agent; for use in any thread.

    Its state follows torch's `WorkerState`: INIT; HEALTHY from a start on; UNHEALTHY while one has failed and
    the others go on; STOPPED while all are ended to be started again, or after a signal; SUCCEEDED or FAILED
    at the end; UNKNOWN if something went wrong half-way.

    Args:
        spec: of the workers.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._lock = threading.Lock()
        self._group = WorkerGroup(spec)
        self._counts: collections.Counter[str] = collections.Counter()
        self._missing: set[int] = set()  # local ranks whose last process has failed
        self._succeeded: set[int] = set()
        self._starting = False

    # What is read ---------------------------------------------------------------------------------------

    @property
    def spec(self) -> WorkerSpec:
        """Of the workers."""
        return self._group.spec

    @property
    def state(self) -> WorkerState:
        """The state now."""
        return self._group.state

    @property
    def counts(self) -> Counts:
        """What has happened so far."""
        with self._lock:
            return Counts(**self._counts)

    @property
    def remaining_restarts(self) -> int:
        """How often all may be restarted yet."""
        return max(0, self.spec.max_restarts - self.counts.restarts)

    @property
    def succeeded(self) -> set[int]:
        """Local ranks whose last process, in this round, has exited with 0."""
        with self._lock:
            return set(self._succeeded)

    def copy(self) -> WorkerGroup:
        """The group as it is now; it does not change afterwards."""
        with self._lock:
            copied = WorkerGroup(self._group.spec)
            for name in WorkerGroup.__slots__:
                setattr(copied, name, getattr(self._group, name))
            copied.workers = [_copy(worker) for worker in self._group.workers]
            return copied

    # Notes ---------------------------------------------------------------------------------------------

    def begin_round(self, where: Round) -> None:
        """All workers are about to be started.

        Args:
            where: their place among those of all nodes.
        """
        host, port = split_host_port(where.address)
        with self._lock:
            group = self._group
            group.group_rank, group.group_world_size = where.group_rank, where.group_world_size  # type: ignore[assignment]
            group.master_addr, group.master_port = host, int(port)  # type: ignore[assignment]
            group.workers = [
                Worker(
                    rank,
                    where.rank(rank),
                    where.role_rank + rank,
                    where.world_size,
                    where.role_world_size,
                )
                for rank in range(group.spec.local_world_size)
            ]
            self._missing.clear()
            self._succeeded.clear()
            self._counts["rounds"] += 1
            self._starting = True

    def all_started(self) -> None:
        """All workers of the round have been started; meanwhile some may have failed, or all been stopped."""
        if self._starting:
            self.become(WorkerState.UNHEALTHY if self._missing else WorkerState.HEALTHY)

    def count_restarts(self, restarts: int) -> None:
        """Notes how often all workers were restarted because some had failed, or are about to be."""
        with self._lock:
            self._counts["restarts"] = restarts

    def started(self, local_rank: int, worker_id: Any, *, replaces: bool = False) -> None:
        """A worker has been started.

        Args:
            local_rank: which one.
            worker_id: what identifies it: the process, for workers of this machine.
            replaces: whether one before it has failed in this round.
        """
        with self._lock:
            self._group.workers[local_rank].id = worker_id
            self._missing.discard(local_rank)
            self._succeeded.discard(local_rank)
            self._counts["replacements"] += replaces
            healed = self._group.state is WorkerState.UNHEALTHY and not self._missing
        if healed:
            self.become(WorkerState.HEALTHY)

    def ended(self, local_rank: int) -> None:
        """A worker has done what it had to."""
        with self._lock:
            self._succeeded.add(local_rank)

    def failed(self, local_rank: int) -> None:
        """A worker has failed of its own accord."""
        with self._lock:
            self._counts["failures"] += 1
            self._missing.add(local_rank)
            was_healthy = self._group.state is WorkerState.HEALTHY
        if was_healthy:
            self.become(WorkerState.UNHEALTHY)

    def become(self, state: WorkerState) -> None:
        """Changes the state, and tells torch's metrics.

        Args:
            state: the new one.
        """
        with self._lock:
            self._group.state = state
            self._starting = False
        role = self.spec.role
        log.debug("[%s] the workers are %s", role, state.name)
        put_metric(f"workers.{role}.remaining_restarts", self.remaining_restarts)
        put_metric(f"workers.{role}.{state.name.lower()}", 1)


def _copy(worker: Worker) -> Worker:
    copied = Worker(
        worker.local_rank, worker.global_rank, worker.role_rank, worker.world_size, worker.role_world_size
    )
    copied.id = worker.id
    return copied
