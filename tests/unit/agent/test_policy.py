"""What is decided when a rank fails, and how long a replacement waits. No process, no clock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_wrapper.agent.job_in_store import JobInStore
from ft_wrapper.agent.policy import (
    FAULT_WINDOW,
    LONGEST_DELAY,
    SETTLED,
    JobFacts,
    Policy,
    RankBudget,
    Remedy,
    RestartPolicy,
)
from ft_wrapper.exception import StoreError
from ft_wrapper.store import TCPStoreServer


def decide(
    policy: RestartPolicy, facts: JobFacts, rank: int = 0, lived: float = 0.0, first: bool = True
) -> Remedy:
    return policy.decide(rank, lived, facts, is_first=first).remedy


FORMED = JobFacts(formed=True)


def test_the_first_replacement_comes_at_once_and_a_crash_loop_slows_down() -> None:
    budget = RankBudget(12)
    delays = [budget.spend(0.1, is_first=number == 0) for number in range(12)]
    assert delays[:5] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert max(d for d in delays if d is not None) == LONGEST_DELAY
    assert budget.spend(0.1, is_first=False) is None


def test_who_lived_for_a_while_was_in_no_crash_loop() -> None:
    budget = RankBudget(9)
    assert [budget.spend(0.1, is_first=False) for _ in range(3)] == [0.5, 1.0, 2.0]
    assert budget.spend(SETTLED, is_first=False) == 0.0
    assert budget.spend(0.1, is_first=False) == 0.5
    assert budget.left == 4


@given(
    st.integers(1, 5),
    st.lists(st.one_of(st.floats(0.0, 60.0), st.floats(0.0, 2 * FAULT_WINDOW)), max_size=60),
)
def test_a_replacement_counts_only_within_the_window(most: int, lives: list[float]) -> None:
    budget, started, now = RankBudget(most), list[float](), 0.0
    for lived in lives:
        now += lived
        is_spent = sum(now - one < FAULT_WINDOW for one in started) == most
        assert (budget.spend(lived, is_first=False) is None) == is_spent
        if is_spent:
            break
        started.append(now)


def test_a_rank_that_is_killed_now_and_then_is_always_replaced() -> None:
    budget = RankBudget(10)
    week = 7 * 24 * 3600.0
    assert [budget.spend(week, is_first=False) for _ in range(100)] == [0.0] * 100


def test_auto_is_group_until_a_job_has_formed_and_rank_from_then_on() -> None:
    policy = RestartPolicy(Policy.AUTO, 1, 5)
    assert decide(policy, JobFacts()) is Remedy.RESTART_GROUP
    assert decide(policy, JobFacts()) is Remedy.END_GROUP
    assert decide(policy, FORMED) is Remedy.REPLACE
    # Its store does not answer for a moment: no reason to end what goes on in the ranks.
    assert decide(policy, JobFacts()) is Remedy.REPLACE


def test_each_rank_has_a_budget_of_its_own() -> None:
    policy, job = RestartPolicy(Policy.RANK, 0, 1), FORMED
    assert policy.replaces(1)
    assert decide(policy, job, rank=1) is Remedy.REPLACE
    assert not policy.replaces(1)
    assert decide(policy, job, rank=1, first=False) is Remedy.LEAVE_OUT
    assert decide(policy, job, rank=2) is Remedy.REPLACE


def test_rank_replaces_alone_before_a_job_has_formed_too() -> None:
    assert decide(RestartPolicy(Policy.RANK, 0, 1), JobFacts(admits=False)) is Remedy.REPLACE


@pytest.mark.parametrize("policy", [Policy.AUTO, Policy.RANK])
def test_nobody_is_started_who_could_not_join(policy: Policy) -> None:
    deciding = RestartPolicy(policy, 3, 3)
    verdict = deciding.decide(0, 0.0, JobFacts(formed=True, admits=False), is_first=True)
    assert verdict.remedy is Remedy.LEAVE_OUT
    assert "rejoin=True" in verdict.why
    assert deciding.replaces(0), "it costs nothing"


def test_who_has_given_up_is_left_alone() -> None:
    policy = RestartPolicy(Policy.AUTO, 0, 3)
    assert decide(policy, JobFacts(formed=True, gave_up=True)) is Remedy.LEAVE_OUT
    assert decide(policy, FORMED) is Remedy.REPLACE


def test_group_never_replaces_alone() -> None:
    policy = RestartPolicy(Policy.GROUP, 2, 5)
    assert [decide(policy, FORMED) for _ in range(3)] == [
        Remedy.RESTART_GROUP,
        Remedy.RESTART_GROUP,
        Remedy.END_GROUP,
    ]
    assert policy.restarts == 2
    assert not policy.replaces(0)


def test_who_fails_while_the_store_is_lost_was_stranded_by_that() -> None:
    lost: list[str] = []

    def call(question: Callable[[], object], seconds: float | None) -> object:
        if lost:
            raise StoreError(lost[0])
        return question()

    server = TCPStoreServer(0)
    job = JobInStore(f"localhost:{server.port}", lambda: False, call)
    with contextlib.closing(server), contextlib.closing(job):
        assert job.facts_of(0, 7) == JobFacts()
        lost.append("it is gone")
        assert job.facts_of(0, 7) == JobFacts(stranded=True)
