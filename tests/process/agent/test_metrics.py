"""What Prometheus is told, of a real job through faults; dashboard and alerts ask for nothing else."""

from __future__ import annotations

import dataclasses
import os
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from agent_job import TIMEOUT, FtRun, await_that

from ft_wrapper import events
from ft_wrapper.agent import health
from ft_wrapper.agent.group import PHASES, RANK_STATES
from ft_wrapper.agent.metrics import CAUSES, NODE_STATES
from ft_wrapper.testing.etcd_server import free_port

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")
from prometheus_client.openmetrics.parser import text_string_to_metric_families  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
MONITORING = ROOT / "examples" / "monitoring"
JOB = ROOT / "tests" / "process" / "goodput" / "goodput_job.py"
NAMES = re.compile(r"\bft_wrapper_\w+")

Samples = dict[tuple[str, ...], float]


def scrape(port: int, form: str = "text/plain") -> str:
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": form})
    with urllib.request.urlopen(asked, timeout=TIMEOUT) as answer:
        return str(answer.read().decode())


def samples(text: str) -> Samples:
    """The values, by name and labels but for the job's."""
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for one in family.samples:
            labels = [value for name, value in sorted(one.labels.items()) if name != "run_id"]
            assert one.labels["run_id"]
            found[(one.name, *labels)] = one.value
    return found


@dataclasses.dataclass(frozen=True)
class Scraped:
    """A job that was scraped.

    Args:
        early: a scrape in its first iteration, or later.
        late: another one, when all steps were done and the killed process was back.
        newer: one more, in the format that Prometheus asks for first.
        records: all events.
    """

    early: str
    late: str
    newer: str
    records: list[dict[str, Any]]


def run_job(folder: Path) -> Scraped:
    """Two ranks of three train: an exception, a SIGKILL, a hang."""
    os.mkfifo(folder / "gate")
    port = free_port()
    words = ["--nproc-per-node", "3", "--max-rank-restarts", "100", "--rdzv-id", "llm", str(JOB), str(folder)]
    words += ["--faults", "exception:17,sigkill:28,hang:45", "--active", "2", "--gate"]
    with FtRun(folder / "run", *words, environment={health.ADDRESS_ENV: f"127.0.0.1:{port}"}) as run:
        run.await_file(folder / "checkpoint")
        early = scrape(port)
        run.await_file(folder / "at the gate")
        await_that(lambda: len(run.events("register")) == 4, run)
        late = scrape(port)
        newer = scrape(port, "application/openmetrics-text; version=1.0.0")
        (folder / "gate").write_text("")
        assert run.end() == 0, run.said
    return Scraped(early, late, newer, events.load(str(folder / "run" / "events")))


def test_what_is_told_of_a_job(tmp_path: Path) -> None:
    job = run_job(tmp_path)
    early, found = samples(job.early), samples(job.late)
    counters = [key for key in early if key[0].endswith(("_total", "_count", "_sum", "_bucket"))]
    assert counters and all(found[key] >= early[key] for key in counters), "no counter goes down"
    assert early.keys() <= found.keys() | {("ft_wrapper_workers_state", "unhealthy")}
    openmetrics = text_string_to_metric_families(job.newer)
    assert job.newer.endswith("# EOF\n")
    assert {one.name for family in openmetrics for one in family.samples} == {name for name, *_ in found}
    restarts = {cause: found["ft_wrapper_restarts_total", cause] for cause in CAUSES}
    caused = {cause: count for cause, count in restarts.items() if count}
    # The killed process comes back at once or at the next restart, which may be one of its own.
    assert caused.pop("join", 0) <= 1
    assert caused == {"exception": 1, "terminated": 1, "soft_timeout": 1}
    number = sum(restarts.values())
    assert found["ft_wrapper_restart_seconds_count", "total"] == number
    assert found["ft_wrapper_restart_seconds_bucket", "+Inf", "total"] == number
    total = found["ft_wrapper_restart_seconds_sum", "total"]
    parts = sum(found["ft_wrapper_restart_seconds_sum", phase] for phase in PHASES if phase != "total")
    assert 0 < parts <= total * 1.001 + 0.05
    ranks = {state: found["ft_wrapper_ranks", state] for state in RANK_STATES}
    assert (ranks["active"], ranks["spare"] + ranks["waiting"], ranks["gone"]) == (2, 1, 0)
    assert found["ft_wrapper_iteration",] == number
    assert found["ft_wrapper_step",] == 59
    assert found["ft_wrapper_replacements_total",] == 1
    assert found["ft_wrapper_nodes", "active"] == 1
    newest = max(record["time"] for record in job.records if record["event"] == "enter")
    assert newest < found["ft_wrapper_last_progress_timestamp_seconds",] <= time.time()
    # Dashboard and alerts ask for what there is: by name, and by the values of labels that they choose.
    names = {name for name, *_ in found} | {"ft_wrapper_restart_seconds"}  # all of the histogram
    for path in sorted(MONITORING.iterdir()):
        text = path.read_text()
        asked = set(NAMES.findall(text)) - {"ft_wrapper_"}
        assert asked and asked <= names, f"{path.name} asks for {asked - names}"
        for label, value in re.findall(r'\b(cause|phase|state)!?=\\?"(\w+)\\?"', text):
            known = {"cause": CAUSES, "phase": PHASES, "state": {*RANK_STATES, *NODE_STATES}}
            assert value in known[label], f"{path.name}: there is no {label}={value}"
