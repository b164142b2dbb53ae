"""The workers of a node as torch's agents describe them: a group, its state, events, metrics and failures.

The agent's main thread writes it; the health endpoint and callers of the agent read copies.
"""

import collections
import copy
import dataclasses
import json
import logging
import socket
import threading
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.events import record
from torch.distributed.elastic.events.api import Event, EventMetadataValue, EventSource
from torch.distributed.elastic.metrics.api import put_metric
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ..store.address import split_host_port
from .nodes import End, Round
from .rank_metrics import RankMetrics

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

    Attributes:
        run_seconds: how long the agent has run, once it has ended.
        rank_metrics: what is known of ranks in wrapped calls.
    """

    def __init__(self, spec: api.WorkerSpec) -> None:
        self.run_seconds = 0.0
        self.rank_metrics = RankMetrics()
        self._lock = threading.Lock()
        self._group = api.WorkerGroup(spec)
        self._counts: collections.Counter[str] = collections.Counter()
        self._missing: set[int] = set()  # local ranks whose last process has failed
        self._succeeded: set[int] = set()
        self._starting = False

    # What is read ---------------------------------------------------------------------------------------

    @property
    def spec(self) -> api.WorkerSpec:
        """Of the workers."""
        return self._group.spec

    @property
    def state(self) -> api.WorkerState:
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

    @property
    def missing(self) -> set[int]:
        """Local ranks whose last process has failed, and was not replaced yet; without those dismissed."""
        with self._lock:
            return set(self._missing)

    def copy(self) -> api.WorkerGroup:
        """The group as it is now; it does not change afterwards."""
        with self._lock:
            copied = copy.copy(self._group)
            copied.workers = [copy.copy(worker) for worker in self._group.workers]
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
                api.Worker(
                    rank, where.rank(rank), where.role_rank + rank, where.world_size, where.role_world_size
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
            self.become(api.WorkerState.UNHEALTHY if self._missing else api.WorkerState.HEALTHY)

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
            healed = self._group.state is api.WorkerState.UNHEALTHY and not self._missing
        if healed:
            self.become(api.WorkerState.HEALTHY)

    def ended(self, local_rank: int) -> None:
        """A worker has done what it had to."""
        with self._lock:
            self._succeeded.add(local_rank)

    def failed(self, local_rank: int) -> None:
        """A worker has failed of its own accord."""
        with self._lock:
            self._counts["failures"] += 1
            self._missing.add(local_rank)
            was_healthy = self._group.state is api.WorkerState.HEALTHY
        if was_healthy:
            self.become(api.WorkerState.UNHEALTHY)

    def dismissed(self, local_rank: int) -> None:
        """A worker was asked to leave the job, or was excluded: if its process is gone it is not missing."""
        with self._lock:
            self._missing.discard(local_rank)

    def become(self, state: api.WorkerState) -> None:
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

    # Events ----------------------------------------------------------------------------------------------

    def event(
        self,
        state: str,
        source: EventSource = EventSource.AGENT,
        about: Mapping[str, object] | None = None,
        **fields: EventMetadataValue,
    ) -> Event:
        """An event of torch's, with the fields that torch's agent gives it.

        Args:
            state: what has happened, ``SUCCEEDED`` for instance.
            source: whom it is about, an agent or a worker.
            about: what a worker's event has beside the group's size and entry point.
            fields: that differ from those of an agent at a moment: ``raw_error`` or ``duration_ms``, say.
        """
        now = self.copy()
        spec = now.spec
        entry_point = spec.get_entrypoint_name()  # type: ignore[no-untyped-call]
        metadata: dict[str, EventMetadataValue] = {
            "run_id": spec.rdzv_handler.get_run_id(),
            "global_rank": None,
            "group_rank": now.group_rank,
            "worker_id": None,
            "role": spec.role,
            "hostname": socket.getfqdn(socket.gethostname()),
            "state": state,
            "total_run_time": int(self.run_seconds),
            "rdzv_backend": spec.rdzv_handler.get_backend(),
            "raw_error": None,
            "metadata": json.dumps(
                {"group_world_size": now.group_world_size, "entry_point": entry_point, **(about or {})}
            ),
            "agent_restarts": spec.max_restarts - self.remaining_restarts,
            "duration_ms": None,
            **fields,
        }
        return Event(f"torchelastic.worker.status.{state}", source=source, metadata=metadata)

    def record(self, event: Event) -> None:
        """Gives an event to the handler that the spec names."""
        record(event, getattr(self.spec, "event_log_handler", "null"))  # not in older torch

    def tell_end(self, result: api.RunResult) -> None:
        """Tells torch's metrics how the job ended, and the handler of events how each worker did."""
        spec, failed = self.spec, result.is_failed()
        again = self.remaining_restarts != spec.max_restarts
        used = 1 - (self.remaining_restarts + 1) / (spec.max_restarts + 1)
        told = {
            "flakiness": 100 if failed else int(100 * used),
            "run_total": 1,
            "run_success_with_retries": int(not failed and again),
            "run_success_no_retries": int(not failed and not again),
            "run_failed_with_retries": int(failed and again),
            "run_failed_no_retries": int(failed and not again),
        }
        for name, value in told.items():
            put_metric(f"workers.{spec.role}.{name}", value)
        for worker in self.copy().workers:
            self.record(self._worker_event(worker, result))

    def _worker_event(self, worker: api.Worker, result: api.RunResult) -> Event:
        failure: ProcessFailure | None = result.failures.get(worker.global_rank)
        was_ended = result.is_failed() and failure is None
        about = {  # torch has each in a tuple
            "local_rank": (worker.local_rank,),
            "role_rank": (worker.role_rank,),
            "role_world_size": (worker.role_world_size,),
            "exit_code": (failure and failure.exitcode,),
            "worker_pid": (failure and failure.pid,),
        }
        return self.event(
            "TERMINATED" if was_ended else result.state.value,
            EventSource.WORKER,
            about,
            global_rank=worker.global_rank,
            worker_id=str(worker.id),
            raw_error=None if failure is None else json.dumps(failure.error_file_data),
        )


def state_of(end: End) -> api.WorkerState:
    """The state of the workers at the end."""
    if end.signum is not None:
        return api.WorkerState.STOPPED
    return api.WorkerState.FAILED if end.result().exit_code else api.WorkerState.SUCCEEDED


def process_failures(end: End, first_rank: int) -> dict[int, ProcessFailure]:
    """The last failure of each rank that counts; the ranks in the order in which they failed first."""
    found: dict[int, ProcessFailure] = {}
    for failure in end.failures:
        one = ProcessFailure(failure.rank - first_rank, failure.pid, failure.exitcode, failure.error_file)
        if not failure.error_file:
            one.timestamp = int(failure.when)
            one.message = failure.error or one.message
        found[failure.rank] = one
    return found
