"""Restarts as traces of OpenTelemetry: see ``docs/monitoring.md``."""

import os
import time
from typing import TYPE_CHECKING

from .. import __version__
from ..restart.report import RestartReport

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
except ImportError as error:
    raise ImportError(f"this needs OpenTelemetry: pip install 'ft-wrapper[otel]' ({error})") from error

if TYPE_CHECKING:
    from opentelemetry.util.types import Attributes


def trace_restart(report: RestartReport) -> None:
    """Makes a trace of a restart: for ``Wrapper(on_restart=trace_restart)``.

    The span ``restart`` has one child for each phase. Rank 0 of the new iteration makes it, with the phases
    as it saw them; other ranks do nothing. The tracer is the program's; without one nothing happens.

    Args:
        report: of the restart, which is over.
    """
    if os.environ.get("RANK") != "0":
        return
    tracer = trace.get_tracer("ft_wrapper", __version__)
    end = time.time_ns()
    phases = {name: round(1e9 * seconds) for name, seconds in report.phases.items()}
    begin = end - max(round(1e9 * report.seconds), sum(phases.values()))
    attributes: Attributes = {
        "ft_wrapper.run_id": os.environ.get("TORCHELASTIC_RUN_ID", ""),
        "ft_wrapper.iteration": report.iteration,
        "ft_wrapper.cause": report.cause,
        "ft_wrapper.kind": report.kind,
        "ft_wrapper.lost": report.lost_slots,
        "ft_wrapper.joined": report.joined_slots,
        "ft_wrapper.took_over": tuple(spare.slot for spare in report.promoted),
        "ft_wrapper.active_world_size": report.active_world_size,
        "ft_wrapper.world_size": report.world_size,
    }
    # Its own trace, whatever span the program is in.
    root = tracer.start_span("restart", Context(), attributes=attributes, start_time=begin)
    inside = trace.set_span_in_context(root, Context())
    at = end - sum(phases.values())
    for name, took in phases.items():
        tracer.start_span(name, inside, start_time=at).end(at + took)
        at += took
    root.end(end)
