"""What an agent tells Prometheus of its node's ranks, at ``/metrics`` of the health endpoint.

All of it is in this process's memory, or in memory that its ranks share with it: neither ranks nor a store
are asked. Unknown values have no sample. Counters and times of ranks are this node's own; see
``docs/monitoring.md`` for what may be added up over nodes.
"""

import functools
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ..attribution import Interruption
from .group import BOUNDS, RANK_STATES, Group
from .nodes import Nodes

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

    _Kind = type[CounterMetricFamily | GaugeMetricFamily]

#: What restarts are counted by, see `RestartReport.kind`.
CAUSES = (*(kind.name.lower() for kind in Interruption), "join", "unknown")
#: States of nodes in the rendezvous.
NODE_STATES = ("active", "lost", "waiting", "spare")

# By label; or one value without a label, or none.
_Values = Mapping[str, float] | float | None


def metrics(group: Group, nodes: Nodes, run_id: str) -> "WSGIApplication":
    """The application for ``/metrics``; without prometheus-client, it says what to install.

    Args:
        group: this node's workers.
        nodes: all nodes.
        run_id: of the job.
    """
    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app
    except ImportError:
        return _without_metrics
    registry = CollectorRegistry()
    registry.register(_Collector(group, nodes, run_id))
    app: WSGIApplication = make_wsgi_app(registry)
    return app


def _without_metrics(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
    start_response("404 Not Found", [("Content-Type", "text/plain")])
    return [b"install ft-wrapper[prometheus] for metrics\n"]


class _Collector:
    def __init__(self, group: Group, nodes: Nodes, run_id: str) -> None:
        self._group = group
        self._nodes = nodes
        self._run_id = run_id

    def collect(self) -> "Iterator[Metric]":
        from prometheus_client import core

        counter = functools.partial(self._filled, core.CounterMetricFamily)
        gauge = functools.partial(self._filled, core.GaugeMetricFamily)
        known = self._group.rank_metrics
        known.read()
        restarts = _all(CAUSES, known.restarts)
        states = {**known.states, "gone": len(self._group.missing)}
        yield counter("restarts", "Restarts; one node counts each", restarts, "cause")
        words, labels = "How long restarts took, by phase", ["run_id", "phase"]
        seconds = core.HistogramMetricFamily("ft_wrapper_restart_seconds", words, labels=labels)
        for phase, taken in known.phases.items():
            buckets = list(zip([*map(str, BOUNDS), "+Inf"], taken.cumulative(), strict=True))
            seconds.add_metric([self._run_id, phase], buckets, taken.sum)
        yield seconds
        yield gauge("ranks", "Ranks of this node", _all(RANK_STATES, states), "state")
        yield gauge("iteration", "Number of the global restart iteration", known.iteration)
        yield gauge("step", "The step reported last", known.step)
        since = None if known.progress is None else time.time() - (time.monotonic() - known.progress)
        yield gauge("last_progress_timestamp_seconds", "When a rank made progress last", since)
        yield gauge("slow_share", "What the slowest rank costs each step, as a share of it", known.slow)
        counts, left = self._group.counts, self._group.remaining_restarts
        yield counter("replacements", "Processes started in place of others", counts.replacements)
        yield gauge("nodes", "Nodes of the job", self._node_states(), "state")
        yield counter("rank_failures", "Rank processes that failed", counts.failures)
        yield counter("group_restarts", "Restarts of all processes", counts.restarts)
        yield counter("rounds", "Starts of all processes", counts.rounds)
        yield gauge("workers_remaining_restarts", "Restarts of all processes still allowed", left)
        state = {self._group.state.name.lower(): 1}
        yield gauge("workers_state", "1 for the state of the processes", state, "state")

    def _node_states(self) -> Mapping[str, float]:
        """All that our rendezvous knows; with another one, the number of nodes that take part."""
        states = self._nodes.states()
        if not states:
            where = self._group.round
            return {} if where is None else {"active": where.group_world_size}
        return _all(NODE_STATES, states)

    def _filled(self, kind: "_Kind", name: str, words: str, values: _Values, label: str = "") -> "Metric":
        made = kind(f"ft_wrapper_{name}", words, labels=["run_id", label] if label else ["run_id"])
        if isinstance(values, Mapping):
            for labelled, value in values.items():
                made.add_metric([self._run_id, labelled], value)
        elif values is not None:
            made.add_metric([self._run_id], values)
        return made


def _all(names: Iterable[str], values: Mapping[str, float]) -> dict[str, float]:
    """A value for each name: one that appeared later would have no first value to compare with."""
    return {name: values.get(name, 0) for name in names}
