"""A run that goes wrong."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from .policies import Policy, RecordingPolicy, Switch
from .scenario import Scenario
from .scheduler import SchedulerError
from .simulation import Simulation

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
        trace: who did what.
    """

    scenario: Scenario
    switches: tuple[Switch, ...]
    what: str
    steps: int
    trace: str

    def __str__(self) -> str:
        """All of it but the trace."""
        lines = [str(self.scenario), *map(str, self.switches), f"step {self.steps}: {self.what}"]
        return "\n".join(lines)

    @property
    def kind(self) -> str:
        """What went wrong, without the names and numbers of this run."""
        return kind_of(self.what)


def kind_of(what: str) -> str:
    """What went wrong, without the names and numbers of one run: ``I1``, ``InternalError``."""
    invariant = re.search(r"\bI\d+(?=:)", what)
    if invariant is not None:
        return invariant[0]
    return re.split(r"[: ]", what, maxsplit=1)[0]


def attempt(make: Make, scenario: Scenario, policy: Policy) -> Failure | None:
    """One run; None if it goes well."""
    recording = RecordingPolicy(policy)
    simulation = make(scenario, recording)
    try:
        simulation.run()
    except SchedulerError as error:
        scheduler = simulation.scheduler
        return Failure(scenario, tuple(recording.switches), error.what, scheduler.steps, scheduler.trace())
    return None
