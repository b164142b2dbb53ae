"""Drawn trainings end with the same bits whatever happens to their ranks, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import draw_cases
import pytest
from draw_cases import STEPS, Case, draw
from draws import Verdict, drawn, in_jobs, judge, run_all, table
from support.torch_versions import needs_fsdp2_on_cpu

JOBS = [pytest.mark.timeout(600), pytest.mark.usefixtures("warm_process"), needs_fsdp2_on_cpu]
NIGHTLY, PARTS = 500, 10


def check(verdicts: list[Verdict]) -> None:
    wrong = [f"{verdict.wrong}\n  {verdict.case}" for verdict in verdicts if verdict.wrong]
    assert not wrong, "\n".join([*wrong, table(verdicts)])


class TestJobs:
    """Cases that run."""

    pytestmark = JOBS

    def test_some(self, tmp_path: Path) -> None:
        verdicts = list(run_all([drawn(seed) for seed in range(25)], tmp_path, processes=2))
        check(verdicts)
        assert len(verdicts) == 25
        assert sum(len(verdict.happened) for verdict in verdicts) >= 25

    @pytest.mark.nightly
    @pytest.mark.timeout(1800)
    @pytest.mark.parametrize("part", range(PARTS))
    def test_many(self, tmp_path: Path, part: int) -> None:
        many = NIGHTLY // PARTS
        seeds = range(1000 + many * part, 1000 + many * (part + 1))
        check(list(run_all([drawn(seed) for seed in seeds], tmp_path, processes=2)))


# ---- the draw


def test_the_same_seed_draws_the_same_case() -> None:
    assert draw(7) == draw(7) and draw(7) != draw(8) and draw(7, 1).name == "7.1"


def test_everything_is_drawn() -> None:
    cases = [draw(seed) for seed in range(NIGHTLY)]
    for field, values in {
        "optimizer": draw_cases.OPTIMIZERS,
        "dtype": draw_cases.DTYPES,
        "body": draw_cases.BODIES,
        "wrap": draw_cases.WRAPS,
        "buffer": draw_cases.BUFFERS,
        "scheduler": draw_cases.SCHEDULERS,
        "average": draw_cases.AVERAGES,
        "wrong": draw_cases.WRONG,
        "form": ("ddp", "fsdp", "hsdp"),
        "ranks": (2, 3, 4),
    }.items():
        assert {getattr(case, field) for case in cases} >= {*values}, field
    faults = [(fault.kind, fault.point) for case in cases for fault in case.faults]
    assert {*faults} == {
        (kind, point) for kind in ("exception", "sigkill") for point in (*draw_cases.POINTS, draw_cases.TORN)
    }


def test_the_cases_of_a_job_need_the_same_processes() -> None:
    jobs = in_jobs([draw(seed) for seed in range(100)])
    assert sorted(case.name for job in jobs for case in job) == sorted(str(seed) for seed in range(100))
    assert all(len({(case.ranks, case.spares) for case in job}) == 1 for job in jobs)


# ---- the judge: of what is written here


class Notes:
    """What the ranks of a case note, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Two ranks under DDP.
        self.case: Case = next(
            case
            for case in map(draw, range(100))
            if (case.form, case.ranks, len(case.faults)) == ("ddp", 2, 1) and not case.may_go_back
        )
        self.enters("clean", 0, rung="CHECKPOINT")
        self.ends("clean")
        self.enters("faulty", 1, rung="CHECKPOINT")

    def say(self, what: str, mode: str, iteration: int, rank: int, **fields: Any) -> None:
        record = {"what": what, "mode": mode, "iteration": iteration, "rank": rank, **fields}
        with open(self.folder / "said", "a") as said:
            said.write(json.dumps(record) + "\n")

    def enters(self, mode: str, iteration: int, rung: str = "PEERS", lost: int = 0) -> None:
        for rank in range(2):
            self.say("entered", mode, iteration, rank, rung=rung, lost=lost, step=3)

    def fault(self, iteration: int) -> None:
        self.say("fault", "faulty", iteration, 1, kind="sigkill", point="step")

    def ends(self, mode: str, values: tuple[str, str] = ("bits", "bits"), steps: int = STEPS) -> None:
        for rank, value in enumerate(values):
            end = {"values": {"model.weight": value, "other": "same"}, "finite": True, "steps": steps}
            (self.folder / f"{mode}-{rank}.json").write_text(json.dumps(end))

    def wrong(self) -> str:
        verdict = judge(self.case, self.folder)
        assert verdict is not None
        return verdict.wrong


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    return Notes(tmp_path)


def test_nothing_is_wrong_where_all_is_well(notes: Notes) -> None:
    notes.fault(1)
    notes.say("error", "faulty", 1, 0, text="in its wake")
    notes.enters("faulty", 2)
    notes.ends("faulty")
    verdict = judge(notes.case, notes.folder)
    assert verdict == Verdict(notes.case, happened=[("sigkill", "step")])


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        (
            ("other", "other"),
            "rank 0 ends with other bits: model.weight is bits, and then other (1 of 2 values)",
        ),
        (
            ("bits", "other"),
            "rank 1 ends with other bits: model.weight is bits, and then other (1 of 2 values)",
        ),
    ],
)
def test_other_bits_are_seen(notes: Notes, values: tuple[str, str], wrong: str) -> None:
    notes.fault(1)
    notes.ends("faulty", values)
    assert notes.wrong() == wrong


def test_replicas_that_differ_without_faults_are_seen(notes: Notes) -> None:
    notes.ends("clean", ("bits", "other"))
    notes.ends("faulty", ("bits", "other"))
    assert notes.wrong().startswith("without faults, ranks 0 and 1 differ: model.weight")


def test_an_end_after_too_few_steps_is_seen(notes: Notes) -> None:
    notes.fault(1)
    notes.ends("faulty", steps=STEPS - 1)
    assert notes.wrong() == f"ended after steps [{STEPS - 1}, {STEPS}]"


@pytest.mark.parametrize(("rung", "lost"), [("PEERS", 1), ("CHECKPOINT", 0), ("COPIES", 0)])
def test_lost_steps_are_seen(notes: Notes, rung: str, lost: int) -> None:
    notes.fault(1)
    notes.enters("faulty", 2, rung, lost)
    notes.ends("faulty")
    assert notes.wrong() == f"faulty run, iteration 1: {lost} steps lost, from {rung}"


def test_a_fault_that_did_not_happen_is_seen(notes: Notes) -> None:
    notes.ends("faulty")
    assert notes.wrong() == "1 faults did not happen"


def test_an_entry_without_a_fault_is_seen(notes: Notes) -> None:
    notes.enters("faulty", 2)
    notes.fault(2)
    notes.ends("faulty")
    assert notes.wrong() == "faulty run: iteration 0 ended without a fault of ours"


def test_an_error_that_is_not_ours_is_seen(notes: Notes) -> None:
    notes.say("error", "faulty", 1, 0, text="ValueError: why")
    notes.enters("faulty", 2)
    notes.ends("faulty")
    assert notes.wrong().startswith("faulty run, rank 0: ValueError: why; ")


def test_a_case_that_did_not_end_is_seen(notes: Notes) -> None:
    assert judge(notes.case, notes.folder) is None


@pytest.mark.parametrize(
    ("ranks", "why", "wrong"),
    [
        (2, "build(): it is a ZeroRedundancyOptimizer, of which no rank has all", ""),
        (
            1,
            "build(): it is a ZeroRedundancyOptimizer, of which no rank has all",
            "refused on 1 of 2 ranks",
        ),
        (2, "no reason", "refused in words that are not known: no reason"),
    ],
)
def test_what_is_refused_is_in_words_of_ours(tmp_path: Path, ranks: int, why: str, wrong: str) -> None:
    notes = Notes(tmp_path)
    (tmp_path / "said").unlink()
    for rank in range(ranks):
        notes.say("refused", "clean", 0, rank, why=why)
    verdict = judge(notes.case, tmp_path)
    assert verdict is not None and verdict.refused == why and verdict.wrong.startswith(wrong)
    assert bool(verdict.wrong) == bool(wrong)
