"""Torch's events of a node's ranks, with its metrics of their end, for programs that use torch's agents."""

import json
import socket
from collections.abc import Mapping

from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.events import record
from torch.distributed.elastic.events.api import Event, EventMetadataValue, EventSource
from torch.distributed.elastic.metrics.api import put_metric
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from .group import Group


def event(
    now: api.WorkerGroup,
    group: Group,
    state: str,
    source: EventSource = EventSource.AGENT,
    about: Mapping[str, object] | None = None,
    **fields: EventMetadataValue,
) -> Event:
    """An event of torch's, with the fields that torch's agent gives it.

    Args:
        now: the workers, by torch's type.
        group: the workers.
        state: what has happened, ``SUCCEEDED`` for instance.
        source: whom it is about, an agent or a worker.
        about: what a worker's event has beside the group's size and entry point.
        fields: that differ from those of an agent at a moment: ``raw_error`` or ``duration_ms``, say.
    """
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
        "total_run_time": 0,
        "rdzv_backend": spec.rdzv_handler.get_backend(),
        "raw_error": None,
        "metadata": json.dumps(
            {"group_world_size": now.group_world_size, "entry_point": entry_point, **(about or {})}
        ),
        "agent_restarts": spec.max_restarts - group.remaining_restarts,
        "duration_ms": None,
        **fields,
    }
    return Event(f"torchelastic.worker.status.{state}", source=source, metadata=metadata)


def record_event(spec: api.WorkerSpec, one: Event) -> None:
    """Gives an event to the handler that the spec names."""
    record(one, getattr(spec, "event_log_handler", "null"))  # not in older torch


def report_end(now: api.WorkerGroup, group: Group, result: api.RunResult, run_seconds: float) -> None:
    """Reports to torch's metrics how the job ended, and to the handler of events how each worker did.

    Args:
        now: the workers, by torch's type.
        group: the workers.
        result: how they ended.
        run_seconds: how long the agent has run.
    """
    spec, failed = now.spec, result.is_failed()
    again = group.remaining_restarts != spec.max_restarts
    used = 1 - (group.remaining_restarts + 1) / (spec.max_restarts + 1)
    values = {
        "flakiness": 100 if failed else int(100 * used),
        "run_total": 1,
        "run_success_with_retries": int(not failed and again),
        "run_success_no_retries": int(not failed and not again),
        "run_failed_with_retries": int(failed and again),
        "run_failed_no_retries": int(failed and not again),
    }
    for name, value in values.items():
        put_metric(f"workers.{spec.role}.{name}", value)
    for worker in now.workers:
        failure: ProcessFailure | None = result.failures.get(worker.global_rank)
        about = {  # torch has each in a tuple
            "local_rank": (worker.local_rank,),
            "role_rank": (worker.role_rank,),
            "role_world_size": (worker.role_world_size,),
            "exit_code": (failure and failure.exitcode,),
            "worker_pid": (failure and failure.pid,),
        }
        of_worker = event(
            now,
            group,
            "TERMINATED" if failed and failure is None else result.state.value,
            EventSource.WORKER,
            about,
            total_run_time=int(run_seconds),
            global_rank=worker.global_rank,
            worker_id=str(worker.id),
            raw_error=None if failure is None else json.dumps(failure.error_file_data),
        )
        record_event(spec, of_worker)
