"""The agent's events in torch's own format, which torch's launcher records at the end of a job."""

from __future__ import annotations

import json
import socket

from torch.distributed.elastic.events.api import Event, EventSource

from .group import Group


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
    now = group.copy()
    spec = now.spec
    about = {"group_world_size": now.group_world_size, "entry_point": spec.get_entrypoint_name()}  # type: ignore[no-untyped-call]
    metadata = {
        "run_id": spec.rdzv_handler.get_run_id(),
        "global_rank": None,
        "group_rank": now.group_rank,
        "worker_id": None,
        "role": spec.role,
        "hostname": socket.getfqdn(socket.gethostname()),
        "state": state,
        "total_run_time": int(run_seconds),
        "rdzv_backend": spec.rdzv_handler.get_backend(),
        "raw_error": raw_error,
        "metadata": json.dumps(about),
        "agent_restarts": spec.max_restarts - group.remaining_restarts,
        "duration_ms": None if duration_seconds is None else 1e3 * duration_seconds,
    }
    return Event(f"torchelastic.worker.status.{state}", source=EventSource.AGENT, metadata=metadata)
