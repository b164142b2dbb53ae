"""Drawn trainings end with the same bits whatever happens to their ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from draws import drawn, run_all
from support.nightly import at_night
from support.torch_versions import needs_fsdp2_on_cpu


@needs_fsdp2_on_cpu
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("warm_process")
@pytest.mark.parametrize(
    ("first", "count"), [(0, 5), *at_night("five cases run always", [(5, 45), (1000, 50), (2000, 50)])]
)
def test_drawn_trainings(tmp_path: Path, first: int, count: int) -> None:
    verdicts = list(run_all([drawn(seed) for seed in range(first, first + count)], tmp_path, processes=2))
    wrong = [f"{verdict.wrong}\n  {verdict.case}" for verdict in verdicts if verdict.wrong]
    assert not wrong, "\n".join(wrong)
    assert len(verdicts) == count
    assert sum(len(verdict.happened) for verdict in verdicts) >= count
