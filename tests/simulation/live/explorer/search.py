"""Many schedules of a job, drawn at random."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterable

from .job import Job
from .world import CUT, GO, INTERRUPT, KILL, KILL_SPARE, LATE, RAISE, Action, Violation, World

FAULTS = frozenset({RAISE, KILL, CUT, KILL_SPARE, LATE})
LEAVES = frozenset({INTERRUPT, CUT})
ONLY_LEAVES = frozenset({INTERRUPT})


class RandomPolicy:
    """Anything, from a seed.

    Some seeds switch at each step, some let a member run on for long; in some all leave an iteration at once
    after a fault, in some they go on as far as they can; faults come one by one, in bursts, or while a
    recovery is sealed, and in some no process is lost; in some a restart often changes places, in some hardly
    ever.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._draw = self._random.random
        self._stay = self._random.choice((0.0, 0.5, 0.9))
        self._eager = self._random.choice((0.02, 0.1, 0.5))
        self._rates = self._random.choice(((0.01, 0.03, 0.1), (0.05, 0.2)))
        self._seal_rate = self._random.choice((0.0, 0.0, 0.2))
        self._begins_quietly = self._draw() < 0.9
        self._faults = self._random.choice((FAULTS, FAULTS - {KILL}))
        self._keeps = {"demote": self._random.choice((0.3, 0.9)), "arrange": self._random.choice((0.3, 0.9))}
        self._n = -1
        self._rate = 0.0
        self._current: object = None

    def next(self, world: World) -> Action | None:
        """See `Policy`."""
        draw = self._draw
        if world.n != self._n:
            self._n = world.n
            self._rate = self._random.choice(self._rates)
        if world.job.late_writes and world.faults and (late := self._late_write(world)) is not None:
            return late
        number = draw()
        rate = self._rate
        if self._seal_rate:
            rate = self._seal_rate if world.checker.is_sealing else 0.01
        if number < rate and not (self._begins_quietly and world.checker.views[-1].top < 0):
            action = self._any(world, self._faults)
            if action is not None:
                return action
        if world.is_ending and number > 1 - self._eager:
            action = self._any(world, LEAVES)
            if action is not None:
                return action
        ready = world.ready
        if not ready:
            return self._any(world, ONLY_LEAVES)
        if self._current not in ready or draw() >= self._stay:
            self._current = ready[int(draw() * len(ready))]
        return GO, self._current

    def _late_write(self, world: World) -> Action | None:
        """Rare by chance: active rank 0 is left out just as it writes, and the write comes later."""
        writer = world.members[0]
        if writer.at == "writes the register" and not writer.has_left and self._draw() < 0.3:
            return KILL, writer
        return (LATE, None) if world.late is not None and self._draw() < 0.03 else None

    def _any(self, world: World, kinds: frozenset[str]) -> Action | None:
        found = [action for action in world.actions() if action[0] in kinds]
        return found[int(self._draw() * len(found))] if found else None

    def pick(self, what: str, count: int) -> int:
        """See `Policy`."""
        if self._draw() < self._keeps.get(what, 0.0):
            return 0
        return int(self._draw() * count)


@dataclasses.dataclass
class Failure:
    """A schedule in which an invariant does not hold.

    Args:
        what: which, and how.
        seed: of a random schedule.
        events: how many there were.
        trace: the last of them.
    """

    what: str
    events: int
    seed: int | None = None
    trace: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Report:
    """What a search has done.

    Args:
        schedules: how many were run.
        recoveries: how many there were, by rung.
        faults: how many were injected.
        failure: the first one.
    """

    schedules: int = 0
    recoveries: Counter[str] = dataclasses.field(default_factory=Counter)
    faults: int = 0
    failure: Failure | None = None

    def add(self, world: World) -> None:
        """Adds a run."""
        self.schedules += 1
        self.recoveries.update(world.checker.recoveries)
        self.faults += world.job.faults - world.faults


def at_random(job: Job, seeds: Iterable[int]) -> Report:
    """Runs the schedules of so many seeds, until one fails."""
    report = Report()
    for seed in seeds:
        world = World(job, RandomPolicy(seed))
        failure = _run(world)
        report.add(world)
        if failure is not None:
            failure.seed = seed
            again = World(job, RandomPolicy(seed), traces=True)
            _run(again)
            failure.trace = again.trace or []
            report.failure = failure
            break
    return report


def _run(world: World) -> Failure | None:
    try:
        world.run()
    except Violation as violation:
        return Failure(str(violation), world.events)
    return None
