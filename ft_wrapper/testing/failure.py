"""A run that goes wrong."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from .policies import Policy, RecordingPolicy, Switch
from .scenario import Scenario
from .scheduler import Event, SchedulerError, Task
from .simulation import Simulation
from .story import tell
from .trace import Step

Make = Callable[[Scenario, Policy], Simulation]
"""Makes a simulation of a scenario, in which a policy decides who goes on."""


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


def attempt(make: Make, scenario: Scenario, policy: Policy) -> Failure | None:
    """One run; None if it goes well."""
    recording = _Recording(policy)
    simulation = make(scenario, recording)
    scheduler = simulation.scheduler
    recording.steps = scheduler.trace_steps
    try:
        simulation.run()
    except SchedulerError as error:
        switches = tuple(recording.switches)
        story = tell(scenario, zip(recording.places, switches, strict=True), scheduler.trace_steps)
        return Failure(scenario, switches, error.what, scheduler.steps, story, scheduler.trace())
    return None


class _Recording(RecordingPolicy):
    """Notes where in the trace the switches are, too."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.steps: Sequence[Step] = ()
        self.places: list[int] = []

    def choose(self, tasks: Sequence[Task], events: Sequence[Event], current: Task | None) -> int:
        choice = super().choose(tasks, events, current)
        if len(self.places) < len(self.switches):
            self.places.append(len(self.steps))
        return choice
