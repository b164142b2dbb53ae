"""What torch hears of an agent, by torch's own code for that: events, metrics."""

from typing import Any, NoReturn

from torch.distributed.elastic.agent.server import api

from .group import Group
from .torch_api.types import worker_group


def _never(*_: Any) -> NoReturn:
    """In the place of what torch's agents do for their workers: here the agent does it."""
    raise NotImplementedError


class TorchReports(api.SimpleElasticAgent):
    """The part of torch's agent that reports, about the workers of ours.

    Args:
        spec: of the workers.
        group: their state.
    """

    _start_workers = _stop_workers = _monitor_workers = _shutdown = _never  # type: ignore[assignment]

    def __init__(self, spec: api.WorkerSpec, group: Group) -> None:
        # Not torch's, which makes a worker group of its own.
        self._spec = spec
        self._group = group
        self._total_execution_time = 0

    @property
    def _worker_group(self) -> api.WorkerGroup:  # type: ignore[override]
        return worker_group(self._spec, self._group)

    @property
    def _remaining_restarts(self) -> int:  # type: ignore[override]
        return self._group.remaining_restarts

    def _get_worker_state(self, worker: api.Worker, result: api.RunResult) -> str:
        """As torch's, but a worker need not have returned anything."""
        is_victim = result.is_failed() and worker.global_rank not in result.failures
        return "TERMINATED" if is_victim else str(result.state.value)

    def took(self, seconds: float) -> None:
        """Notes how long the agent has run."""
        self._total_execution_time = int(seconds)

    def report_end(self, result: api.RunResult) -> None:
        """Reports how the job ended, and how each worker did."""
        self._record_metrics(result)
        self._record_worker_events(result)
