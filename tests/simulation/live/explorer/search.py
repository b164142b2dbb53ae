"""Searches: many schedules at random, or all of a small job."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Iterable

from .job import Job
from .mistakes import NONE, Mistake
from .world import CUT, GO, INTERRUPT, KILL, KILL_SPARE, LATE, RAISE, Action, Policy, Violation, World

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
        choices: of one of a search through all.
        events: how many there were.
        trace: the last of them.
    """

    what: str
    events: int
    seed: int | None = None
    choices: tuple[int, ...] = ()
    trace: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Report:
    """What a search has done.

    Args:
        schedules: how many were run.
        events: how many things happened in them.
        seconds: of one processor that it took.
        recoveries: how many there were, by rung.
        between: how many went down the ladder although each shard had a holder that counts: at different
            steps, one of them a spare while others rolled forward.
        faults: how many were injected.
        states: how many different ones a search through all has been in.
        is_complete: whether it was through all.
        failure: the first one.
    """

    schedules: int = 0
    events: int = 0
    seconds: float = 0.0
    recoveries: Counter[str] = dataclasses.field(default_factory=Counter)
    between: int = 0
    faults: int = 0
    states: int = 0
    is_complete: bool = True
    failure: Failure | None = None

    def add(self, world: World) -> None:
        """Adds a run."""
        self.schedules += 1
        self.events += world.events
        self.recoveries.update(world.checker.recoveries)
        self.between += world.checker.between
        self.faults += world.job.faults - world.faults

    def figures(self) -> str:
        """In a line."""
        rungs = ", ".join(f"{count:,} {rung}" for rung, count in sorted(self.recoveries.items()))
        states = f"{self.states:,} states, " if self.states else ""
        return (
            f"{self.schedules:,} schedules, {states}{self.events:,} events, {self.faults:,} faults in "
            f"{self.seconds:.1f} s of a processor ({self.events / self.seconds:,.0f} events a second); "
            f"recoveries: {rungs}; {self.between} between two steps"
        )


def together(reports: Iterable[Report]) -> Report:
    """The sum of several."""
    total = Report()
    for report in reports:
        total.schedules += report.schedules
        total.events += report.events
        total.recoveries += report.recoveries
        total.between += report.between
        total.faults += report.faults
        total.seconds += report.seconds
        total.failure = total.failure or report.failure
    return total


def at_random(job: Job, seeds: Iterable[int], mistake: Mistake = NONE) -> Report:
    """Runs the schedules of so many seeds, until one fails."""
    began = time.process_time()
    report = Report()
    with mistake.put_in():
        for seed in seeds:
            world = World(job, RandomPolicy(seed), mistake)
            failure = _run(world)
            report.add(world)
            if failure is not None:
                failure.seed = seed
                again = World(job, RandomPolicy(seed), mistake, traces=True)
                _run(again)
                failure.trace = again.trace or []
                report.failure = failure
                break
    report.seconds = time.process_time() - began
    return report


def _run(world: World) -> Failure | None:
    try:
        world.run()
    except Violation as violation:
        return Failure(str(violation), world.events)
    return None


class _Seen(Exception):
    """All that follows from here was tried."""


class _Replay:
    """Repeats choices, then takes the first one each time, until it comes to a state that was seen."""

    def __init__(self, choices: list[int], seen: set[int], *, from_start: bool) -> None:
        self._is_quiet = not from_start
        self.choices = choices
        self.counts: list[int] = []
        self._seen = seen

    def next(self, world: World) -> Action | None:
        """See `Policy`."""
        actions = world.actions()
        if not actions:
            return None
        if self._is_quiet:
            self._is_quiet = world.register.sealed < 0
            return actions[0]
        if len(self.counts) >= len(self.choices):
            key = world.key()
            if key in self._seen:
                raise _Seen
            self._seen.add(key)
        return actions[self._choose(len(actions))]

    def pick(self, what: str, count: int) -> int:
        """See `Policy`."""
        return self._choose(count)

    def _choose(self, count: int) -> int:
        at = len(self.counts)
        self.counts.append(count)
        if at == len(self.choices):
            self.choices.append(0)
        return self.choices[at]


def exhaustively(
    job: Job, mistake: Mistake = NONE, *, most_seconds: float = 600.0, from_start: bool = False
) -> Report:
    """Runs all schedules of a job: each way on from each state, once.

    Args:
        job: which.
        mistake: is put into the code.
        most_seconds: of a processor that it may take.
        from_start: also those of the first recovery; otherwise all begin when that has just been sealed.
    """
    began = time.process_time()
    report = Report()
    seen: set[int] = set()
    choices: list[int] = []
    with mistake.put_in():
        while report.failure is None:
            policy = _Replay(choices, seen, from_start=from_start)
            world = World(job, policy, mistake)
            try:
                report.failure = _run(world)
            except _Seen:
                pass
            report.add(world)
            if report.failure is not None:
                report.failure.choices = tuple(choices)
                report.failure.trace = retrace(job, mistake, choices, from_start=from_start)
            while choices and choices[-1] + 1 >= policy.counts[len(choices) - 1]:
                choices.pop()
            if not choices:
                break
            choices[-1] += 1
            if time.process_time() - began > most_seconds:
                report.is_complete = False
                break
    report.states = len(seen)
    report.seconds = time.process_time() - began
    return report


def retrace(job: Job, mistake: Mistake, choices: list[int], *, from_start: bool) -> list[str]:
    """What happened with these choices."""
    policy: Policy = _Replay(list(choices), set(), from_start=from_start)
    world = World(job, policy, mistake, traces=True)
    _run(world)
    return world.trace or []
