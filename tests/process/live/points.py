"""Faults at named points of steps and recoveries of a state, and what each process holds of it.

`Probed` and `ProbedCourse` take the place of the product's in a rank's process, which has no seams for this.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import time
from pathlib import Path
from typing import Any

import torch

from ft_wrapper import events
from ft_wrapper.live import live_state, performer, wire
from ft_wrapper.live.commit import Course
from ft_wrapper.live.plan import Holding, Plan, Register, Rung, make_plan
from ft_wrapper.testing.inject_fault import FaultKind, inject_fault

STEP_POINTS = (
    *("step", "backward", "micro", "before vote", "in vote", "in vote", "after vote"),
    *("in update", "applied", "after commit"),
)
RECOVERY_POINTS = (
    *("before gather", "after gather", "in roll", "transfer", "transfer", "adopt", "adopted", "in restore"),
    *("before seal", "in seal", "after seal", "before register", "after register"),
)
TORN = ("in update", "in roll")
"""An exception there leaves half an update behind."""

QUICK = (FaultKind.EXCEPTION, FaultKind.SIGKILL)
SLOW = (FaultKind.SLEEP, FaultKind.COLLECTIVE, FaultKind.SIGSTOP)
"""They take as long as a timeout."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """A fault that is to happen once.

    Args:
        kind: what happens.
        point: where.
        step: at this step, or the first time that the point is met after it.
        rank: the active rank; None: who comes first.
        delay: seconds from the point to the fault.
        lag: seconds that the other ranks wait before they vote on its step: so they are behind.
        after: number of the fault that must have happened before; -1: none.
    """

    kind: FaultKind
    point: str
    step: int = 0
    rank: int | None = None
    delay: float = 0.0
    lag: float = 0.0
    after: int = -1


def random_faults(seed: int, steps: int, active: int) -> list[Planned]:
    """Chooses the faults of a run, most of them followed by another one in the recovery.

    Args:
        seed: of the choice.
        steps: of the run.
        active: number of active ranks.
    """
    choose = random.Random(seed)
    kinds = [*QUICK] * 4 + ([*SLOW] * 4 if choose.random() < 0.125 else [])
    faults: list[Planned] = []
    for step in sorted(choose.sample(range(steps), choose.randint(1, 4))):
        delay = choose.choice((0.0, 0.0, 0.0001, 0.0003, 0.001))
        rank = choose.choice((None, *range(active)))
        lag = choose.choice((0.0, 0.0, 0.002, 0.1))
        faults.append(Planned(choose.choice(kinds), choose.choice(STEP_POINTS), step, rank, delay, lag))
        first = len(faults) - 1
        if choose.random() < 0.6:
            point = choose.choice(RECOVERY_POINTS)
            rank = None if choose.random() < 0.5 else choose.randrange(active)
            faults.append(Planned(choose.choice(kinds), point, 0, rank, after=first))
    return faults


class Points:
    """The points of one process, in one iteration.

    Args:
        faults: of the run.
        folder: the run's; notes there what has happened.
        place: run, iteration, slot and rank, for the events.
    """

    def __init__(self, faults: list[Planned], folder: Path, **place: int) -> None:
        self.faults = faults
        self.fired = folder / "fired"
        self.place = place
        self.step = 0
        self.recovering = True

    def say(self, event: str, **fields: Any) -> None:
        """Notes what happened."""
        events.emit(event, **{**self.place, **fields})

    def check(self, point: str) -> None:
        """Makes a fault happen that belongs here, unless it has happened."""
        for index, fault in enumerate(self.faults):
            is_other = fault.rank not in (None, self.place["rank"])
            if is_other and point == "before vote" and fault.step == self.step:
                time.sleep(fault.lag)
            if is_other or fault.point != point:
                continue
            if fault.step > self.step and point in STEP_POINTS:
                continue
            if fault.after >= 0 and not (self.fired / str(fault.after)).exists():
                continue
            self.fired.mkdir(exist_ok=True)
            try:
                (self.fired / str(index)).touch(exist_ok=False)
            except FileExistsError:
                continue
            if fault.delay:
                time.sleep(fault.delay)
            self.say("inject", kind=fault.kind.value, point=point, index=index, step=self.step)
            inject_fault(fault.kind)


current = Points([], Path())
"""Of the iteration that is on."""

_hear = wire.Ballot._hear


def _hear_half_way(self: wire.Ballot, since: int, size: int) -> bytes:
    """Stops in the middle of a vote, or of rank 0's broadcast before it."""
    current.check("in seal" if current.recovering else "in vote")
    return _hear(self, since, size)


class Probed(performer.TorchPerformer):
    """Carries out a course, has faults happen at points of it, and says what this process holds.

    An event ``holds`` says which shard, None for none. It is ``sure`` where the next recovery must count it,
    wherever the process is made to leave.
    """

    def _holds(self, shard: object, *, sure: bool = True) -> None:
        current.say("holds", shard=None if shard is None else str(shard), sure=sure)

    # ---- a step

    def make_ready(self) -> None:
        """See `Performer`."""
        super().make_ready()
        current.check("before vote")

    def vote(self, step: int) -> None:
        """See `Performer`: a step's, and the seal."""
        is_seal = current.recovering
        if is_seal:
            current.check("before seal")
        super().vote(step)
        if is_seal:
            current.say("sealed", step=step)
        current.check("after seal" if is_seal else "after vote")

    # ---- a recovery

    def gather(self, mine: Holding) -> tuple[list[Holding], Register]:
        """See `Performer`."""
        current.say("gathers", needs=str(mine.needs))
        current.check("before gather")
        said, register = super().gather(mine)
        plan = make_plan(said, register)
        current.say("planned", rung=plan.rung.name, step=plan.step, lost=plan.lost, missing=len(plan.missing))
        if self.rank in plan.void and mine.held is not None:
            self._holds(mine.held.shard, sure=False)
        current.check("after gather")
        return said, register

    def adopt(self, received: Any) -> None:
        """See `Performer`."""
        self._holds(None)
        current.check("adopt")
        super().adopt(received)
        self._holds(self._form.shard, sure=False)
        current.check("adopted")

    def restore(self) -> int:
        """See `Performer`."""
        self._holds(None)
        current.check("in restore")
        return super().restore()

    def finish(self, plan: Plan, number: int) -> None:
        """See `Performer`."""
        held = self._kept.held
        self._holds(held and held.shard, sure=plan.rung is Rung.PEERS)
        super().finish(plan, number)

    def seal(self, plan: Plan, register: Register) -> None:
        """See `Performer`."""
        self._holds(self._form.shard)
        if self.rank == 0:
            current.check("before register")
        super().seal(plan, register)
        if self.rank == 0:
            current.check("after register")
        current.recovering = False


class ProbedCourse(Course):
    """Says which steps this process applies, in the same block that is not interrupted."""

    def _apply(self) -> None:
        with self.performer.atomic():
            super()._apply()
            current.say("committed", step=self._held().step, rolled=current.recovering)
            if not current.recovering:
                current.check("applied")


class TwoGroups(torch.optim.AdamW):
    """AdamW with a point between the updates of its groups."""

    def _init_group(self, group: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if group is self.param_groups[1]:
            current.check("in roll" if current.recovering else "in update")
        return super()._init_group(group, *args, **kwargs)  # type: ignore[misc]


def install() -> None:
    """Puts the points into this process."""
    wire.Ballot._hear = _hear_half_way  # type: ignore[method-assign]
    performer.move = functools.partial(wire.move, at=lambda point: current.check(point))  # type: ignore[attr-defined]
    live_state.TorchPerformer = Probed  # type: ignore[misc]
    live_state.Course = ProbedCourse  # type: ignore[misc]
