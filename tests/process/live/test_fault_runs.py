"""A state lives on through faults at any point: the same bits, no step lost, none done twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fault_runs import CLEAN, KINDS, STEPS, VARIANTS, Verdict, by_run, judge, run_job, table
from support.torch_versions import needs_fsdp2_on_cpu

from ft_wrapper import events
from ft_wrapper.report import make_reports

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("warm_process")]

ACTIVE = 2


def check(verdicts: list[Verdict]) -> None:
    wrong = [f"seed {verdict.number}: {'; '.join(verdict.wrong)}" for verdict in verdicts if verdict.wrong]
    assert not wrong, "\n".join([*wrong, table(verdicts)])


def test_a_few_faults_cost_no_step(tmp_path: Path) -> None:
    verdicts = run_job(KINDS["ddp"], tmp_path / "job", 3, 1, 7)
    check(verdicts)
    assert [verdict.number for verdict in verdicts] == [CLEAN, 3]
    kinds = {kind for kind, _ in verdicts[1].faults}
    assert "sigkill" in kinds and verdicts[1].in_recovery, verdicts[1]
    assert verdicts[1].received > 0
    records = events.load(str(tmp_path / "job" / "events"))
    committed = {record["step"] for record in records if record["event"] == "committed"}
    assert committed == set(range(1, STEPS + 1)), "else the judge knows of no step done again"
    (report,) = make_reports(records)
    assert (report.time.steps, report.time.steps_again) == (len(verdicts) * STEPS, 0)


# The process that comes back takes its slot's place among the ranks; the others move, and take other shards.
# What a forward pass then changes in their buffers must be put back, or replicas differ.
MOVED = "sigkill:step:2:0,exception:step:7:1,sigkill:before vote:7:1"


@pytest.mark.nightly("the explorer's job hsdp has it always")
@needs_fsdp2_on_cpu
def test_survivors_may_take_other_shards(tmp_path: Path) -> None:
    verdicts = run_job(KINDS["hsdp"], tmp_path / "job", 0, 1, 1, faults=MOVED)
    check(verdicts)
    assert len(verdicts[1].faults) == 3


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("kind", ["ddp", "hsdp", "fsdp"])
def test_many_faults_cost_no_step(tmp_path: Path, kind: str, part: int) -> None:
    verdicts = run_job(KINDS[kind], tmp_path / "job", 1000 + 12 * part, 12, (part * 27 + 5) % VARIANTS)
    check(verdicts)
    assert 3 * sum(verdict.in_recovery for verdict in verdicts) >= len(verdicts) - 1


def check_copies(verdicts: list[Verdict]) -> None:
    check(verdicts)
    every = KINDS["buddies"].every
    for verdict in verdicts[1:]:
        assert len(verdict.copied) == len(verdict.faults) == 2 and not verdict.restored, verdict
        assert max(verdict.copied) <= every, verdict


@needs_fsdp2_on_cpu
@pytest.mark.nightly("test_live_state.py loses shards always")
def test_shards_without_replicas_go_back_to_copies(tmp_path: Path) -> None:
    check_copies(run_job(KINDS["buddies"], tmp_path / "job", 0, 1, 1))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_shards_without_replicas_go_back_to_copies_again_and_again(tmp_path: Path) -> None:
    check_copies(run_job(KINDS["buddies"], tmp_path / "job", 2000, 20, 40))


# ---- the judge: of events that are written here


class Story:
    """Events of a run of two ranks with processes 10 and 11, and a spare 12."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def say(self, event: str, n: int, *pids: int, **fields: Any) -> None:
        for rank, pid in enumerate(pids):
            record = {"event": event, "iteration": n, "pid": pid, "rank": rank, "run": 0, **fields}
            self.records.append(record)

    def recovery(self, n: int, *pids: int, rung: str = "PEERS", step: int = 0, sealed: bool = True) -> None:
        self.say("entered", n, *pids)
        self.say("gathers", n, *pids, needs="whole")
        self.say("planned", n, *pids, rung=rung, step=step)
        if sealed:
            self.say("sealed", n, *pids)
            self.say("holds", n, *pids, shard="whole", sure=True)

    def commits(self, n: int, step: int, *pids: int, rolled: bool = False) -> None:
        self.say("committed", n, *pids, step=step, rolled=rolled)

    def fault(self, n: int, pid: int, point: str = "in vote", kind: str = "exception") -> None:
        self.say("inject", n, pid, kind=kind, point=point)

    def finish(self, n: int, *pids: int, digest: str = "same", step: int = STEPS) -> None:
        self.say("finished", n, *pids, digest=digest, step=step)

    def judge(self) -> Verdict:
        return judge(0, self.records, ACTIVE, "same")


@pytest.fixture
def story() -> Story:
    """A start from nothing, a step, and a fault."""
    story = Story()
    story.recovery(0, 10, 11, rung="CHECKPOINT")
    story.commits(0, 1, 10, 11)
    story.fault(0, 11)
    return story


def test_nothing_is_wrong_where_all_is_well(story: Story) -> None:
    story.commits(0, 2, 10)
    story.recovery(1, 10, 11, step=2)
    story.commits(1, 2, 11, rolled=True)
    story.finish(1, 10, 11)
    verdict = story.judge()
    assert verdict.wrong == []
    assert verdict.faults == [("exception", "in vote")] and verdict.restarts == 1
    assert not verdict.in_recovery and not verdict.unasked


def test_a_step_done_again_is_seen(story: Story) -> None:
    story.recovery(1, 10, 11, step=1)
    story.commits(1, 1, 10, 11)
    story.finish(1, 10, 11)
    assert story.judge().wrong == ["1 steps were done again"]


def test_a_step_lost_is_seen(story: Story) -> None:
    story.commits(0, 2, 10)
    story.recovery(1, 10, 11, step=1)
    story.finish(1, 10, 11)
    assert story.judge().wrong == ["1 steps were lost"]


def test_what_is_wrong_is_seen(story: Story) -> None:
    story.commits(0, 2, 10)
    story.recovery(1, 10, 12, rung="CHECKPOINT", step=0)
    story.commits(1, 1, 10, 12)
    story.say("fault", 1, 10, kind="EXCEPTION")
    story.finish(1, 10, digest="other", step=STEPS - 1)
    assert set(story.judge().wrong) >= {
        "2 different digests",
        "iteration 1 was the last, and finished on ranks [0] only",
        f"finished after other steps than {STEPS}",
        "iteration 1 went down the ladder, and need not have",
        "an exception was raised that is not ours",
    }


def test_going_on_from_no_one_is_seen(story: Story) -> None:
    story.fault(0, 10, point="in update")
    story.recovery(1, 10, 12, step=1)
    story.finish(1, 10, 12)
    assert story.judge().wrong == ["iteration 1 went on without a holder of some shard"]


def test_events_belong_to_the_run_whose_iteration_it_is() -> None:
    records: list[dict[str, Any]] = [
        {"event": "entered", "run": CLEAN, "iteration": 0},
        {"event": "committed", "iteration": 0},
        {"event": "entered", "run": 5, "iteration": 1},
        {"event": "committed", "iteration": 1},
        {"event": "rank_started"},
    ]
    assert by_run(records) == {CLEAN: records[:2], 5: records[2:4]}
