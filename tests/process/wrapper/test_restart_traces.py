"""Restarts as traces, by OpenTelemetry's own SDK and its exporter into memory."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
from rank_harness import Job, Rank
from test_on_restart import ALL_PHASES, trains

from ft_wrapper import RestartReport
from ft_wrapper.attribution import Interruption
from ft_wrapper.restart.report import Promotion

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")

REPORT = RestartReport(
    iteration=3,
    cause="rank 1 (slot 1 on node7 pid 4711) died",
    interruption=Interruption.TERMINATED,
    lost_slots=(1,),
    promoted=(Promotion(4, 1),),
    active_world_size=4,
    world_size=4,
    seconds=0.5,
    phases={"abort": 0.1, "leave": 0.0, "arrive": 0.05, "decide": 0.15, "enter": 0.1},
)


def exporting() -> tuple[Any, Any]:
    """A tracer provider, and where its spans go."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, exporter = sdk.TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider, exporter


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Any:
    from opentelemetry import trace

    provider, exporter = exporting()
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "llm")
    return exporter


def test_a_restart_is_a_trace_with_a_span_for_each_phase(exporter: Any) -> None:
    from ft_wrapper.integrations.opentelemetry import trace_restart

    trace_restart(REPORT)
    *phases, restart = exporter.get_finished_spans()
    assert [span.name for span in phases] == ALL_PHASES and restart.name == "restart"
    assert restart.parent is None
    assert all(span.parent.span_id == restart.context.span_id for span in phases)
    assert {span.context.trace_id for span in phases} == {restart.context.trace_id}
    lengths = [span.end_time - span.start_time for span in (*phases, restart)]
    assert lengths == [100_000_000, 0, 50_000_000, 150_000_000, 100_000_000, 500_000_000]
    ends = [span.end_time for span in phases]
    assert [span.start_time for span in phases[1:]] == ends[:-1] and ends[-1] == restart.end_time
    assert dict(restart.attributes) == {
        "ft_wrapper.run_id": "llm",
        "ft_wrapper.iteration": 3,
        "ft_wrapper.cause": REPORT.cause,
        "ft_wrapper.kind": "terminated",
        "ft_wrapper.lost": (1,),
        "ft_wrapper.joined": (),
        "ft_wrapper.took_over": (4,),
        "ft_wrapper.active_world_size": 4,
        "ft_wrapper.world_size": 4,
    }


def test_each_restart_is_a_trace_of_its_own_on_rank_0_alone(
    exporter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever span the program is in."""
    from opentelemetry import trace

    from ft_wrapper.integrations.opentelemetry import trace_restart

    with trace.get_tracer("the program").start_as_current_span("training"):
        for rank in ("0", "0", "1", "None"):
            monkeypatch.setenv("RANK", rank)
            trace_restart(REPORT)
    spans = exporter.get_finished_spans()
    assert len({span.context.trace_id for span in spans}) == 3


def traced(rank: Rank) -> Any:
    from opentelemetry import trace

    from ft_wrapper.integrations.opentelemetry import trace_restart

    provider, exporter = exporting()
    trace.set_tracer_provider(provider)
    result = trains(rank, on_restart=trace_restart)
    rank.say("spans", names=[span.name for span in exporter.get_finished_spans()])
    return result


def test_a_job_is_traced_once(job: Job) -> None:
    job.start(2, traced)
    job.expect("in", 0, 1, n=0)
    job.tell("raise", 1)
    job.expect("in", 0, 1, n=1)
    job.tell("finish", 0, 1)
    assert job.wait() == [1, 1]
    told = [message["names"] for slot in (0, 1) for message in job[slot].said("spans")]
    assert sorted(told) == [[], [*ALL_PHASES, "restart"]]


def test_without_opentelemetry_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "ft_wrapper.integrations.opentelemetry", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'ft-wrapper\[otel\]'"):
        importlib.import_module("ft_wrapper.integrations.opentelemetry")
