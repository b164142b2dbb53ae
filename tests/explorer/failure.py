"""A run that goes wrong: how to have it again, what happened in it, and a smaller one like it."""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence

from ft_wrapper.testing.scheduler import (
    RandomPolicy,
    SchedulerError,
    Step,
    Task,
    TurnPolicy,
    describe,
    shorter,
)

from .scenario import Scenario
from .simulation import Simulation

#: Makes a simulation of a scenario, in which a policy decides who goes on.
Make = Callable[[Scenario, TurnPolicy], Simulation]


# Where a run departs from the simplest one ------------------------------------------------------------------


def run_on(tasks: Sequence[Task], current: Task | None) -> int:
    """The current task for as long as it can run, then the next in the order of spawning."""
    if current is None:
        return 0
    return next((number for number, task in enumerate(tasks) if task.number >= current.number), 0)


@dataclasses.dataclass(frozen=True)
class Switch:
    """A place where a schedule departs from `run_on`.

    Args:
        task: who ran last; empty at the start.
        step: how many steps it had taken.
        to: who goes on instead, or what happens.
        choice: how often somebody else could have gone on there before: time passes, and it may wake.
        before: the step that it was about to take, for people.
    """

    task: str
    step: int
    to: str
    choice: int = 0
    before: str = dataclasses.field(default="", compare=False)


class _Places:
    """Counts the choices that are made where a task is."""

    def __init__(self) -> None:
        self._made: collections.Counter[tuple[str, int]] = collections.Counter()

    def next(self, current: Task | None) -> tuple[str, int, int]:
        """Who ran last, how many steps it had taken, and how often there was a choice there before."""
        place = ("", 0) if current is None else (current.name, current.steps)
        self._made[place] += 1
        return (*place, self._made[place] - 1)


class RecordingPolicy:
    """Notes where another policy departs from `run_on`.

    Args:
        policy: the other one.

    Attributes:
        switches: where it did.
        places: where each of these is in the trace.
        trace: the steps that were taken so far.
    """

    def __init__(self, policy: TurnPolicy) -> None:
        self.switches: list[Switch] = []
        self.places: list[int] = []
        self.trace: Sequence[Step] = ()
        self._policy = policy
        self._places = _Places()

    def choose(self, tasks: Sequence[Task], current: Task | None) -> int:
        choice = self._policy.choose(tasks, current)
        task, step, number = self._places.next(current)
        if choice != run_on(tasks, current):
            upcoming = None if current is None or not current.ready else current.upcoming
            before = "" if upcoming is None else describe(*upcoming)
            self.switches.append(Switch(task, step, tasks[choice].name, number, before))
            self.places.append(len(self.trace))
        return choice


class SwitchPolicy:
    """Runs on but for some switches. Those for which there is no occasion are passed over.

    Args:
        switches: where to depart, and to whom.
    """

    def __init__(self, switches: Sequence[Switch]) -> None:
        self._wanted = {(switch.task, switch.step, switch.choice): switch.to for switch in switches}
        self._places = _Places()

    def choose(self, tasks: Sequence[Task], current: Task | None) -> int:
        wanted = self._wanted.get(self._places.next(current))
        if wanted is not None:
            names = [task.name for task in tasks]
            if wanted in names:
                return names.index(wanted)
        return run_on(tasks, current)


# The run ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Failure:
    """A run that goes wrong. The same scenario with the same switches is the same run.

    Args:
        scenario: what the job was to do.
        switches: where its schedule departs from that in which everyone runs on.
        what: what went wrong.
        steps: store operations and sleeps until then.
        story: what was done to the processes, and where their order changed, in sentences.
        trace: who did what.
    """

    scenario: Scenario
    switches: tuple[Switch, ...]
    what: str
    steps: int
    story: tuple[str, ...]
    trace: str

    def __str__(self) -> str:
        """All of it but the trace."""
        story = [f"{number:3}. {sentence}" for number, sentence in enumerate(self.story, 1)]
        return "\n".join([str(self.scenario), *story, f"step {self.steps}: {self.what}"])

    @property
    def kind(self) -> str:
        """What went wrong, without the names and numbers of this run."""
        return kind_of(self.what)


def kind_of(what: str) -> str:
    """What went wrong, without the names and numbers of one run: an invariant, or what an error says."""
    invariant = re.search(r"\bI\d+(?=:)", what)
    if invariant is not None:
        return invariant[0]
    return re.sub(r"'[^']*'|\[[^]]*\]|[^\s,;()]*\d[^\s,;()]*", "#", what)


def attempt(make: Make, scenario: Scenario, policy: TurnPolicy) -> Failure | None:
    """One run; None if it goes well."""
    recording = RecordingPolicy(policy)
    simulation = make(scenario, recording)
    scheduler = simulation.scheduler
    recording.trace = scheduler.trace_steps
    try:
        simulation.run()
    except SchedulerError as error:
        told = [*simulation.story, *zip(recording.places, map(_departure, recording.switches), strict=True)]
        story = tuple(sentence for place, sentence in sorted(told, key=lambda one: one[0]))
        switches = tuple(recording.switches)
        return Failure(scenario, switches, error.what, scheduler.steps, story, scheduler.trace())
    return None


def _departure(switch: Switch) -> str:
    if not switch.task:
        return f"{who(switch.to)} begins"
    if not switch.before:
        return f"then {who(switch.to)} goes on"
    return f"{who(switch.task)} is held up before `{shorter(switch.before)}`: {who(switch.to)} goes on"


def who(task: str) -> str:
    """What a task is, for people."""
    kind, _, name = task.partition(" ")
    return f"the monitor of rank {name}" if kind in ("heart", "report") else task


# Made smaller ---------------------------------------------------------------------------------------------

#: With how many seeds a smaller scenario is tried before it is given up.
SEEDS = 20
MOST_RUNS = 3_000
_LAST_STEP = 50


class Shrinker:
    """Makes a failure smaller for as long as the runs last.

    First fewer faults and fewer ranks, then fewer switches among them, then less of everything else. It is
    smaller in the first of these that differs.

    Args:
        make: makes a simulation.
        failure: what to begin with.
        most_runs: how many runs may be made.
        same: whether a run goes wrong in the same way, told by what went wrong; by its kind when None.

    Attributes:
        failure: the smallest so far that goes wrong in the same way.
        runs: how many were made.
    """

    def __init__(
        self,
        make: Make,
        failure: Failure,
        most_runs: int = MOST_RUNS,
        same: Callable[[Failure], bool] | None = None,
    ) -> None:
        self.failure = failure
        self.runs = 0
        self.make = make
        self.most_runs = most_runs
        self.same = same or (lambda found: found.kind == failure.kind)

    def shrink(self) -> Failure:
        """The smallest failure that was found."""
        self._simplify(fewer, self._any_order)
        self.drop_switches()
        self._simplify(less, self._same_order)
        return self.failure

    def _simplify(
        self,
        simpler: Callable[[Scenario], Iterator[Scenario]],
        orders: Callable[[], Iterator[TurnPolicy]],
    ) -> None:
        """Takes simpler scenarios for as long as one of the orders goes wrong."""
        while any(
            self._try(scenario, policy) for scenario in simpler(self.failure.scenario) for policy in orders()
        ):
            pass

    def _same_order(self) -> Iterator[TurnPolicy]:
        yield SwitchPolicy(())
        if self.failure.switches:
            yield SwitchPolicy(self.failure.switches)

    def _any_order(self) -> Iterator[TurnPolicy]:
        yield from self._same_order()
        yield from map(RandomPolicy, range(SEEDS))

    def _try(self, scenario: Scenario, policy: TurnPolicy, below: float = math.inf) -> bool:
        """Whether a run goes wrong in the same way, with fewer switches than ``below``. It is kept then."""
        if self.runs >= self.most_runs:
            return False
        self.runs += 1
        found = attempt(self.make, scenario, policy)
        if found is None or not self.same(found) or len(found.switches) >= below:
            return False
        self.failure = found
        return True

    def drop_switches(self) -> None:
        """Leaves out whatever is not needed: halves first, then quarters, and single ones last."""
        size = max(1, len(self.failure.switches) // 2)
        while size:
            scenario, switches = self.failure.scenario, self.failure.switches
            rests = [switches[:start] + switches[start + size :] for start in range(0, len(switches), size)]
            # Those that were left may have had no occasion, and others have come instead.
            if not any(self._try(scenario, SwitchPolicy(rest), len(switches)) for rest in rests):
                size = 0 if self.runs >= self.most_runs else size // 2


def fewer(scenario: Scenario) -> Iterator[Scenario]:
    """The scenario with one fault less, or one rank."""
    disturbances = scenario.disturbances
    for number in range(len(disturbances)):
        yield dataclasses.replace(scenario, disturbances=disturbances[:number] + disturbances[number + 1 :])
    if scenario.members > 2:
        for slot in sorted(range(scenario.members), key=lambda slot: slot in {d.slot for d in disturbances}):
            yield _without(scenario, slot)


def _without(scenario: Scenario, slot: int) -> Scenario:
    """The scenario without a slot and what happens to it; those behind it move up."""
    members = scenario.members - 1
    return dataclasses.replace(
        scenario,
        members=members,
        active=min(scenario.active, members),
        disturbances=tuple(
            dataclasses.replace(disturbance, slot=disturbance.slot - (disturbance.slot > slot))
            for disturbance in scenario.disturbances
            if disturbance.slot != slot
        ),
    )


def less(scenario: Scenario) -> Iterator[Scenario]:
    """The scenario with one thing as it usually is, perhaps with one of the faults at another step."""
    usual = Scenario(scenario.members, scenario.active, steps=1, disturbances=scenario.disturbances)
    for name, value in vars(usual).items():
        if getattr(scenario, name) != value:
            yield from elsewhere(dataclasses.replace(scenario, **{name: value}))


def elsewhere(scenario: Scenario) -> Iterator[Scenario]:
    """The same faults, one of them at another step, the nearest first; the same scenario before."""
    yield scenario
    for number, disturbance in enumerate(scenario.disturbances):
        before, after = scenario.disturbances[:number], scenario.disturbances[number + 1 :]
        for step in sorted(range(1, _LAST_STEP), key=lambda step: abs(step - disturbance.step)):
            if step != disturbance.step:
                moved = dataclasses.replace(disturbance, step=step)
                yield dataclasses.replace(scenario, disturbances=(*before, moved, *after))
