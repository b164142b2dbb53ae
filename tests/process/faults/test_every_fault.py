"""Every kind of fault in every place: the survivors finish.

Each job meets faults in all places, one after the other, and has as many spares as it may lose ranks. Always
runs one that kills, on etcd, and one in which the kinds are mixed; `make matrix` runs all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fault_job import ACTIVE, STEPS, check, start, trains
from rank_harness import Job

from ft_wrapper.testing.inject_fault import FaultKind

WORLD = 16
# In each place, what happens there in the job in which the kinds are mixed.
PLACES = [
    ("rank=0:step=0", FaultKind.SEGFAULT),
    (f"rank=1:step={STEPS // 2}", FaultKind.SLEEP),
    (f"rank=2:step={STEPS - 1}", FaultKind.SIGSTOP),
    ("rank=1:where=initialize", FaultKind.SIGTERM),
    ("rank=1:where=initialize", FaultKind.COLLECTIVE),  # of a restart
    ("rank=2:where=finalize", FaultKind.EXCEPTION),
    (f"rank=0:step={STEPS // 2}:where=atomic", FaultKind.GIL),
    (f"rank=1:step={STEPS - 1}:where=atomic", FaultKind.EXCEPTION),
    ("rank=0:step=2", FaultKind.EXCEPTION),
    ("rank=2:step=2", FaultKind.ABORT),  # two ranks at once
    (f"slot={WORLD - 1}:where=initialize", FaultKind.EXIT),  # a spare
    (f"slot={WORLD - 2}:where=finalize", FaultKind.SLEEP),
]
# The rank itself survives these, unless they happen where it cannot be interrupted.
SURVIVED = {FaultKind.EXCEPTION, FaultKind.SLEEP, FaultKind.COLLECTIVE}


def ends_the_rank(kind: FaultKind, place: str) -> bool:
    if "finalize" in place:
        return True
    if "atomic" in place:
        return kind is not FaultKind.EXCEPTION
    return kind not in SURVIVED


def survives(
    job: Job, folder: Path, note: Callable[[str, object], None], faults: list[tuple[str, FaultKind]]
) -> None:
    gone = sum(ends_the_rank(kind, place) for place, kind in faults)
    assert gone <= WORLD - ACTIVE
    text = ",".join(f"{kind.value}:{place}" for place, kind in faults)
    start(job, folder, trains, text, str(folder), world=WORLD)
    job.wait_for_end()
    note("restarts", check(job, folder, gone=gone, faults=len(faults)))


@pytest.mark.timeout(300)
def test_the_survivors_of_mixed_faults_finish(
    job: Job, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    survives(job, tmp_path, record_property, PLACES)


KILLS = (FaultKind.SIGKILL, FaultKind.EXIT, FaultKind.SEGFAULT, FaultKind.ABORT)


@pytest.mark.timeout(300)
@pytest.mark.whole_ends("the ends of those who finish")
def test_the_survivors_of_sigkill_finish(
    job: Job, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    survives(job, tmp_path, record_property, [(place, FaultKind.SIGKILL) for place, _ in PLACES])


@pytest.mark.nightly("each kind is in the job of mixed faults, and those that kill are alike")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind", [kind for kind in FaultKind if kind not in KILLS], ids=lambda kind: kind.value
)
def test_the_survivors_finish(
    job: Job, tmp_path: Path, record_property: Callable[[str, object], None], kind: FaultKind
) -> None:
    survives(job, tmp_path, record_property, [(place, kind) for place, _ in PLACES])
