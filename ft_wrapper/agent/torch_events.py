"""How a job ended, in torch's own format: state, failures, events, and metrics."""

from __future__ import annotations

import json
import socket
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerState
from torch.distributed.elastic.events import record
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.metrics.api import put_metric
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from .group import Group
from .nodes import End


def state_of(end: End) -> WorkerState:
    """The state of the workers at the end."""
    if end.signum is not None:
        return WorkerState.STOPPED
    failed = end.failures or end.ended_by or end.error_elsewhere
    return WorkerState.FAILED if failed else WorkerState.SUCCEEDED


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


def agent_event(
    group: Group,
    state: str,
    *,
    run_seconds: float,
    duration_seconds: float | None = None,
    raw_error: str | None = None,
) -> Event:
    """Puts what is known of the agent into an event, with the fields that torch's agent gives it.

    Args:
        group: the workers.
        state: what has happened, ``SUCCEEDED`` for instance.
        run_seconds: how long the agent has run.
        duration_seconds: how long that took which the event is about; None if it is about a moment.
        raw_error: a traceback, if something failed.
    """
    own = {
        "total_run_time": int(run_seconds),
        "raw_error": raw_error,
        "duration_ms": None if duration_seconds is None else 1e3 * duration_seconds,
    }
    return _event(group, EventSource.AGENT, state, {}, own)


def record_event(group: Group, event: Event) -> None:
    """Gives an event to the handler that the spec names.

    Args:
        group: the workers.
        event: about them.
    """
    record(event, getattr(group.spec, "event_log_handler", "null"))  # not in older torch


def tell_end(group: Group, result: RunResult, run_seconds: float) -> None:
    """Tells torch's metrics how the job ended, and the handler of events how each worker did.

    Args:
        group: the workers.
        result: of the job.
        run_seconds: how long the agent has run.
    """
    spec, failed = group.spec, result.is_failed()
    again = group.remaining_restarts != spec.max_restarts
    used = 1 - (group.remaining_restarts + 1) / (spec.max_restarts + 1)
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
    for worker in group.copy().workers:
        record_event(group, _worker_event(group, worker, result, run_seconds))


def _worker_event(group: Group, worker: Worker, result: RunResult, run_seconds: float) -> Event:
    failure: ProcessFailure | None = result.failures.get(worker.global_rank)
    was_ended = result.is_failed() and failure is None
    about = {  # torch has each in a tuple
        "local_rank": (worker.local_rank,),
        "role_rank": (worker.role_rank,),
        "role_world_size": (worker.role_world_size,),
        "exit_code": (failure and failure.exitcode,),
        "worker_pid": (failure and failure.pid,),
    }
    own = {
        "global_rank": worker.global_rank,
        "worker_id": str(worker.id),
        "total_run_time": int(run_seconds),
        "raw_error": None if failure is None else json.dumps(failure.error_file_data),
    }
    state = "TERMINATED" if was_ended else result.state.value
    return _event(group, EventSource.WORKER, state, about, own)


def _event(
    group: Group, source: EventSource, state: str, about: dict[str, Any], own: dict[str, Any]
) -> Event:
    now = group.copy()
    spec = now.spec
    about = {
        "group_world_size": now.group_world_size,
        "entry_point": spec.get_entrypoint_name(),  # type: ignore[no-untyped-call]
        **about,
    }
    metadata = {
        "run_id": spec.rdzv_handler.get_run_id(),
        "global_rank": None,
        "group_rank": now.group_rank,
        "worker_id": None,
        "role": spec.role,
        "hostname": socket.getfqdn(socket.gethostname()),
        "state": state,
        "rdzv_backend": spec.rdzv_handler.get_backend(),
        "metadata": json.dumps(about),
        "agent_restarts": spec.max_restarts - group.remaining_restarts,
        "duration_ms": None,
        **own,
    }
    return Event(f"torchelastic.worker.status.{state}", source=source, metadata=metadata)
