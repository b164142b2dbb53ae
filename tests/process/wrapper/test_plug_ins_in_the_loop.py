"""When the plug-ins run, with which states, and what their failures mean."""

from __future__ import annotations

import functools
import os
import threading
from datetime import timedelta
from typing import Any

import pytest
from rank_harness import SETTINGS, Job, Rank

from ft_wrapper import CallWrapper, Compose, FrozenState, Mode, Wrapper
from ft_wrapper.abort import Abort, AbortTorchDistributed
from ft_wrapper.completion import Completion
from ft_wrapper.exception import RestartAbort
from ft_wrapper.finalize import Finalize
from ft_wrapper.health_check import HealthCheck
from ft_wrapper.initialize import Initialize
from ft_wrapper.rank_assignment import (
    ActivateAllRanks,
    Layer,
    LayerFlag,
    RankAssignment,
    RankAssignmentCtx,
    ShiftRanks,
    Tree,
)
from ft_wrapper.terminate import Terminate

PLACES = ("initialize", "health_check", "abort", "finalize", "completion", "terminate")


class Noted(Initialize, HealthCheck, Abort, Finalize, Completion, Terminate):
    """Any plug-in: says that it runs, and with which state; raises when told to."""

    def __init__(self, rank: Rank, place: str, fails: Any = None) -> None:
        self.rank, self.place, self.fails = rank, place, fails
        self.calls = 0

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
        self.calls += 1
        if self.fails is not None and self.fails[0] == self.place and self.calls == self.fails[1]:
            raise {"Exception": KeyError, "BaseException": RestartAbort}[self.fails[2]]("told to")
        return state


def with_all(rank: Rank, fails: Any = None, **more: Any) -> dict[str, Any]:
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


def fails_in(rank: Rank, place: str, call: int, kind: str) -> Any:
    @Wrapper(**with_all(rank, (place, call, kind) if rank.slot == 1 else None))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        if call_wrapper.iteration == 0:
            if place not in ("initialize", "health_check") or call > 1:
                if rank.slot == 0:
                    rank.hear()  # that the other one is in
                    raise ValueError
                rank.say("in")
            elif place == "initialize" and rank.slot == 0:
                rank.hang()
            if place == "terminate" and rank.slot == 1:
                raise SystemExit(4)
            rank.hang()
        kinds = [record.interruption.name for record in call_wrapper.faults]
        return [call_wrapper.iteration, os.environ["WORLD_SIZE"], kinds]

    return train()


@pytest.mark.parametrize(
    ("place", "call", "kind", "ends_with", "others"),
    [
        ("initialize", 1, "Exception", None, [1, "2", ["EXCEPTION"]]),
        ("initialize", 1, "BaseException", "RestartAbort", [1, "1", ["BASE_EXCEPTION"]]),
        ("health_check", 1, "Exception", None, [1, "2", ["EXCEPTION"]]),
        ("health_check", 2, "Exception", "HealthCheckError", None),
        ("abort", 1, "Exception", None, [1, "2", ["EXCEPTION"]]),
        ("finalize", 1, "BaseException", "RestartAbort", None),
        ("completion", 1, "Exception", None, [1, "2", ["EXCEPTION"]]),
    ],
)
def test_what_a_failure_means(
    job: Job, place: str, call: int, kind: str, ends_with: str | None, others: list[Any] | None
) -> None:
    job.start(2, fails_in, place, call, kind)
    if place not in ("initialize", "health_check") or call > 1:
        job.expect("in", 1)
        job.tell("raise", 0)
    job.wait_for_end()
    if others is None:  # it left between iterations, and the decision was made without it
        n, world, kinds = job[0].value
        assert (n, world) == (1, "1")
        assert set(kinds) == {"EXCEPTION", "BASE_EXCEPTION"}
    else:
        assert job[0].value == others
    if ends_with is None:
        assert job[1].value == others
    else:
        assert job[1].error == ends_with
        terminated = [m for m in job[1].said("plug-in") if m["name"] == "terminate"]
        assert [m["mode"] for m in terminated] == ["TERMINATED"]
    if ends_with == "HealthCheckError":
        assert "told to" in job[1].text
    if place in ("abort", "completion", "health_check"):
        assert f"{place.replace('_', ' ')} failed" in job[1].log
        assert "told to" in job[1].log


class FailsOn(RankAssignment):
    """Raises at a restart, on some ranks."""

    def __init__(self, fails: bool, first: bool) -> None:
        self.fails, self.first = fails, first

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        if self.fails and (self.first or ctx.state.iteration > 0):
            raise KeyError("no rank")
        return ctx


def has_a_failing_assignment(rank: Rank, first: bool) -> Any:
    assignment = Compose(ActivateAllRanks(), ShiftRanks(), FailsOn(rank.slot == 1, first))

    @Wrapper(**with_all(rank, rank_assignment=assignment))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        if os.environ["WORLD_SIZE"] == "2":
            if call_wrapper.iteration == 0 and rank.slot == 0 and not first:
                raise ValueError
            rank.hang()
        return [call_wrapper.iteration, os.environ["WORLD_SIZE"]]

    return train()


@pytest.mark.parametrize("first", [True, False])
def test_where_a_rank_assignment_fails_on_one_rank_the_others_go_on(job: Job, first: bool) -> None:
    job.start(2, has_a_failing_assignment, first)
    job.wait_for_end()
    assert job[1].error == "KeyError"
    assert job[0].value == [1 if first else 2, "1"]


# ---- the ready ones, in a job


def lives_in_a_tree(rank: Rank) -> Any:
    tree = Tree(
        [
            Layer(min_ranks=2, max_ranks=2, flag=LayerFlag.RESERVE),
            Layer(
                min_ranks=2,
                max_ranks=2,
                key_or_fn=lambda state: f"node {state.initial_rank // 3}",
                flag=LayerFlag.RESERVE,
            ),
        ]
    )

    @Wrapper(**with_all(rank, rank_assignment=tree))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        n, state = call_wrapper.iteration, call_wrapper.state
        rank.say("in", n=n)
        if n < 3:
            if rank.hear() == "fail":
                raise SystemExit(1)
            raise AssertionError
        assert state.active_rank == int(os.environ["RANK"])
        return [n, state.active_rank, state.active_world_size, state.world_size, state.mode == Mode.ACTIVE]

    return train()


def test_a_tree_with_two_layers_of_reserve(job: Job) -> None:
    # Nodes of three ranks: 0-2 and 3-5. Two ranks are active.
    job.start(6, lives_in_a_tree)
    job.expect("in", 0, 1, n=0)
    job.tell("fail", 0)
    job.expect("in", 1, 2, n=1)  # the reserve of its own node takes over
    job.tell("fail", 1)
    job.expect("in", 4, 5, n=2)  # the node has too few ranks left: slot 2 goes with it
    job.wait_for_end(2)
    assert job[2].error == "RankDiscarded"
    job.tell("fail", 4)
    job.wait_for_end()
    assert sorted([job[3].value, job[5].value]) == [[3, 0, 2, 2, True], [3, 1, 2, 2, True]]
    for slot in (0, 1, 2, 4):
        assert [m["mode"] for m in job[slot].said("plug-in") if m["name"] == "terminate"] == ["TERMINATED"]


class Disagrees(RankAssignment):
    """Gives all ranks the same place, or each its own world."""

    def __init__(self, rank: Rank, what: str) -> None:
        self.rank, self.what = rank, what

    def __call__(self, ctx: RankAssignmentCtx) -> Any:
        if self.what == "nothing":
            return None
        if self.what == "rank":
            ctx.state.active_rank = 0
        elif self.what == "size":
            ctx.state.active_world_size = 1 + (self.rank.slot + ctx.state.iteration) % 2
        elif self.what == "more than there are":
            ctx.state.active_world_size = 3
        elif self.what == "mode":
            ctx.state.mode = Mode.TERMINATED
        return ctx


def disagrees(rank: Rank, what: str) -> Any:
    disagreeing = Disagrees(rank, what)
    assignment: Any = Compose(disagreeing, ActivateAllRanks(), ShiftRanks())
    if what == "nothing":
        assignment = disagreeing

    @Wrapper(**with_all(rank, rank_assignment=assignment))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        if call_wrapper.iteration == 0:
            rank.hang()
        return [os.environ["RANK"]]

    return train()


@pytest.mark.parametrize("what", ["rank", "size", "more than there are", "mode", "nothing"])
def test_a_rank_assignment_that_disagrees_is_named(job: Job, what: str) -> None:
    job.start(2, disagrees, what)
    job.wait_for_end()
    texts = [message["text"] for process in job.ranks.values() for message in process.said("raised")]
    assert texts
    errors = {message["error"] for process in job.ranks.values() for message in process.said("raised")}
    assert errors == {"InternalError"}
    nothing = "rank_assignment must return the RankAssignmentCtx that it got; it gave None"
    for text in texts:
        assert text == nothing if what == "nothing" else "rank_assignment" in text


# ---- plain callables in their place


def plain_functions(rank: Rank) -> Any:
    class Method:
        def note(self, place: str, state: FrozenState) -> None:
            rank.say("plug-in", name=place, n=state.iteration)

    def assign(ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        rank.say("plug-in", name="rank_assignment", n=ctx.state.iteration)
        return ctx

    # Of each kind one: a lambda, a partial, a function composed with a plug-in.
    note = Method().note
    plug_ins: dict[str, Any] = {place: functools.partial(note, place) for place in PLACES}
    plug_ins["finalize"] = lambda state: note("finalize", state)
    plug_ins["abort"] = Compose(plug_ins["abort"], AbortTorchDistributed())

    @Wrapper(**SETTINGS, **plug_ins, rank_assignment=Compose(ActivateAllRanks(), assign))
    def train(call_wrapper: CallWrapper) -> int:
        if call_wrapper.iteration == 0:
            call_wrapper.store.barrier([int(os.environ["RANK"])], "both are in", 2, timedelta(minutes=1))
            raise ValueError
        return call_wrapper.iteration

    return train()


def test_plain_functions_run_where_plug_ins_do(job: Job) -> None:
    job.start(2, plain_functions)
    assert job.wait() == [1, 1]
    for slot in range(2):
        seen = [(message["name"], message["n"]) for message in job[slot].said("plug-in")]
        entered = ["rank_assignment", "initialize", "health_check"]
        assert [name for name, n in seen if n == 0][:3] == entered
        assert sorted({name for name, n in seen}) == sorted({*PLACES, "rank_assignment"} - {"terminate"})
        assert seen[-1] == ("completion", 1)
