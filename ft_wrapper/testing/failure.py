"""A run that goes wrong: how to have it again, and what happened in it, in a few sentences."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from .policies import Policy, RecordingPolicy, Switch
from .scenario import Disturbance, Scenario, process_name
from .scheduler import SchedulerError
from .simulation import Simulation
from .tasks import Event, Step, Task, describe

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


# What happened, told in sentences --------------------------------------------------------------------------

_DONE_TO: dict[str, str] = {
    "crash": "{who} is killed before `{what}`",
    "host": "{who} is lost with its monitor, before `{what}`",
    "node": "the node of {who} is lost before `{what}`; another one's agent tells {seconds:g} s later",
    "hang": "{who} hangs before `{what}`, and its monitor ends it",
    "quit": "{who} ends in order, and makes no other call",
    "flap": "{who} dies before `{what}`, and so do the next {seconds:g} s after it, as soon as they are in",
    "leave": "{who} is told to leave, before `{what}`",
    "doom": "{who} is given up by its monitor, before `{what}`",
    "pause": "{who} is stopped for {seconds:g} s before `{what}`",
    "freeze": "{who} and its monitor are stopped for {seconds:g} s before `{what}`",
    "deaf": "the monitor of {who} is stopped for {seconds:g} s before `{what}`",
    "mute": "the heartbeats of {who} are lost for {seconds:g} s",
    "outage": "no one reaches the store for {seconds:g} s; {who} is before `{what}`",
    "loop": "{who} is lost with its monitor before `{what}`, and every {seconds:g} s another process of its "
    "slot begins and is lost, too",
    "error": "{who} cannot reach the store for `{what}`",
    "repeat": "the reply to `{what}` of {who} is lost: it is carried out twice",
    "exception": "the function raises on {who}",
    "reporter": "the monitor of {who} dies before `{what}`",
    "respawn": "another process is started for the slot of {who}: {other}",
}


def tell(
    scenario: Scenario, switches: Iterable[tuple[int, Switch]], steps: Sequence[Step]
) -> tuple[str, ...]:
    """What happened in a run, in the order in which it did.

    Args:
        scenario: what was to happen.
        switches: where its schedule departs from that in which everyone runs on, each with the number of
            steps before it.
        steps: its steps.
    """
    places = _Places(steps)
    told = [(places.of(disturbance), _sentence(disturbance, places)) for disturbance in scenario.disturbances]
    told += [(place, _departure(switch)) for place, switch in switches]
    return tuple(sentence for place, sentence in sorted(told, key=lambda pair: pair[0]))


@dataclasses.dataclass
class _Place:
    index: int
    what: str = ""


class _Places:
    """Where in a trace each task takes its first, second … step."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._places: dict[tuple[str, int], _Place] = {}
        taken: dict[str, int] = {}
        for index, step in enumerate(steps):
            number = taken.get(step.task, 0) + 1
            place = self._places.setdefault((step.task, number), _Place(index))
            if step.happens:
                place.what = place.what or shorter(step.what.partition(" before ")[2])
            else:
                place.what, taken[step.task] = shorter(describe(step.what, step.args)), number

    def at(self, task: str, number: int) -> _Place:
        """Where a task takes its step of this number, or would have; the end if it comes to none."""
        return self._places.get((task, number)) or _Place(len(self._steps))

    def of(self, disturbance: Disturbance) -> int:
        """The index at which something happens to a process."""
        if disturbance.kind == "mute":
            times = (index for index, step in enumerate(self._steps) if step.time >= disturbance.step)
            return next(times, len(self._steps))
        if disturbance.kind == "quit":
            return len(self._steps)
        if disturbance.kind == "exception":
            faults = list(self._faults(process_name(disturbance.slot, disturbance.life)))
            return faults[min(disturbance.step, len(faults)) - 1] if faults else len(self._steps)
        return self.at(*whose_step(disturbance)).index

    def _faults(self, task: str) -> Iterator[int]:
        """Where a process publishes faults."""
        for index, step in enumerate(self._steps):
            if step.task == task and step.what == "append" and "/faults/" in step.args[0]:
                yield index


def whose_step(disturbance: Disturbance) -> tuple[str, int]:
    """The task, and the number of its step, before which something happens."""
    name = process_name(disturbance.slot, disturbance.life)
    if disturbance.kind == "deaf":
        return f"heart {name[5:]}", disturbance.step
    if disturbance.kind == "reporter":
        return f"report {name[5:]}", disturbance.step
    if disturbance.kind == "respawn":
        # It sleeps first, if it is to begin later.
        return process_name(disturbance.slot, disturbance.life + 1), 2 if disturbance.seconds else 1
    return name, disturbance.step


def _sentence(disturbance: Disturbance, places: _Places) -> str:
    task, number = whose_step(disturbance)
    who = process_name(disturbance.slot, disturbance.life)
    what = places.at(task, number).what or "its end"
    return _DONE_TO[disturbance.kind].format(who=who, what=what, seconds=disturbance.seconds, other=task)


def _departure(switch: Switch) -> str:
    if not switch.task:
        return f"{who(switch.to)} begins"
    if not switch.before:
        return f"then {who(switch.to)} goes on"
    return f"{who(switch.task)} is held up before `{shorter(switch.before)}`: {who(switch.to)} goes on"


def shorter(operation: str) -> str:
    """An operation without the records that it writes."""
    return operation.partition(" {")[0]


def who(task: str) -> str:
    """What a task is, for people."""
    kind, _, name = task.partition(" ")
    return f"the monitor of rank {name}" if kind in ("heart", "report") else task
