"""Every kind of fault in every place, on 4 ranks of which 1 is a spare: the survivors finish.

All of them take minutes, so most are nightly; `make matrix` runs nothing else. Every run has each kind in one
place, each place with one kind, and those where the kind and the place together decide what happens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fault_job import STEPS, check, start, trains
from rank_harness import Job

from ft_wrapper.testing.inject_fault import FaultKind

# What happens, and to which slots.
PLACES = {
    "first step": ("{}:rank=0:step=0", {0}),
    "middle step": (f"{{}}:rank=1:step={STEPS // 2}", {1}),
    "last step": (f"{{}}:rank=2:step={STEPS - 1}", {2}),
    "initialize": ("{}:slot=1:iteration=0:where=initialize", {1}),
    "initialize of a restart": ("exception:rank=2:step=1,{}:rank=0:iteration=1:where=initialize", {0}),
    "finalize": ("exception:rank=1:step=1,{}:slot=0:where=finalize", {0}),
    "atomic": (f"{{}}:rank=0:step={STEPS // 2}:where=atomic", {0}),
    "last atomic": (f"{{}}:rank=1:step={STEPS - 1}:where=atomic", {1}),
    # By slot: where the first is gone before the second has come to the step, another has its rank.
    "two ranks at once": ("{0}:slot=0:step=3,{0}:slot=2:step=3", {0, 2}),
    "the spare's initialize": ("{}:slot=3:iteration=0:where=initialize", {3}),
    "the spare's finalize": ("exception:rank=1:step=1,{}:slot=3:where=finalize", {3}),
}
# The rank itself survives these, unless they happen where it cannot be interrupted.
SURVIVED = {FaultKind.EXCEPTION, FaultKind.SLEEP, FaultKind.COLLECTIVE}
WHOLE_ENDS = {FaultKind.EXCEPTION, FaultKind.SIGKILL}
ALWAYS = {
    (FaultKind.EXCEPTION, "finalize"),
    (FaultKind.EXCEPTION, "last atomic"),
    (FaultKind.EXCEPTION, "two ranks at once"),
    (FaultKind.SLEEP, "finalize"),
    (FaultKind.SLEEP, "atomic"),
    (FaultKind.SLEEP, "two ranks at once"),
    (FaultKind.SIGSTOP, "two ranks at once"),
    (FaultKind.GIL, "atomic"),
    (FaultKind.COLLECTIVE, "initialize of a restart"),
    (FaultKind.SIGTERM, "initialize"),
}


def _when(kind: FaultKind, place: str) -> list[pytest.MarkDecorator]:
    if place == "middle step":
        return [pytest.mark.whole_ends("one with all ranks, one without")] if kind in WHOLE_ENDS else []
    if kind is FaultKind.SIGKILL or (kind, place) in ALWAYS:
        return []
    return [pytest.mark.nightly("the kind runs in another place, and the place with another kind")]


MATRIX = [
    pytest.param(kind, place, id=f"{kind.value}-{place}", marks=_when(kind, place))
    for kind in FaultKind
    for place in PLACES
]


def ends_the_rank(kind: FaultKind, place: str) -> bool:
    if "finalize" in place:
        return True
    if "atomic" in place:
        return kind is not FaultKind.EXCEPTION
    return kind not in SURVIVED


@pytest.mark.parametrize(("kind", "place"), MATRIX)
def test_the_survivors_finish(
    job: Job,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    kind: FaultKind,
    place: str,
) -> None:
    faults, victims = PLACES[place]
    start(job, tmp_path, trains, faults.format(kind.value), str(tmp_path))
    job.wait_for_end()
    gone = victims if ends_the_rank(kind, place) else set()
    # A hung spare does not keep the others from finishing before its soft_timeout; then only its end is left.
    hangs = place == "the spare's initialize" and kind in (FaultKind.SLEEP, FaultKind.COLLECTIVE)
    perhaps = victims if hangs else set()
    restarts = check(job, tmp_path, gone=gone, perhaps=perhaps, faults=faults.count(",") + 1)
    record_property("restarts", restarts)
