"""A run that goes wrong: it can be had again, is told in a few sentences, and made smaller."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ft_wrapper.protocol.global_iteration import GlobalIteration, Proposed
from ft_wrapper.protocol.records import Member, View
from ft_wrapper.testing.scheduler import RandomPolicy, TurnPolicy
from tests.explorer.failure import Failure, Shrinker, SwitchPolicy, attempt, kind_of
from tests.explorer.scenario import SENTENCES, Disturbance, Scenario
from tests.explorer.simulation import Simulation

CRASH = Disturbance("crash", 0, 22)


class RankZeroCounts(GlobalIteration):
    """Rank 0 always counts as active: once it is dead, all wait for it."""

    def advance(self, view: View, proposer: Member | None, **how: Any) -> Proposed | None:
        if self.read_head() == view.head and view.members[0] not in self.arrivals_of(view.n):
            return None
        return super().advance(view, proposer, **how)


class Mistaken(Simulation):
    """A job with a mistake that shows whenever rank 0 crashes in the function."""

    parts = {GlobalIteration: RankZeroCounts}


def make(scenario: Scenario, policy: TurnPolicy) -> Simulation:
    """A job of a scenario."""
    return Mistaken(scenario, policy=policy)


def fails(scenario: Scenario, seed: int = 3) -> Failure:
    """The failure of a scenario that fails."""
    failure = attempt(make, scenario, RandomPolicy(seed))
    assert failure is not None
    return failure


def test_same_scenario_and_switches_are_the_same_run() -> None:
    failure = fails(Scenario(disturbances=(CRASH,)))
    assert len(failure.switches) > 5
    assert attempt(make, failure.scenario, SwitchPolicy(failure.switches)) == failure


def test_what_is_not_needed_is_dropped() -> None:
    needless = (Disturbance("pause", 2, 30, 3.0), Disturbance("repeat", 1, 10))
    large = Scenario(4, 3, steps=1, calls=2, disturbances=(needless[0], CRASH, needless[1]))
    shrinker = Shrinker(make, fails(large))
    small = shrinker.shrink()
    assert small.scenario in [
        Scenario(2, 2, steps=1, disturbances=(dataclasses.replace(CRASH, step=step),)) for step in range(23)
    ]
    assert small.switches == ()
    assert small.what.startswith("Violation: rank 1 is failed, though nothing was done to it: iteration 0")
    assert 0 < shrinker.runs < 500


@pytest.mark.parametrize(
    "one, other, same",
    [
        ("Violation in 'rank 0': I1: head moved", "Violation in 'heart 1b': I1: it was deleted", True),
        ("I1: head moved from 0:1:a to 0:2:b", "I2: head moved from 0:1:a to 0:2:b", False),
        ("Violation: rank 1b is failed: slots [0, 1]", "Violation: rank 0 is failed: slots []", True),
        ("Violation: rank 1b is failed", "Violation: rank 1b is out", False),
        ("StoreError in 'rank 0': key 'a/1'", "StoreError in 'report 2': key 'b'", True),
        ("StoreError in 'rank 0': gone", "TypeError in 'rank 0': gone", False),
    ],
)
def test_kinds_are_told_apart_by_words(one: str, other: str, same: bool) -> None:
    assert (kind_of(one) == kind_of(other)) is same


def test_no_more_runs_are_made_than_allowed() -> None:
    failure = fails(Scenario(members=4, active=3, disturbances=(CRASH,)))
    shrinker = Shrinker(make, failure, most_runs=2)
    assert shrinker.shrink().kind == failure.kind
    assert shrinker.runs <= 2


def test_another_failure_is_not_taken_for_the_same() -> None:
    failure = fails(Scenario(disturbances=(CRASH, Disturbance("repeat", 1, 10))))
    shrinker = Shrinker(make, failure, most_runs=20, same=lambda found: False)
    assert shrinker.shrink() is failure and shrinker.runs > 10


def test_story_is_told_in_order() -> None:
    late, early = Disturbance("pause", 2, 26, 5.0), Disturbance("repeat", 0, 8)
    again = attempt(make, Scenario(disturbances=(late, CRASH, early)), SwitchPolicy(()))
    assert again is not None
    assert again.story == (
        "the reply to `add count/gone/-1 1` of rank 0 is lost: it is carried out twice",
        "rank 0 is killed before `wait wake/end/0 0.1 s`",
        "rank 2 is stopped for 5 s before `read head`",
    )
    text = str(again)
    assert "crash of rank 0 at 22" in text and "  2. rank 0 is killed" in text and again.what in text


@pytest.mark.parametrize("kind", sorted(set(SENTENCES) - {"reporter"}))
def test_story_tells_of_each_fault(kind: str) -> None:
    """Each once, at the step before which it happens."""
    fault = Disturbance(kind, 1, 1 if kind in ("quit", "exception") else 4, 7.0)
    calls = 2 if kind == "quit" else 1
    simulation = Simulation(Scenario(steps=10, step_seconds=3.0, calls=calls, disturbances=(fault,))).run()
    ((place, sentence),) = simulation.story
    assert "rank 1" in sentence and 0 <= place < len(simulation.scheduler.trace_steps)


def test_switches_are_told_by_who_is_held_up() -> None:
    failure = fails(Scenario(disturbances=(CRASH,)))
    told = [sentence for sentence in failure.story if "is held up before" in sentence]
    assert told and all("goes on" in sentence for sentence in told)
