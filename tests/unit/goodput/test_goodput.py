"""What the time of a job went to, told from events that are made up."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_wrapper.report import goodput
from ft_wrapper.report.goodput import BUCKETS, Goodput
from ft_wrapper.report.reading import by_job
from ft_wrapper.report.timeline import Timeline

Record = dict[str, Any]
PHASES = ("notify", "abort", "leave", "arrive", "decide", "enter")
_pids = itertools.count(1000)


def make_goodput(records: list[Record]) -> Goodput:
    return goodput.make_goodput(Timeline.read(records))


class Writer:
    """Writes the events of one process.

    Args:
        records: where to.
        host: on which it runs.
        skew: what its host's clock is ahead.
        slot: its seat.
        incarnation: which process in a row.
    """

    def __init__(
        self, records: list[Record], host: str, skew: float, slot: int, incarnation: int = 0
    ) -> None:
        self.records, self.host, self.skew = records, host, skew
        self.who = {"slot": slot, "incarnation": incarnation}
        self.pid = next(_pids)
        self.n, self.call = 0, 0
        self.nonce = ""

    def write(self, event: str, at: float, **fields: Any) -> None:
        """Notes an event, at a moment of the job's own time."""
        view = {"iteration": self.n, "call": self.call, "nonce": self.nonce} if self.nonce else {}
        for name in ("began", "since", "started"):
            if name in fields:
                fields[name] += self.skew
        place = {"host": self.host, "pid": self.pid, "monotonic": at + self.skew, "time": at}
        self.records.append({"event": event, "job": "", **view, **self.who, **fields, **place})

    def move(self, n: int, at: float, name: str = "n") -> None:
        """Goes on to an iteration."""
        after = {"after": self.nonce} if self.nonce else {}
        self.n, self.nonce = n, f"{name}{n}"
        self.write("decided", at, **after)

    def steps(self, at: float, first: int, last: int, seconds: float, every: int = 1) -> float:
        """Tells steps, not each of them; returns when the last one began."""
        for step in range(first, last + 1):
            if (step - first) % every == 0 or step == last:
                self.write("step", at + seconds, step=step, began=at)
            at += seconds
        return at - seconds


def seconds_of(found: Goodput) -> dict[str, float]:
    return {name: pytest.approx(value, abs=1e-6) for name, value in found.buckets.items()}


def shuffled(records: list[Record], seed: int) -> list[Record]:
    """The events of one process after those of another one; those of a process are in order."""
    pids = sorted({record["pid"] for record in records})
    random.Random(seed).shuffle(pids)
    return [record for pid in pids for record in records if record["pid"] == pid]


def check(found: Goodput) -> None:
    """What is true of every report: each seat is in one bucket at any moment."""
    assert set(found.buckets) <= set(BUCKETS) and min(found.buckets.values(), default=0.0) >= 0.0
    assert sum(found.buckets.values()) == pytest.approx(found.seat_seconds)
    for row in found.rows:
        ends = [row.begin, *(span.end for span in row.spans)]
        assert [span.begin for span in row.spans] == ends[:-1], "there are gaps"
        assert ends[-1] == row.end
        assert all(span.end > span.begin and span.kind in BUCKETS for span in row.spans)


# A job whose truth is known ------------------------------------------------------------------------------


@dataclasses.dataclass
class Truth:
    """A job's events, and what they mean."""

    records: list[Record] = dataclasses.field(default_factory=list)
    buckets: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(BUCKETS, 0.0))
    steps: int = 0
    again: int = 0


durations = st.floats(0.01, 50.0)
rounds = st.lists(
    st.fixed_dictionaries(
        {
            "prep": durations,
            "steps": st.integers(1, 40),
            "cut": st.floats(0.05, 0.95),  # of the step that the fault comes in
            "hang": st.none() | durations,
            "phases": st.tuples(*[durations] * 5),
            "back": st.integers(0, 30),
        }
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(
    rounds=rounds,
    ranks=st.integers(1, 4),
    hosts=st.integers(1, 2),
    every=st.integers(1, 7),
    step=st.floats(0.1, 3.0),
    begin=durations,
    end=durations,
    first=st.integers(0, 10),
)
def test_a_job_whose_truth_is_known(
    rounds: list[dict[str, Any]],
    ranks: int,
    hosts: int,
    every: int,
    step: float,
    begin: float,
    end: float,
    first: int,
) -> None:
    """All ranks do the same: they train, a fault comes, they go back some steps; the last round ends well."""
    truth = Truth()
    who = [Writer(truth.records, f"host{slot % hosts}", 1e4 * (slot % hosts), slot) for slot in range(ranks)]

    def spend(bucket: str, seconds: float) -> None:
        truth.buckets[bucket] += seconds * ranks

    for each in who:
        each.write("register", begin, started=0.0)
        each.move(0, begin + 0.5)
        each.write("enter", begin + 0.5)
    spend("initialization", begin)
    spend("waiting", 0.5)
    at, done = begin + 0.5, first  # steps below this one are done
    resume = first
    for n, plan in enumerate(rounds):
        is_last = n == len(rounds) - 1
        spend("training_prep", plan["prep"])
        at += plan["prep"]
        last = resume + plan["steps"] - 1
        for each in who:
            began = each.steps(at, resume, last, step, every)
        finished = last + 1 if is_last else last  # the last step is cut short by the fault
        again = max(0, min(done, finished) - resume)
        truth.again += again
        truth.steps += finished - resume - again
        spend("wasted_progress", again * step)
        spend("useful_steps", (finished - resume - again) * step)
        done = max(done, finished)
        if is_last:
            at = began + step
            for each in who:
                each.write("returned", at)
                each.write("done", at, step=last, began=began)
                each.write("one of the user's", at + end)
            break
        cut = plan["cut"] * step
        spend("wasted_progress", cut)
        at = began + cut
        if plan["hang"] is not None:
            spend("detection", plan["hang"])
            since, at = at, at + plan["hang"]
            for each in who:  # each host has one that noticed it
                each.write("fault", at, kind="SOFT_TIMEOUT", ends=True, since=since, step=last, began=began)
        told, abort, leave, arrive, decide = plan["phases"]
        if plan["hang"] is None:
            for each in who:
                each.write("fault", at, kind="EXCEPTION", ends=True)
        for name, seconds in zip(PHASES, (told, abort, leave, arrive, decide, 0.25), strict=True):
            spend(f"recovery_{name}", seconds)
        for each in who:
            each.write("end", at + told)
            each.write("abort", at + told + abort)
            each.write("left", at + told + abort + leave, step=last, began=began)
            each.write("arrive", at + told + abort + leave + arrive)
            each.move(n + 1, at + told + abort + leave + arrive + decide)
        at += told + abort + leave + arrive + decide + 0.25
        for each in who:
            each.write("enter", at)
        resume = max(first, finished - plan["back"])
    spend("after_end", end)
    found = make_goodput(shuffled(truth.records, len(rounds)))
    check(found)
    assert (found.steps, found.steps_again) == (truth.steps, truth.again)
    for name, seconds in truth.buckets.items():
        assert found.buckets.get(name, 0.0) == pytest.approx(seconds, abs=1e-5), name
    assert len(by_job(truth.records)) == 1


def faulty_job() -> list[Record]:
    """Two ranks and a spare on one host; one is killed, the spare takes over, and a new process comes."""
    records: list[Record] = []
    agent = Writer(records, "a", 0.0, 0)
    agent.who = {}
    ranks = [Writer(records, "a", 0.0, slot) for slot in range(3)]
    agent.write("agent_started", 1.0, started=0.0)
    agent.write("round_started", 3.0)
    for each in ranks:
        agent.write("rank_started", 3.5, child=each.pid, rank=each.who["slot"])
        each.write("register", 5.0, started=3.5)
        each.move(0, 6.0)
        each.write("spare" if each is ranks[2] else "enter", 6.0)
    for each in ranks[:2]:
        each.steps(8.0, 0, 6, 1.0, 3)
    killed = ranks[1]
    monitor = Writer(records, "a", 0.0, 1)
    monitor.n, monitor.nonce = 0, "n0"
    monitor.write("fault", 14.5, kind="TERMINATED", ends=True, step=6, began=14.0)
    agent.write("rank_ended", 14.7, child=killed.pid, exitcode=-9)
    new = Writer(records, "a", 0.0, 1, 1)
    agent.write("rank_started", 14.8, child=new.pid, rank=1)
    new.write("register", 15.8, started=14.8)
    for each in (ranks[0], ranks[2]):
        each.write("end", 14.6)
        each.write("abort", 14.65)
        each.write("left", 14.7, **({} if each is ranks[2] else {"step": 6, "began": 14.0}))
        each.write("arrive", 14.8)
        each.move(1, 15.0)
        each.write("enter", 15.5)
        each.steps(16.0, 4, 9, 1.0, 2)
        each.write("returned", 22.0)
    for each in (ranks[0], ranks[2]):
        each.write("done", 22.5, step=9, began=21.0)
    new.nonce, new.n = "n1", 1  # it came too late to be let in: the call has completed
    agent.write("rank_ended", 23.0, child=new.pid, exitcode=0)
    agent.write("rank_ended", 23.0, child=ranks[0].pid, exitcode=0)
    agent.write("rank_ended", 23.0, child=ranks[2].pid, exitcode=0)
    agent.write("agent_ended", 24.0)
    return records


def test_a_killed_rank_a_spare_and_a_process_that_comes_back() -> None:
    found = make_goodput(faulty_job())
    check(found)
    assert (found.seconds, found.seat_seconds) == (24.0, 72.0)
    # Steps 0 to 5 were done when rank 1 died in step 6; 4 and 5 were done again.
    assert (found.steps, found.steps_again) == (10, 2)
    assert found.buckets == seconds_of(found) | {
        "useful_steps": pytest.approx(2 * 6.0 + 2 * 4.0),
        "wasted_progress": pytest.approx(2 * 0.5 + 2 * 2.0),
        "training_prep": pytest.approx(2 * 2.0 + 2 * 0.5),
        "waiting": pytest.approx(3 * (2.0 + 1.0) + 2 * 0.5),  # for nodes, for members, for those that return
        "gone": pytest.approx(0.3 + 1.0),
    }
    # The spare until the fault, and the process that came back and was not needed any more.
    assert found.buckets["idle_spare"] == pytest.approx(8.6 + 7.2)
    assert found.goodput == pytest.approx(20.0 / 72.0)


@settings(deadline=None, max_examples=60)
@given(keep=st.lists(st.booleans(), min_size=200, max_size=200), seed=st.integers(0, 99))
def test_buckets_add_up_whatever_is_missing(keep: list[bool], seed: int) -> None:
    """A host may be lost, a disk be full: then events are not there."""
    records = [record for record, is_kept in zip(faulty_job(), keep, strict=False) if is_kept]
    for _, part in by_job(shuffled(records, seed)):
        check(make_goodput(part))


# One thing at a time -------------------------------------------------------------------------------------


@pytest.fixture
def records() -> list[Record]:
    return []


def rank(records: list[Record], slot: int = 0, host: str = "a", skew: float = 0.0, name: str = "n") -> Writer:
    """One that has been let into the first iteration, at 1.0, and is in the function."""
    one = Writer(records, host, skew, slot)
    one.write("register", 1.0, started=0.0)
    one.move(0, 1.0, name)
    one.write("enter", 1.0)
    return one


def restart(ranks: list[Writer], at: float, name: str = "n", **fields: Any) -> None:
    """A restart that takes no time; ``fields``: of the event that ends the iteration on each rank."""
    for one in ranks:
        one.write("end", at)
        one.write("abort", at)
        one.write("left", at, **fields)
        one.write("arrive", at)
        one.move(one.n + 1, at, name)
        one.write("enter", at)


def end(ranks: list[Writer], at: float) -> None:
    for one in ranks:
        one.write("returned", at)
        one.write("done", at)


def test_a_function_that_tells_no_steps_is_not_called_useful(records: list[Record]) -> None:
    one = rank(records)
    end([one], 11.0)
    found = make_goodput(records)
    assert found.buckets == seconds_of(found) | {"steps_unknown": 10.0, "initialization": 1.0}
    assert found.goodput is None and found.steps == 0


def test_a_rank_that_tells_none_beside_one_that_does(records: list[Record]) -> None:
    one, other = rank(records), rank(records, 1)
    one.steps(2.0, 0, 8, 1.0)
    end([one, other], 11.0)
    found = make_goodput(records)
    assert (found.buckets["useful_steps"], found.buckets["steps_unknown"]) == (9.0, 10.0)


def test_an_iteration_that_ends_before_its_first_step_was_loading(records: list[Record]) -> None:
    one = rank(records)
    restart([one], 4.0)
    one.steps(5.0, 0, 5, 1.0)
    end([one], 11.0)
    found = make_goodput(records)
    assert (found.buckets["training_prep"], found.buckets["useful_steps"]) == (4.0, 6.0)
    assert "steps_unknown" not in found.buckets


def test_a_step_that_was_committed_is_done_though_no_one_began_the_next_one(records: list[Record]) -> None:
    """A LiveState goes on behind it; a loop with checkpoints would do it again."""
    one = rank(records)
    one.steps(2.0, 0, 5, 1.0)  # the last one from 7.0 on
    restart([one], 8.0, committed=6)
    one.steps(8.0, 6, 8, 1.0)
    end([one], 11.0)
    found = make_goodput(records)
    assert (found.steps, found.steps_again) == (9, 0)
    assert found.buckets["useful_steps"] == pytest.approx(9.0) and "wasted_progress" not in found.buckets
    without = [{name: record[name] for name in record if name != "committed"} for record in records]
    assert make_goodput(without).steps == 9, "the next iteration goes on behind it, too"


def test_a_committed_step_that_a_copy_does_not_have_is_done_again(records: list[Record]) -> None:
    one = rank(records)
    one.steps(2.0, 0, 5, 1.0)
    restart([one], 8.0, committed=6)
    one.steps(8.0, 4, 8, 1.0)
    end([one], 13.0)
    found = make_goodput(records)
    assert (found.steps, found.steps_again) == (9, 2)


def test_a_step_is_done_once_any_rank_has_begun_the_next_one(records: list[Record]) -> None:
    one, other = rank(records), rank(records, 1)
    one.steps(2.0, 0, 6, 1.0)  # to 8.0 and beyond
    other.steps(2.0, 0, 5, 1.0)
    restart([one, other], 8.5)
    for each in (one, other):
        each.steps(9.0, 4, 9, 1.0)
    end([one, other], 15.0)
    found = make_goodput(records)
    assert (found.steps, found.steps_again) == (10, 2)
    # Steps 4 and 5 again; and of step 6, the half second of the one that had begun it.
    assert found.buckets["wasted_progress"] == pytest.approx(2 * 2.0 + 0.5)


def test_a_function_that_goes_back_by_itself_does_steps_again(records: list[Record]) -> None:
    one = rank(records)
    one.steps(1.0, 0, 9, 1.0, 4)
    one.steps(11.0, 5, 14, 1.0, 4)
    end([one], 21.0)
    found = make_goodput(records)
    check(found)
    # The ninth step was left for the fifth: it counts as cut short, and not as done.
    assert (found.steps, found.steps_again) == (15, 4)
    assert found.buckets["wasted_progress"] == pytest.approx(1.0 + 4.0)


def test_the_next_call_may_begin_with_the_same_numbers(records: list[Record]) -> None:
    one = rank(records)
    one.steps(1.0, 0, 3, 1.0)
    end([one], 5.0)
    one.write("register", 7.0, started=0.0)
    one.write("arrive", 7.0)
    one.call = 1
    one.move(1, 8.0)
    one.write("enter", 8.0)
    one.steps(8.0, 0, 3, 1.0)
    end([one], 12.0)
    found = make_goodput(records)
    check(found)
    assert (found.steps, found.steps_again) == (8, 0)
    expected = {"initialization": 1.0, "useful_steps": 8.0, "other": 2.0, "waiting": 1.0}
    assert found.buckets == seconds_of(found) | expected and sum(expected.values()) == found.seat_seconds


def test_a_call_that_was_not_completed_is_gone_on_with_in_the_next_one(records: list[Record]) -> None:
    """As where all processes are started again, with a store of their own."""
    one = rank(records)
    one.steps(1.0, 0, 7, 1.0)
    two = Writer(records, "a", 0.0, 0)
    two.write("register", 10.0, started=9.0)
    two.move(0, 10.0, "m")
    two.write("enter", 10.0)
    two.steps(10.0, 4, 9, 1.0)
    end([two], 16.0)
    found = make_goodput(records)
    check(found)
    assert (found.steps, found.steps_again) == (10, 3)


def test_what_a_hang_took_to_be_noticed_goes_for_other_hosts_too(records: list[Record]) -> None:
    one, other = rank(records), rank(records, 1, "b", 5e5)
    for each in (one, other):
        each.steps(2.0, 0, 4, 1.0)
    one.write("fault", 12.5, kind="SOFT_TIMEOUT", ends=True, since=6.5, step=4, began=6.0)
    restart([one, other], 12.5)
    for each in (one, other):
        each.steps(12.5, 4, 5, 1.0)
    end([one, other], 14.5)
    found = make_goodput(records)
    assert found.buckets["detection"] == pytest.approx(2 * 6.0)
    assert found.buckets["wasted_progress"] == pytest.approx(2 * 0.5)


def test_what_a_slow_rank_costs_is_not_useful(records: list[Record]) -> None:
    one, other = rank(records), rank(records, 1)
    for each in (one, other):
        each.steps(1.0, 0, 20, 1.0)
    one.write("slow", 5.0, rank=0, since=5.0, cost=0.0, share=0.25, cause="works", words="")
    other.write("slow", 9.0, rank=1, since=9.0, cost=0.0, share=0.5, cause="works", words="")
    one.write("slow", 13.0, rank=0, since=5.0, cost=1.6)  # 20 % as it turned out
    other.write("slow", 17.0, rank=1, since=9.0, cost=4.0)
    end([one, other], 22.0)
    found = make_goodput(records)
    check(found)
    # The slowest one counts: 20 % for 4 s, then 50 % for 8 s.
    assert found.buckets["slow"] == pytest.approx(2 * (0.2 * 4 + 0.5 * 8))
    assert found.buckets["useful_steps"] + found.buckets["slow"] == pytest.approx(2 * 21.0)


def test_the_death_of_a_spare_ends_nothing(records: list[Record]) -> None:
    one = rank(records)
    spare = Writer(records, "a", 0.0, 1)
    spare.write("register", 1.0, started=0.0)
    spare.move(0, 1.0)
    spare.write("spare", 1.0)
    one.steps(1.0, 0, 3, 1.0)
    spare.write("fault", 2.0, kind="TERMINATED", ends=False)
    restart([one], 5.0)
    one.steps(5.0, 3, 4, 1.0)
    end([one], 7.0)
    found = make_goodput(records)
    check(found)
    assert found.buckets["gone"] == 5.0 and "recovery_notify" not in found.buckets
    assert found.buckets["idle_spare"] == 1.0


def test_a_seat_that_moves_to_another_host_counts_once(records: list[Record]) -> None:
    one, other = rank(records), rank(records, 1)
    one.write("fault", 3.0, kind="TERMINATED", ends=True)
    restart([other], 3.0)
    moved = Writer(records, "b", 7e3, 0, 1)
    moved.write("register", 5.0, started=4.0)
    moved.move(2, 6.0)
    moved.write("enter", 6.0)
    restart([other], 6.0)
    end([moved, other], 9.0)
    found = make_goodput(records)
    check(found)
    assert [(row.host, row.slot, row.end - row.begin) for row in found.rows] == [
        ("a", 0, 3.0),
        ("a", 1, 9.0),
        ("b", 0, 5.0),
    ]


def test_a_seat_moves_too_where_all_processes_are_started_again(records: list[Record]) -> None:
    """Then incarnations begin again."""
    one, other = rank(records, 0, "b"), rank(records, 1, "a", 5e3)
    for each in (one, other):
        each.write("fault", 3.0, kind="TERMINATED", ends=True)
    for slot, host, skew in ((0, "a", 5e3), (1, "b", 0.0)):
        again = Writer(records, host, skew, slot)
        again.write("register", 5.0, started=4.0)
        again.move(0, 6.0, "m")
        again.write("enter", 6.0)
        end([again], 9.0)
    found = make_goodput(records)
    check(found)
    rows = sorted((row.host, row.slot, row.end - row.begin) for row in found.rows)
    assert rows == [("a", 0, 5.0), ("a", 1, 3.0), ("b", 0, 3.0), ("b", 1, 5.0)]


def test_no_rank_was_ever_in_the_job() -> None:
    """A script without a wrapper, or one that fails as it is imported."""
    records = [record for record in faulty_job() if record["event"].startswith(("agent", "rank", "round"))]
    found = make_goodput(records)
    assert (found.goodput, found.rows, found.seat_seconds) == (None, (), 0)


# Which job it is -----------------------------------------------------------------------------------------


def test_jobs_without_a_name_are_told_apart_by_the_nonces_of_their_iterations(records: list[Record]) -> None:
    jobs = [[rank(records, slot, "ab"[slot], name=name) for slot in range(2)] for name in ("one", "two")]
    for steps, ranks in enumerate(jobs, start=3):
        for each in ranks:
            each.steps(2.0, 0, steps, 1.0)
    for name, ranks in zip(("one", "two"), jobs, strict=True):
        restart(ranks, 9.0, name)
        end(ranks, 11.0)
    found = by_job(shuffled(records, 1))
    assert sorted(name for name, _ in found) == ["", "(2)"]
    assert sorted(make_goodput(part).steps for _, part in found) == [3, 4]
    assert sum(len(part) for _, part in found) == len(records)


def test_the_agents_events_are_of_the_job_whose_processes_it_started() -> None:
    names = [name for name, _ in by_job(faulty_job())]
    assert names == [""]


def test_an_agent_decides_for_a_dead_rank_and_does_not_know_the_jobs_name() -> None:
    records = [record | {"job": "some"} for record in faulty_job()]
    agent = next(record for record in records if record["event"] == "agent_started")
    records.append(agent | {"event": "decide", "job": ""})
    assert [name for name, _ in by_job(records)] == ["some"]


def test_events_without_an_iteration_go_by_the_name_alone() -> None:
    old = [{"event": "enter", "iteration": 0, "pid": pid, "host": "a", "monotonic": 1.0} for pid in (1, 2)]
    assert [name for name, _ in by_job(old)] == [""]
    assert make_goodput(old).steps == 0
