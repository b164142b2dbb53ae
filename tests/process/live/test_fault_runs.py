"""A state lives on through faults at any point: the same bits, no step lost, none done twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_runs import CLEAN, STEPS, Verdict, run_job

from ft_wrapper import events
from ft_wrapper.report import make_reports

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("warm_process")]


def check(verdicts: list[Verdict]) -> None:
    wrong = [f"seed {verdict.number}: {'; '.join(verdict.wrong)}" for verdict in verdicts if verdict.wrong]
    assert not wrong, "\n".join(wrong)


def test_a_few_faults_cost_no_step(tmp_path: Path) -> None:
    verdicts = run_job(tmp_path / "job", 3, 1, 7)
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


@pytest.mark.nightly("a job of one run is there always")
@pytest.mark.parametrize(("first", "variant"), [(1000, 5), (2000, 58)])
def test_many_faults_cost_no_step(tmp_path: Path, first: int, variant: int) -> None:
    runs = 15
    verdicts = run_job(tmp_path / "job", first, runs, variant)
    check(verdicts)
    assert 3 * sum(verdict.in_recovery for verdict in verdicts) >= runs
