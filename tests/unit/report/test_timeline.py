"""The timeline of a report: rows, bands and marks on one clock, of a job that is simulated."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from simulated_job import SimulatedJob, simulate

from ft_wrapper import RestartReport
from ft_wrapper.attribution import Interruption
from ft_wrapper.protocol.records import Fault, Member
from ft_wrapper.report.goodput import BUCKETS, make_goodput
from ft_wrapper.report.incidents import WORDS, natural, slots_in
from ft_wrapper.report.look import SHAPE_OF, SHAPES
from ft_wrapper.report.timeline import MOST_ROWS, STATES, Line, Timeline, make_timeline
from ft_wrapper.restart.report import describe_faults


def timeline(records: list[dict[str, Any]]) -> Timeline:
    return make_timeline(records, make_goodput(records))


BUCKETS_OF = {state.name: state.buckets for state in STATES}


def four_faults() -> SimulatedJob:
    """Two nodes with ranks that train, and one of spares; each kind of fault once."""
    job = SimulatedJob(nodes=3, ranks=2)
    for kind, place in (("EXCEPTION", 0), ("TERMINATED", 1), ("SOFT_TIMEOUT", 0), ("node", 3)):
        job.train(100.0)
        job.fail(kind, place)
    job.train(100.0)
    job.finish()
    return job


def time_in(line: Line, state: str) -> float:
    """Seconds of all its ranks together."""
    return sum(
        (segment.end - segment.begin) * segment.shares.get(state, 0.0) * len(line.seats)
        for segment in line.segments
    )


def test_each_bucket_is_in_one_state() -> None:
    assert Counter(bucket for state in STATES for bucket in state.buckets) == Counter(BUCKETS.keys())


def test_a_row_for_each_rank_has_the_spans_of_goodput() -> None:
    records = four_faults().records
    goodput = make_goodput(records)
    found = make_timeline(records, goodput)
    assert [line.name for line in found.lines] == [f"slot {slot} on gpu00{slot // 2}" for slot in range(6)]
    assert (
        not found.is_folded and found.ranks == 6 and found.seconds == pytest.approx(goodput.seconds, abs=0.1)
    )
    for line in found.lines:
        ends = [line.segments[0].begin, *(segment.end for segment in line.segments)]
        assert [segment.begin for segment in line.segments] == pytest.approx(ends[:-1])
        assert all(sum(segment.shares.values()) == 1.0 for segment in line.segments)
    for state in STATES:
        seconds = sum(goodput.buckets.get(bucket, 0.0) for bucket in state.buckets)
        assert sum(time_in(line, state.name) for line in found.lines) == pytest.approx(seconds, abs=1e-3)


def test_hosts_with_clocks_of_their_own_are_put_on_one() -> None:
    """The simulated ones differ by days; a rank hears of a decision within 20 ms."""
    early = ("agent_started", "round_started", "rank_started", "register")
    records = four_faults().records
    # Of one of them the events begin later.
    found = timeline([each for each in records if each["host"] != "gpu001" or each["event"] not in early])
    first_steps = [
        next(segment.begin for segment in line.segments if "new" in segment.shares)
        for line in found.lines[:4]
    ]
    assert max(first_steps) - min(first_steps) < 0.1
    assert found.began == pytest.approx(1_790_000_000.0, abs=0.1)


def test_a_host_that_shares_no_iteration_goes_by_the_time_of_day() -> None:
    records = four_faults().records
    alone = records[0] | {"event": "register", "slot": 9, "incarnation": 0, "host": "other", "pid": 5}
    alone |= {"monotonic": 7.0, "time": 1_790_000_050.0, "started": 7.0}
    found = timeline([*records, alone, alone | {"event": "spare", "monotonic": 8.0, "time": 1_790_000_051.0}])
    (line,) = (line for line in found.lines if line.name == "slot 9 on other")
    assert line.segments[0].begin == pytest.approx(50.0, abs=0.1)


def test_iterations_are_bands_one_after_the_other() -> None:
    found = timeline(four_faults().records)
    assert [band.number for band in found.bands] == [0, 1, 2, 3, 4]
    for band, following in zip(found.bands, found.bands[1:], strict=False):
        assert band.begin < band.end <= following.begin
    assert found.bands[0].end - found.bands[0].begin == pytest.approx(125.0, abs=1.0)


def test_what_happened_is_numbered_with_the_logs_line_and_is_marked_where_it_was() -> None:
    found = timeline(four_faults().records)
    assert [(one.number, one.kind) for one in found.incidents] == [
        (1, "EXCEPTION"),
        (2, "TERMINATED"),
        (3, "SOFT_TIMEOUT"),
        (4, "UNRESPONSIVE"),
    ]
    assert [one.line.partition(":")[0] for one in found.incidents] == [f"restart {n}" for n in range(1, 5)]
    marks: dict[int, set[int]] = {}
    for mark in found.marks:
        marks.setdefault(mark.incident.number, set()).add(mark.line)
    lost = {number for number, line in enumerate(found.lines) if line.name.endswith("gpu002")}
    assert marks == {1: {0}, 2: {1}, 3: {0}, 4: lost}
    for incident, band in zip(found.incidents, found.bands, strict=False):
        assert incident.at == pytest.approx(band.end, abs=61.0)


def test_a_hang_of_very_many_is_marked_in_no_row() -> None:
    job = SimulatedJob(nodes=4, ranks=4)
    job.train(100.0)
    job.fail("SOFT_TIMEOUT", 0)
    job.finish()
    found = timeline([record for record in job.records if record["event"] != "restarted"])
    assert len(found.incidents) == 1 and found.marks == ()


def report_of(*faults: Fault) -> str:
    """The line in the log."""
    cause = describe_faults(faults)
    report = RestartReport(
        iteration=7, cause=cause, active_world_size=3, world_size=4, seconds=0.1, joined_slots=(9,)
    )
    return str(report)


@pytest.mark.parametrize(
    ("message", "slots"),
    [("died", (3,)), ("raised ValueError: rank 8 (slot 8 on b pid 8), rank 9 (slot 9)", (3,))],
)
def test_the_logs_line_names_the_slots_of_the_cause(message: str, slots: tuple[int, ...]) -> None:
    fault = Fault(Member(3, 0), 1, Interruption.TERMINATED, message, "node7", 4711)
    assert slots_in(report_of(fault)) == slots
    assert slots_in(report_of(dataclasses.replace(fault, rank=None))) == slots
    assert slots_in(report_of(dataclasses.replace(fault, rank=None, pid=0))) == slots
    assert slots_in(report_of(dataclasses.replace(fault, pid=0))) == slots


def test_the_logs_line_names_several_slots_or_only_some() -> None:
    faults = [
        Fault(Member(slot, 0), slot, Interruption.TERMINATED, "died", "a", slot) for slot in range(1, 9)
    ]
    assert slots_in(report_of(*faults[:3])) == (1, 2, 3)
    assert slots_in(report_of(*faults)) == (), "the others are counted"
    assert slots_in(report_of()) == ()
    assert slots_in("spare slot 1 on a died") == ()


def test_a_hang_is_marked_at_the_rank_that_the_others_waited_for() -> None:
    """The events say only who has noticed it."""
    job = SimulatedJob(nodes=2, ranks=4)
    job.train(100.0)
    job.fail("SOFT_TIMEOUT", 1)
    job.finish()
    (mark,) = timeline(job.records).marks
    assert mark.seats == (("gpu000", 1),)


def test_without_the_logs_line_the_faults_are_named() -> None:
    records = [record for record in four_faults().records if record["event"] != "restarted"]
    lines = [incident.line for incident in timeline(records).incidents]
    assert (
        lines[0]
        == "slot 0 on gpu000 raised RuntimeError: CUDA error: an illegal memory access was encountered"
    )
    assert lines[1] == "slot 1 on gpu000 died"
    assert sorted(lines[2].split("; ")) == [f"slot {slot} on gpu00{slot // 2} hung" for slot in (0, 2, 3, 4)]
    assert lines[3] == "slot 4 on gpu002 was lost with its host; slot 5 on gpu002 was lost with its host"


def test_each_kind_of_fault_has_words_and_a_mark() -> None:
    kinds = {kind.name for kind in Interruption}
    assert set(WORDS) == kinds and set(SHAPE_OF) == {*kinds, "JOINED"}
    assert set(SHAPE_OF.values()) == set(SHAPES)


def test_faults_in_the_wake_of_another_are_counted() -> None:
    job = SimulatedJob(nodes=2, ranks=2)
    job.train(100.0)
    job.fail("TERMINATED", 0)
    records = [record for record in job.records if record["event"] != "restarted"]
    died = next(record for record in records if record["event"] == "fault")
    other = died | {"kind": "EXCEPTION", "slot": 1, "pid": 99, "monotonic": died["monotonic"] - 0.01}
    (incident,) = timeline([*records, other]).incidents
    assert incident.line == "slot 0 on gpu000 died (and 1 fault in its wake)"
    assert incident.seats == (("gpu000", 0),)


def test_the_death_of_a_spare_is_told_though_no_iteration_ends() -> None:
    job = SimulatedJob(nodes=2, ranks=2)
    job.train(100.0)
    job.finish()
    begin = next(record for record in job.records if record["event"] == "spare")
    died = begin | {
        "event": "fault",
        "kind": "TERMINATED",
        "ends": False,
        "monotonic": begin["monotonic"] + 9,
    }
    (incident,) = timeline([*job.records, died]).incidents
    assert incident.line == "spare slot 2 on gpu001 died" and incident.kind == "TERMINATED"


def test_a_process_that_joins_is_no_fault() -> None:
    job = SimulatedJob(nodes=2, ranks=2)
    job.train(100.0)
    job.fail("EXCEPTION", 0)
    job.finish()
    (incident,) = timeline(
        [each for each in job.records if each["event"] not in ("fault", "restarted")]
    ).incidents
    assert (incident.kind, incident.line, incident.seats) == ("JOINED", "a process joined", ())


def test_many_ranks_are_folded_into_nodes_and_the_time_is_the_same() -> None:
    records = simulate(4, nodes=12, ranks=8)
    goodput = make_goodput(records)
    found = make_timeline(records, goodput)
    assert found.is_folded and [line.name for line in found.lines] == [f"gpu{host:03}" for host in range(12)]
    assert {line.size for line in found.lines} == {"8 ranks"}
    for state in ("new", "spare", "start", "hang"):
        seconds = sum(goodput.buckets.get(bucket, 0.0) for bucket in BUCKETS_OF[state])
        folded = sum(time_in(line, state) for line in found.lines)
        assert folded == pytest.approx(seconds, rel=0.01)


def test_very_many_nodes_are_grouped_but_those_in_which_something_happened() -> None:
    job = SimulatedJob(nodes=200, ranks=2)
    for kind, place in (("TERMINATED", 20), ("EXCEPTION", 301)):
        job.train(50.0)
        job.fail(kind, place)
    job.finish()
    found = timeline(job.records)
    assert len(found.lines) <= MOST_ROWS
    assert Counter(seat for line in found.lines for seat in line.seats) == Counter(
        (f"gpu{slot // 2:03}", slot) for slot in range(400)
    )
    own = [line for line in found.lines if line.hosts == 1]
    assert {(mark.incident.number, found.lines[mark.line].name) for mark in found.marks} == {
        (1, own[0].name),
        (2, own[1].name),
    }
    groups = [line for line in found.lines if line.hosts > 1]
    assert groups[0].name == "gpu000 … gpu003" and groups[0].size == "4 nodes, 8 ranks"
    # One of two ranks was gone for a while: the row shows that.
    assert any(segment.shares.get("gone") for segment in own[0].segments)


def test_ranks_of_one_host_are_grouped_too() -> None:
    job = SimulatedJob(nodes=1, ranks=130, spare_nodes=0)
    job.train(50.0)
    job.finish()
    found = timeline(job.records)
    assert len(found.lines) <= MOST_ROWS
    assert found.lines[0].name == "slots 0 to 2" and found.lines[0].size == "3 ranks"


def test_a_rank_with_very_many_spans_is_told_in_columns() -> None:
    job = SimulatedJob(nodes=1, ranks=1, spare_nodes=0)
    for _ in range(60):
        job.train(10.0)
        job.fail("EXCEPTION", 0)
    job.finish()
    goodput = make_goodput(job.records)
    assert len(goodput.rows[0].spans) > 400
    (line,) = make_timeline(job.records, goodput).lines
    assert len(line.segments) <= 500
    assert time_in(line, "new") == pytest.approx(goodput.buckets["useful_steps"], rel=0.05)
    assert time_in(line, "restart") > 0


def test_nothing_is_known_of_any_rank() -> None:
    agent = [{"event": "agent_started", "job": "", "host": "a", "pid": 1, "monotonic": 1.0}]
    found = timeline(agent)
    assert (found.lines, found.bands, found.incidents, found.seconds) == ((), (), (), 0.0)


def test_names_are_sorted_as_people_do() -> None:
    assert sorted(["node10", "node9", "a-2", "a-10"], key=natural) == ["a-2", "a-10", "node9", "node10"]
