"""Drawn trainings end with the same bits whatever happens to their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from draws import drawn, run_all
from support.nightly import at_night
from support.torch_versions import needs_fsdp2_on_cpu

EVERY_DAY = (51, 85)


@needs_fsdp2_on_cpu
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("warm_process")
@pytest.mark.parametrize(
    "seeds",
    [EVERY_DAY, *at_night("two cases run always", [range(40, 90)])],
    ids=str,
)
def test_drawn_trainings(tmp_path: Path, seeds: Sequence[int]) -> None:
    verdicts = list(run_all([drawn(seed) for seed in seeds], tmp_path))
    wrong = [f"{verdict.wrong}\n  {verdict.case}" for verdict in verdicts if verdict.wrong]
    assert not wrong, "\n".join(wrong)
    assert len(verdicts) == len(seeds)
