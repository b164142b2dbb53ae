"""When the plug-ins run, with which states, and what their failures mean."""

from __future__ import annotations

import collections
import os
import threading
from typing import Any

import pytest
from rank_harness import SETTINGS, Job, Rank

from ft_wrapper import CallWrapper, Compose, FrozenState, Mode, Wrapper
from ft_wrapper.abort import Abort
from ft_wrapper.completion import Completion
from ft_wrapper.exception import InternalError, RestartAbort
from ft_wrapper.finalize import Finalize
from ft_wrapper.health_check import HealthCheck
from ft_wrapper.initialize import Initialize
from ft_wrapper.rank_assignment import (
    ActivateAllRanks,
    RankAssignment,
    RankAssignmentCtx,
    ShiftRanks,
    activate_if_unsaid,
)
from ft_wrapper.restart.loop import check_assigned
from ft_wrapper.state import State
from ft_wrapper.terminate import Terminate
from ft_wrapper.testing import FakeStore

Failures = dict[tuple[int, int, str, int], type[BaseException]]
"""What is raised in which iteration, on which slot, in which plug-in and in which of its calls there."""

PLACES = ("initialize", "health_check", "abort", "finalize", "completion", "terminate")


class Noted(Initialize, HealthCheck, Abort, Finalize, Completion, Terminate):
    """Any plug-in: says that it runs, and with which state; raises in some of its calls in an iteration."""

    def __init__(self, rank: Rank, place: str, fails: Failures) -> None:
        self.rank, self.place, self.fails = rank, place, fails
        self.calls: collections.Counter[int] = collections.Counter()

    def __call__(self, state: FrozenState) -> FrozenState:
        error = state.fn_exception
        self.rank.say(
            "plug-in",
            name=self.place,
            n=state.iteration,
            mode=state.mode.name,
            rank=state.rank,
            active_rank=state.active_rank,
            error=type(error).__name__ if error else None,
            main=threading.current_thread() is threading.main_thread(),
        )
        self.calls[state.iteration] += 1
        error = self.fails.get((state.iteration, self.rank.slot, self.place, self.calls[state.iteration]))
        if error is not None:
            raise error("told to")
        return state


def with_all(rank: Rank, fails: Failures = {}, **more: Any) -> dict[str, Any]:  # noqa: B006 (not changed)
    return {**SETTINGS, **{place: Noted(rank, place, fails) for place in PLACES}, **more}


def noted(job: Job, slot: int) -> list[tuple[Any, ...]]:
    return [(m["name"], m["n"], m["mode"], m["active_rank"], m["error"]) for m in job[slot].said("plug-in")]


# ---- the order


def runs(rank: Rank) -> Any:
    @Wrapper(**with_all(rank, active_world_size=2))
    def train(call_wrapper: CallWrapper) -> int:
        n = call_wrapper.iteration
        rank.say(
            "plug-in", name="function", n=n, mode="ACTIVE", active_rank=int(os.environ["RANK"]), error=None
        )
        if n == 2:
            return n
        if rank.slot != 1:
            rank.hang()
        rank.hear()  # that the others are where the test wants them
        raise (ValueError() if n == 0 else SystemExit(5))

    return train()


def test_the_order_and_the_states(job: Job) -> None:
    job.start(3, runs)
    for n in range(2):
        job.expect("plug-in", 0, name="function", n=n)
        job.expect("plug-in", 2, name="health_check", n=n)
        job.tell("fail", 1)
    job.wait_for_end()
    assert (job[0].value, job[1].code, job[2].value) == (2, 5, 2)

    def entered(n: int, mode: str, active_rank: int | None) -> list[tuple[Any, ...]]:
        return [(name, n, mode, active_rank, None) for name in ("initialize", "health_check")]

    def function(n: int, active_rank: int) -> tuple[Any, ...]:
        return ("function", n, "ACTIVE", active_rank, None)

    def left(n: int, mode: str, active_rank: int | None, error: str | None = None) -> list[tuple[Any, ...]]:
        # The abort may run while the function is inside, or after it has left with an exception.
        return [(name, n, mode, active_rank, error) for name in ("abort", "finalize", "health_check")]

    assert noted(job, 0) == [
        *[*entered(0, "ACTIVE", 0), function(0, 0), *left(0, "ACTIVE", 0)],
        *[*entered(1, "ACTIVE", 0), function(1, 0), *left(1, "ACTIVE", 0)],
        *[*entered(2, "ACTIVE", 0), function(2, 0), ("completion", 2, "ACTIVE", 0, None)],
    ]
    assert noted(job, 1) == [
        *[*entered(0, "ACTIVE", 1), function(0, 1), *left(0, "ACTIVE", 1, "ValueError")],
        *[*entered(1, "ACTIVE", 1), function(1, 1), ("abort", 1, "ACTIVE", 1, None)],
        ("terminate", 1, "TERMINATED", 1, None),
    ]
    assert noted(job, 2) == [
        *[*entered(0, "INACTIVE", None), *left(0, "INACTIVE", None)],
        *[*entered(1, "INACTIVE", None), *left(1, "INACTIVE", None)],
        *[*entered(2, "ACTIVE", 1), function(2, 1), ("completion", 2, "ACTIVE", 1, None)],
    ]
    for slot in range(3):
        for message in job[slot].said("plug-in"):
            if message["name"] != "function":
                assert message["main"] == (message["name"] != "abort")


# ---- failures


FAILURES: Failures = {
    (0, 1, "initialize", 1): KeyError,
    (1, 1, "health_check", 1): KeyError,
    (2, 1, "abort", 1): KeyError,
    (3, 1, "health_check", 2): KeyError,  # after the function: this one ends its rank
    (4, 2, "finalize", 1): RestartAbort,
    (5, 3, "initialize", 1): RestartAbort,
    (6, 0, "completion", 1): KeyError,
}


def fails_in_plug_ins(rank: Rank) -> Any:
    """In iterations 2 to 4 slot 0 fails when told to, and then something else does."""

    @Wrapper(**with_all(rank, FAILURES))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        n = call_wrapper.iteration
        kinds = [[record.rank, record.interruption.name] for record in call_wrapper.faults]
        rank.say("in", n=n, world=os.environ["WORLD_SIZE"], faults=kinds)
        if n == 6:
            return [n, os.environ["WORLD_SIZE"], kinds]
        if 2 <= n <= 4 and rank.slot == 0:
            rank.hear()
            raise ValueError
        return rank.hang()

    return train()


def test_what_a_failure_of_a_plug_in_means(job: Job) -> None:
    job.start(5, fails_in_plug_ins)
    own, of_slot_1 = [0, "EXCEPTION"], [1, "EXCEPTION"]
    # What ended the iteration before; a rank that leaves between two iterations is not in the next one.
    entered: list[tuple[int, tuple[int, ...], str, list[list[Any]]]] = [
        (2, (0, 1, 2, 3, 4), "5", [of_slot_1]),
        (3, (0, 1, 2, 3, 4), "5", [own]),
        (4, (0, 2, 3, 4), "4", [own, [1, "BASE_EXCEPTION"]]),
    ]
    for n, slots, world, faults in entered:
        for said in job.expect("in", *slots, n=n, world=world):
            assert sorted(said["faults"]) == faults
        job.tell("raise", 0)
    job.wait_for_end()
    assert job[0].value == job[4].value == [6, "2", [[1, "BASE_EXCEPTION"]]]
    assert [job[slot].error for slot in (1, 2, 3)] == ["HealthCheckError", "RestartAbort", "RestartAbort"]
    assert "told to" in job[1].text
    for slot in (1, 2, 3):
        terminated = [m for m in job[slot].said("plug-in") if m["name"] == "terminate"]
        assert [m["mode"] for m in terminated] == ["TERMINATED"]
    for slot, failed in ((1, "abort"), (1, "health check"), (0, "completion")):
        assert f"{failed} failed" in job[slot].log and "told to" in job[slot].log


class FailsAt(RankAssignment):
    """Raises from an iteration on."""

    def __init__(self, n: float) -> None:
        self.n = n

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        if ctx.state.iteration >= self.n:
            raise KeyError("no rank")
        return ctx


def has_a_failing_assignment(rank: Rank) -> Any:
    """Slot 2's fails at the begin, slot 1's at the restart after the one that this causes."""
    fails = FailsAt([float("inf"), 2, 0][rank.slot])

    @Wrapper(**with_all(rank, rank_assignment=Compose(ActivateAllRanks(), ShiftRanks(), fails)))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        if os.environ["WORLD_SIZE"] == "1":
            return [call_wrapper.iteration, os.environ["WORLD_SIZE"]]
        if (rank.slot, call_wrapper.iteration) == (0, 1):
            raise ValueError
        return rank.hang()

    return train()


def test_where_a_rank_assignment_fails_on_one_rank_the_others_go_on(job: Job) -> None:
    job.start(3, has_a_failing_assignment)
    job.wait_for_end()
    assert [job[slot].error for slot in (1, 2)] == ["KeyError"] * 2
    assert job[0].value == [3, "1"]


# ---- assignments that disagree


class Same(RankAssignment):
    """Gives all ranks the same place."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        ctx.state.active_rank = 0
        return ctx


def disagrees(rank: Rank) -> Any:
    @Wrapper(**with_all(rank, rank_assignment=Compose(Same(), ActivateAllRanks(), ShiftRanks())))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        if call_wrapper.iteration == 0:
            rank.hang()
        return [os.environ["RANK"]]

    return train()


def test_a_rank_assignment_that_disagrees_is_named(job: Job) -> None:
    job.start(2, disagrees)
    job.wait_for_end()
    raised = [message for process in job.ranks.values() for message in process.said("raised")]
    assert raised and all("rank_assignment" in message["text"] for message in raised)
    assert {message["error"] for message in raised} == {"InternalError"}


def test_what_no_rank_assignment_may_return_is_named() -> None:
    with pytest.raises(InternalError, match="must return the RankAssignmentCtx that it got; it gave None"):
        activate_if_unsaid(None, 0, 2)
    for size, mode in ((2, Mode.TERMINATED), (None, Mode.ACTIVE), (0, Mode.ACTIVE), (3, Mode.ACTIVE)):
        with pytest.raises(InternalError, match="rank_assignment"):
            check_assigned(State(0, 2, active_rank=0, active_world_size=size, mode=mode))


def test_a_rank_assignment_that_says_nothing_makes_all_ranks_active() -> None:
    for terminated, rank in ((set(), 2), ({1}, 1)):
        ctx = RankAssignmentCtx(State(2, 3), FakeStore(), terminated)
        state = activate_if_unsaid(ctx, 2, 3)
        world_size = 3 - len(terminated)
        assert (state.rank, state.world_size, state.mode) == (rank, world_size, Mode.ACTIVE)
        assert (state.active_rank, state.active_world_size) == (rank, world_size)
