"""Runs of a framework with notices, on two ranks: what is saved for them, and what comes of it."""

from __future__ import annotations

import dataclasses
import random
import shutil
from pathlib import Path

from framework_job import EVERY, LEAD
from framework_runs import KINDS, Kind, run_job

ACTIVE = 2
STEPS = 4 * EVERY + 2
"""Of a run: the last step is not saved by the schedule, as some frameworks save a last step anyway."""


def check_notices(name: str, folder: Path, batches: int, *, saves_last: bool = False, unit: int = 1) -> None:
    """A notice saves its step once, on all ranks; a run that goes on from there ends with the same bits.

    The runs: a notice in the middle; the same, and an exception a step later; one in a step that is saved
    anyway; one in the last step; two notices; and SIGUSR1 at a rank, which its ftrun passes on.

    Args:
        name: of the job.
        folder: for its files.
        batches: of each step.
        saves_last: whether the framework saves the last step without being asked.
        unit: what a step counts in the numbers of checkpoints.
    """
    draw = random.Random(f"{name} {batches}")
    # The schedule saves neither this step nor the next one, which is lost.
    middle = [step for step in range(LEAD, STEPS - LEAD) if step % EVERY in (0, 1)]
    first, scheduled, signalled = draw.choice(middle), EVERY * draw.randint(1, 4) - 1, draw.choice(middle)
    both = sorted(draw.sample(range(LEAD, STEPS, LEAD), 2))
    seen = [[first], [first], [scheduled], [STEPS - 1], both, [signalled]]  # at these steps
    plans = [",".join(f"memory:notice:{step}:0" for step in steps) for steps in seen]
    plans[1] += f",exception:step:{first + 2}:{draw.randrange(ACTIVE)}"
    plans[5] = f"sigusr1:notice:{signalled}:{draw.randrange(ACTIVE)}"

    verdicts = run_job(_kind(name), folder, plans, steps=STEPS, batches=batches)
    wrong = [f"{plans[each.number]}: {'; '.join(each.wrong)}" for each in verdicts if each.wrong]
    assert not wrong, "\n".join(wrong)
    assert [each.restarts for each in verdicts] == [0, 0, 1, 0, 0, 0, 0]

    schedule = {*range(EVERY, STEPS, EVERY), *[STEPS] * saves_last}
    for verdict, steps in zip(verdicts, [[], *seen], strict=True):
        expected = [
            (0, rank, step) for rank in range(ACTIVE) for step in {*schedule, *(n + 1 for n in steps)}
        ]
        begins = [(0, rank, 0) for rank in range(ACTIVE)]
        if verdict.restarts:
            # A function does not know that the notice was served: the ranks see it two steps on.
            later = {step for step in schedule if step > first + 1} | {first + 4}
            expected = [place for place in expected if place[2] <= first + 1]
            expected += [(1, rank, step) for rank in range(ACTIVE) for step in later]
            begins += [(1, rank, first + 1) for rank in range(ACTIVE)]
        plan = plans[verdict.number] if verdict.number >= 0 else "no notice"
        assert verdict.saved == sorted((n, rank, step * unit) for n, rank, step in expected), plan
        assert verdict.began == begins, plan


def check_preemption(name: str, folder: Path, batches: int, *, unit: int = 1) -> None:
    """At SIGTERM a job of one node saves, and all ranks leave; the next job ends with the same bits.

    Args:
        name: of the job.
        folder: for the files of both jobs.
        batches: of each step.
        unit: what a step counts in the numbers of checkpoints.
    """
    draw = random.Random(f"{name} {batches}")
    seen = draw.choice([step for step in range(LEAD, STEPS - LEAD) if (step + 1) % EVERY])
    plan = f"sigterm:notice:{seen}:{draw.randrange(ACTIVE)}"
    options = ["--notice-grace", "100"]
    first = run_job(_kind(name), folder / "1", [plan], steps=STEPS, batches=batches, options=options)
    assert [each.wrong for each in first] == [[], ["finished on ranks [] only", "ftrun ended with 75"]], plan
    saved = [*range(EVERY, seen, EVERY), seen + 1]
    assert first[1].saved == [(0, rank, step * unit) for rank in range(ACTIVE) for step in saved], plan

    shutil.copytree(folder / "1" / "run-0", folder / "2" / "run-0")
    second = run_job(_kind(name), folder / "2", [""], steps=STEPS, batches=batches)
    assert [each.wrong for each in second] == [[], []], plan
    assert second[1].began == [(0, rank, seen + 1) for rank in range(ACTIVE)], plan


def _kind(name: str) -> Kind:
    return dataclasses.replace(KINDS[name], processes=ACTIVE, active=ACTIVE)
