"""The timeline of a report: rows, bands and marks on one clock, of a job that is simulated."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest
from simulated_job import SimulatedJob

from ft_wrapper.attribution import Interruption
from ft_wrapper.report import Report
from ft_wrapper.report.goodput import BUCKETS, make_goodput
from ft_wrapper.report.page import SHAPE_OF, STATE_OF, STATES, Line, Picture, natural
from ft_wrapper.report.restarts import find_incidents
from ft_wrapper.report.timeline import Timeline


def report_of(records: list[dict[str, Any]]) -> Report:
    timeline = Timeline.read(records)
    return Report("llm-70b", timeline, make_goodput(timeline), find_incidents(timeline))


def picture(records: list[dict[str, Any]]) -> Picture:
    return Picture(report_of(records))


def four_faults() -> SimulatedJob:
    """Two nodes with ranks that train, and one of spares; each kind of fault once."""
    job = SimulatedJob(nodes=3, ranks=2)
    for kind, place in (("EXCEPTION", 0), ("TERMINATED", 1), ("SOFT_TIMEOUT", 0), ("node", 3)):
        job.train(100.0)
        job.fail(kind, place)
    job.train(100.0)
    job.finish()
    return job


def one_fault(kind: str | None, place: int = 0, **size: int) -> SimulatedJob:
    """A job with one fault; None: with none."""
    job = SimulatedJob(**{"nodes": 2, "ranks": 2, **size})
    job.train(100.0)
    if kind is not None:
        job.fail(kind, place)
    job.finish()
    return job


def time_in(line: Line, state: str) -> float:
    return sum(span.end - span.begin for span in line.spans if STATE_OF[span.kind].name == state)


def test_each_bucket_is_in_one_state() -> None:
    assert Counter(bucket for state in STATES for bucket in state.buckets) == Counter(BUCKETS.keys())


def test_a_row_for_each_rank_has_the_spans_of_goodput() -> None:
    found = picture(four_faults().records)
    goodput = found.report.time
    assert [line.name for line in found.lines] == [f"slot {slot} on gpu00{slot // 2}" for slot in range(6)]
    assert found.seconds == pytest.approx(goodput.seconds, abs=0.1)
    for line in found.lines:
        ends = [line.spans[0].begin, *(span.end for span in line.spans)]
        assert [span.begin for span in line.spans] == pytest.approx(ends[:-1])
    for state in STATES:
        seconds = sum(goodput.buckets.get(bucket, 0.0) for bucket in state.buckets)
        assert sum(time_in(line, state.name) for line in found.lines) == pytest.approx(seconds, abs=1e-3)


def test_hosts_with_clocks_of_their_own_are_put_on_one() -> None:
    """The simulated ones differ by days; a rank hears of a decision within 20 ms."""
    early = ("agent_started", "round_started", "rank_started", "register")
    records = four_faults().records
    # Of one of them the events begin later.
    found = picture([each for each in records if each["host"] != "gpu001" or each["event"] not in early])
    first_steps = [
        next(span.begin for span in line.spans if STATE_OF[span.kind].name == "new")
        for line in found.lines[:4]
    ]
    assert max(first_steps) - min(first_steps) < 0.1
    assert found.report.timeline.began == pytest.approx(1_790_000_000.0, abs=0.1)


def test_a_host_that_shares_no_iteration_goes_by_the_time_of_day() -> None:
    records = four_faults().records
    alone = records[0] | {"event": "register", "slot": 9, "incarnation": 0, "host": "other", "pid": 5}
    alone |= {"monotonic": 7.0, "time": 1_790_000_050.0, "started": 7.0}
    found = picture([*records, alone, alone | {"event": "spare", "monotonic": 8.0, "time": 1_790_000_051.0}])
    (line,) = (line for line in found.lines if line.name == "slot 9 on other")
    assert line.spans[0].begin == pytest.approx(50.0, abs=0.1)


def test_iterations_are_bands_one_after_the_other() -> None:
    bands = picture(four_faults().records).bands
    assert [number for number, _, _ in bands] == [0, 1, 2, 3, 4]
    for (_, begin, end), (_, following, _) in itertools.pairwise(bands):
        assert begin < end <= following
    assert bands[0][2] - bands[0][1] == pytest.approx(125.0, abs=1.0)


def test_what_happened_is_numbered_with_the_logs_line_and_is_marked_where_it_was() -> None:
    found = picture(four_faults().records)
    incidents = found.report.incidents
    assert [(one.number, one.kind) for one in incidents] == [
        (1, "exception"),
        (2, "terminated"),
        (3, "soft_timeout"),
        (4, "unresponsive"),
    ]
    assert [one.line.partition(":")[0] for one in incidents] == [f"restart {n}" for n in range(1, 5)]
    assert [one.restart.culprits for one in incidents if one.restart] == [(0,), (1,), (0,), (4, 5)]
    marks: dict[int, set[int]] = {}
    for incident, line in found.marks():
        marks.setdefault(incident.number, set()).add(line)
    lost = {number for number, line in enumerate(found.lines) if line.name.endswith("gpu002")}
    assert marks == {1: {0}, 2: {1}, 3: {0}, 4: lost}
    for incident, (_, _, end) in zip(incidents, found.bands, strict=False):
        assert incident.at == pytest.approx(end, abs=61.0)


def test_a_victim_is_not_blamed() -> None:
    """The survivor's collective fails first, as gloo's does: "Connection reset"."""
    job = one_fault("TERMINATED")
    died = next(record for record in job.records if record["event"] == "fault")
    reset = {"kind": "EXCEPTION", "slot": 1, "pid": 99, "rank": 1, "message": "raised RuntimeError: reset"}
    records = [*job.records, died | reset | {"monotonic": died["monotonic"] - 0.01}]
    for own in (records, [record for record in records if record["event"] != "restarted"]):
        report = report_of(own)
        (incident,), (restart,) = report.incidents, report.restarts
        assert incident.seats == (("gpu000", 0),) and restart.culprits == (0,)
        assert (incident.kind, restart.kind) == ("terminated", "terminated")
        assert restart.cause.startswith("rank 0 (slot 0 on gpu000") and "reset" not in restart.cause
        assert restart.cause in report.to_text() and json.loads(report.to_json())["restarts"][0][
            "culprits"
        ] == [0]


@pytest.mark.parametrize(
    ("kind", "shape"), [("requested", "asked"), ("drained", "asked"), ("join", "joined")]
)
def test_an_end_without_a_fault_is_called_what_it_was(kind: str, shape: str) -> None:
    """`ftrun restart` and `ftrun drain` were called a process that joined."""
    records = [record for record in one_fault("EXCEPTION").records if record["event"] != "fault"]
    said = next(record for record in records if record["event"] == "restarted")
    said |= {
        "kind": kind,
        "culprits": [1] * (kind == "drained"),
        "cause": "words",
        "line": "restart 1: words",
    }
    report = report_of(records)
    (incident,) = report.incidents
    assert (incident.kind, incident.line, SHAPE_OF[incident.kind]) == (kind, "restart 1: words", shape)
    assert incident.seats == ((("gpu000", 1),) if kind == "drained" else ())


def test_notes_of_agents_come_once_and_in_order() -> None:
    """Each agent notes the notice, and the end."""
    agents = [one for one in one_fault(None).records if one["event"] == "agent_started"]
    lines = [
        ("notice", "node 1: SIGTERM"),
        ("result", "exit code 75"),
        *[("kept_out", f"{n}") for n in range(19)],
    ]
    notes = [
        one | {"event": event, "line": line, "monotonic": one["monotonic"] + number}
        for number, (event, line) in enumerate(lines)
        for one in reversed(agents)
    ]
    report = report_of([*one_fault(None).records, *notes])
    expected = [line for _, line in lines[:20]] + ["1 more"]
    assert report.notes == expected
    assert "\n".join(expected) in report.to_text()
    assert json.loads(report.to_json())["notes"] == expected
    assert report_of(one_fault(None).records).notes == []


def test_a_hang_of_very_many_is_marked_in_no_row() -> None:
    job = one_fault("SOFT_TIMEOUT", nodes=4, ranks=4)
    found = picture([record for record in job.records if record["event"] != "restarted"])
    assert len(found.report.incidents) == 1 and not list(found.marks())


def test_a_hang_is_marked_at_the_rank_that_the_others_waited_for() -> None:
    """The faults say only who has noticed it; the last rank back says more."""
    found = picture(one_fault("SOFT_TIMEOUT", 1, ranks=4).records)
    ((_, line),) = found.marks()
    assert found.lines[line].seat == ("gpu000", 1)


def test_without_the_logs_line_the_faults_are_named() -> None:
    records = [record for record in four_faults().records if record["event"] != "restarted"]
    lines = [incident.line for incident in report_of(records).incidents]
    assert lines[0].startswith("rank 0 (slot 0 on gpu000) raised RuntimeError: CUDA error")
    assert lines[1] == "rank 1 (slot 1 on gpu000) died"
    hung = [f"slot {slot} (on gpu00{slot // 2}) soft timeout" for slot in (0, 2, 3, 4)]
    assert sorted(lines[2].split("; ")) == hung
    assert lines[3] == "no known fault"  # the rank that found a node lost has not said so


def test_each_kind_of_fault_has_a_mark() -> None:
    assert set(SHAPE_OF) == {*(kind.name.lower() for kind in Interruption), "join", "unknown"}


def test_faults_in_the_wake_of_another_are_counted() -> None:
    job = one_fault("TERMINATED")
    records = [record for record in job.records if record["event"] != "restarted"]
    died = next(record for record in records if record["event"] == "fault")
    other = died | {"kind": "EXCEPTION", "slot": 1, "pid": 99, "monotonic": died["monotonic"] - 0.01}
    (incident,) = report_of([*records, other]).incidents
    assert incident.line == "rank 0 (slot 0 on gpu000) died (and 1 fault in its wake)"
    assert incident.seats == (("gpu000", 0),)


def test_the_death_of_a_spare_is_told_though_no_iteration_ends() -> None:
    job = one_fault(None)
    begin = next(record for record in job.records if record["event"] == "spare")
    died = begin | {"event": "fault", "kind": "TERMINATED", "message": "died", "ends": False}
    died["monotonic"] += 9
    (incident,) = report_of([*job.records, died]).incidents
    assert incident.line == "spare slot 2 (on gpu001) died" and incident.kind == "terminated"


def test_nothing_is_known_of_any_rank() -> None:
    agent = [{"event": "agent_started", "job": "", "host": "a", "pid": 1, "monotonic": 1.0}]
    found = picture(agent)
    assert (found.lines, found.bands, found.report.incidents, found.seconds) == ([], [], (), 0.0)


def test_names_are_sorted_as_people_do() -> None:
    assert sorted(["node10", "node9", "a-2", "a-10"], key=natural) == ["a-2", "a-10", "node9", "node10"]
