"""What a user's code may do: raise the interruption itself, say nothing in a plug-in, handle signals."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import psutil
import pytest
import torch
from rank_harness import SETTINGS, Job, Rank, with_limits
from support.nightly import at_night

from ft_wrapper import CallWrapper, FrozenState, Wrapper, health_check
from ft_wrapper.exception import JobAbort, RankShouldRestart
from ft_wrapper.finalize import Finalize
from ft_wrapper.health_check import HealthCheck
from ft_wrapper.rank_assignment import RankAssignment, RankAssignmentCtx, ShiftRanks
from ft_wrapper.restart import call, loop
from ft_wrapper.state import State
from ft_wrapper.store import TCPStore

# ---- RankShouldRestart, raised by the function itself


def raises_the_interruption(rank: Rank, **settings: Any) -> Any:
    long = {"soft_timeout": 100.0, "hard_timeout": 110.0, "barrier_timeout": 200.0}

    @Wrapper(**with_limits(**{**SETTINGS, **long, **settings}))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        if call_wrapper.iteration < 2 or settings:
            if rank.slot == 1:
                raise RankShouldRestart("I want all of this again")
            rank.train()
        return [call_wrapper.iteration, [record.rank for record in call_wrapper.faults]]

    return train()


def test_a_function_that_raises_it_restarts_at_once(job: Job) -> None:
    """Within the tests' patience, which is shorter than two soft timeouts."""
    job.start(3, raises_the_interruption)
    assert job.wait() == [[2, [1]]] * 3
    assert "I want all of this again" in "".join(process.log for process in job.ranks.values())


def test_it_never_leaves_the_call(job: Job) -> None:
    job.start(2, raises_the_interruption, max_same_faults=2)
    job.wait_for_end()
    assert [process.error for process in job.ranks.values()] == ["JobEnded", "RestartAbort"]
    assert "RankShouldRestart at test_user_code.py" in job[1].text


# ---- children that the function forks


def forks(rank: Rank, end: str, nested: bool) -> Any:
    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        codes = []
        if rank.slot == 1 and call_wrapper.iteration == 0:
            pid = os.fork()
            if pid == 0 and nested:
                with contextlib.suppress(ValueError), call_wrapper.atomic():
                    raise ValueError("for the child alone")
            if pid == 0:
                if end == "returns":
                    return ["as the rank"]
                raise {
                    "exits": SystemExit(None),
                    "exits with 3": SystemExit(3),
                    "exits with words": SystemExit("words"),
                    "raises": ValueError("in the child"),
                    "is interrupted": KeyboardInterrupt(),
                    "restarts": RankShouldRestart("I want it again"),
                    "gives up": JobAbort("in the child"),
                }[end]
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return [call_wrapper.iteration, codes]

    return train()


FORKED = {"returns": 0, "exits": 0, "exits with 3": 3, "gives up": 1}


@pytest.mark.parametrize("nested", [False, *at_night("one child runs always", [True])])
@pytest.mark.parametrize("end", ["returns", "exits", "exits with 3", "exits with words", "raises"])
def test_a_forked_child_is_not_the_rank(job: Job, end: str, nested: bool) -> None:
    job.start(2, forks, end, nested)
    assert job.wait() == [[0, []], [0, [FORKED.get(end, 1)]]]
    assert ("in the child" in job[1].log) == (end == "raises")


@pytest.mark.parametrize("end", ["is interrupted", "restarts", "gives up"])
def test_a_forked_child_that_raises_what_ends_a_rank_ends_alone(job: Job, end: str) -> None:
    job.start(2, forks, end, False)
    assert job.wait() == [[0, []], [0, [1]]]


# ---- a rank assignment that says nothing


class Unchanged(RankAssignment):
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        return ctx


def has_an_assignment(rank: Rank, assignment: str) -> Any:
    plug_in = {"unchanged": Unchanged(), "shifts": ShiftRanks()}[assignment]

    @Wrapper(**SETTINGS, rank_assignment=plug_in)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        state = call_wrapper.state
        if call_wrapper.iteration == 0:
            if rank.slot == 0:
                raise ValueError
            rank.train()
        if call_wrapper.iteration == 1:
            if rank.slot == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            rank.train()
        return [os.environ["RANK"], os.environ["WORLD_SIZE"], state.mode.name, state.rank, state.world_size]

    return train()


@pytest.mark.parametrize("assignment", ["unchanged", "shifts"])
def test_a_rank_assignment_that_says_nothing_of_it_makes_all_ranks_active(job: Job, assignment: str) -> None:
    job.start(3, has_an_assignment, assignment)
    job.wait_for_end()
    assert job[0].value == ["0", "2", "ACTIVE", 0, 2]
    assert job[2].value == ["1", "2", "ACTIVE", 1, 2]


# ---- health checks that fail


class FailsAt(HealthCheck):
    """Fails in some of its calls: 0 is before the first entry, 1 before the second one, or after a fault."""

    def __init__(self, calls: list[int]) -> None:
        self.calls, self.count = calls, 0

    def __call__(self, state: FrozenState) -> FrozenState:
        self.count += 1
        if self.count - 1 in self.calls:
            raise OSError("told to")
        return state


def has_a_health_check(rank: Rank, slot: int, calls: list[int], **settings: Any) -> Any:
    check = FailsAt(calls if rank.slot == slot else [])

    @Wrapper(**with_limits(**{**SETTINGS, **settings}, health_check=check))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        if call_wrapper.iteration == 0 and 1 in calls:
            rank.hear()
            if rank.slot == 0:
                raise ValueError
        kinds = [record.interruption.name for record in call_wrapper.faults]
        return [call_wrapper.iteration, os.environ["WORLD_SIZE"], kinds]

    return train()


def test_one_that_fails_before_an_entry_is_a_fault_and_asked_again(job: Job) -> None:
    """What was a moment's failure costs a restart, and no rank."""
    job.start(2, has_a_health_check, 1, [0])
    assert job.wait() == [[1, "2", ["EXCEPTION"]]] * 2
    assert "health check failed on rank 1" in job[1].log


def test_one_that_still_fails_after_that_ends_its_rank(job: Job) -> None:
    job.start(2, has_a_health_check, 1, [0, 1])
    job.tell("go on", 0)
    job.wait_for_end()
    assert job[1].error == "HealthCheckError" and "told to" in job[1].text
    assert job[0].value[:2] == [1, "1"]


def test_one_that_fails_after_a_fault_ends_its_rank(job: Job) -> None:
    job.start(2, has_a_health_check, 1, [1])
    job.tell("go on")
    job.wait_for_end()
    assert job[1].error == "HealthCheckError"
    assert job[0].value[:2] == [1, "1"]


def test_a_spares_that_fails_ends_the_spare_alone(job: Job) -> None:
    job.start(3, has_a_health_check, 2, [0], active_world_size=2)
    # The spare's monitor thread waits for the iteration's end, which the spare does not bring about.
    job.wait_for_end(leftovers=False)
    assert job[2].error == "HealthCheckError"
    assert [job[slot].value for slot in (0, 1)] == [[0, "2", []]] * 2


# ---- signal handlers that raise


class Signalled(Exception):
    pass


def _raise(signum: int, frame: Any) -> None:
    raise Signalled("a worker was killed")


class SignalsItself(Finalize):
    """In the wrapper's own code, as seen from the function: between leaving and entering it."""

    def __call__(self, state: FrozenState) -> FrozenState:
        os.kill(os.getpid(), signal.SIGCHLD)
        return state


def is_signalled(rank: Rank, place: str) -> Any:
    """A signal whose handler raises an `Exception` comes at some place of the wrapper's own."""
    if rank.slot == 1 and place == "while it gets its rank":
        take = call.Call.apply_state

        def take_signalled(self: call.Call, state: State) -> bool:
            if self.own.member.view.n == 1:
                os.kill(os.getpid(), signal.SIGCHLD)
            return take(self, state)

        call.Call.apply_state = take_signalled  # type: ignore[method-assign]
    if rank.slot == 1 and place == "while it waits for the others":
        await_completion = loop.Membership.await_completion

        def signalled(self: loop.Membership, *args: Any) -> str:
            os.kill(os.getpid(), signal.SIGCHLD)
            return await_completion(self, *args)

        loop.Membership.await_completion = signalled  # type: ignore[method-assign]
    finalize = SignalsItself() if rank.slot == 1 and place == "between two iterations" else None
    previous = signal.getsignal(signal.SIGCHLD)

    @Wrapper(**SETTINGS, finalize=finalize)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        if call_wrapper.iteration == 0:
            signal.signal(signal.SIGCHLD, _raise)  # as torch does for a DataLoader
            rank.say("in")
            if rank.slot == 0:
                rank.hear()
                raise ValueError
            rank.train()
        assert signal.getsignal(signal.SIGCHLD) is _raise
        kinds = [(record.rank, record.interruption.name) for record in call_wrapper.faults]
        return [call_wrapper.iteration, os.environ["WORLD_SIZE"], kinds]

    try:
        return train()
    finally:
        assert signal.getsignal(signal.SIGCHLD) is _raise
        signal.signal(signal.SIGCHLD, previous)


@pytest.mark.parametrize(
    ("place", "iteration", "slot"),
    [
        ("between two iterations", 1, 0),
        ("while it gets its rank", 2, 1),
        ("while it waits for the others", 1, 0),
    ],
)
def test_what_a_handler_raises_in_the_wrappers_own_code_throws_nobody_out(
    job: Job, place: str, iteration: int, slot: int
) -> None:
    job.start(2, is_signalled, place)
    job.expect("in", 0, 1)
    job.tell("fail", 0)
    assert job.wait() == [[iteration, "2", [[slot, "EXCEPTION"]]]] * 2
    assert "a worker was killed" in job[1].log


def is_interrupted(rank: Rank) -> Any:
    if rank.slot == 1:
        await_completion = loop.Membership.await_completion

        def signalled(self: loop.Membership, *args: Any) -> str:
            os.kill(os.getpid(), signal.SIGINT)
            return await_completion(self, *args)

        loop.Membership.await_completion = signalled  # type: ignore[method-assign]

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        return [call_wrapper.iteration, os.environ["WORLD_SIZE"]]

    return train()


def test_ctrl_c_is_kept_from_nobody(job: Job) -> None:
    job.start(2, is_interrupted)
    job.wait_for_end()
    assert job[1].error == "KeyboardInterrupt"
    assert job[0].value == [1, "1"]


# ---- call_wrapper, without an annotation


def fills_in_by_name(rank: Rank) -> Any:
    def default(value: int, call_wrapper=None) -> Any:  # type: ignore[no-untyped-def]
        return type(call_wrapper).__name__

    def plain(call_wrapper, value: int) -> Any:  # type: ignore[no-untyped-def]
        return type(call_wrapper).__name__

    def another_is_annotated(value: int, call_wrapper=None, mine: CallWrapper | None = None) -> Any:  # type: ignore[no-untyped-def]
        return [call_wrapper, type(mine).__name__]

    def annotated_otherwise(value: int, call_wrapper: str = "mine") -> Any:
        return call_wrapper

    def more(value: int, **call_wrapper: int) -> Any:
        return call_wrapper

    functions = (default, plain, another_is_annotated, annotated_otherwise, more)
    return [Wrapper(**SETTINGS)(function)(value=1) for function in functions]  # type: ignore[operator]


@pytest.mark.tcp_only("it is about the arguments; no restart")
def test_call_wrapper_without_an_annotation_is_filled_in_by_its_name(job: Job) -> None:
    job.start(1, fills_in_by_name)
    assert job.wait() == [["CallWrapper", "CallWrapper", [None, "CallWrapper"], "mine", {}]]


# ---- CUDA


def has_a_broken_context(rank: Rank) -> list[Any]:
    """Slot 1's GPU fails for good, as after a device-side assert."""

    def fail(device: int) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        if call_wrapper.iteration == 0 and rank.slot == 1:
            torch.cuda.is_initialized = lambda: True
            health_check.cuda_device = lambda: 0
            torch.cuda.synchronize = fail
            fail(0)
        if call_wrapper.iteration == 0:
            rank.train()
        return [call_wrapper.iteration, call_wrapper.state.world_size]

    return train()


def test_a_rank_whose_cuda_context_is_broken_leaves(job: Job) -> None:
    job.start(2, has_a_broken_context)
    job.wait_for_end()
    assert job[0].value == [1, 1]
    assert job[1].error == "HealthCheckError" and "device-side assert" in job[1].text


def has_used_cuda(rank: Rank, store: str = "") -> list[Any]:
    """A restart, and a process that is killed, in ranks that say they use CUDA; slot 0's monitor hosts."""
    torch.cuda.is_initialized = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = lambda device: None
    settings = dict(SETTINGS)
    if store:
        settings["store_factory"] = lambda: TCPStore("127.0.0.1", 1)

    @Wrapper(**with_limits(**settings))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        iteration, state = call_wrapper.iteration, call_wrapper.state
        if iteration == 0 and rank.slot == 1:
            raise ValueError("as planned")
        if iteration == 1:
            rank.say("trains")
            rank.train()
        return [iteration, state.world_size]

    return train()


@pytest.mark.tcp_only("the monitor hosts the store")
def test_cuda_before_the_call_has_the_monitor_started_by_exec(job: Job) -> None:
    job.start(3, has_used_cuda)
    job.expect("trains")
    for rank in job.ranks.values():
        (monitor,) = psutil.Process(rank.pid).children()
        assert "ft_wrapper.monitor.beside" in " ".join(monitor.cmdline())
    job.kill(2)
    assert job.wait(killed=(2,)) == [[2, 2]] * 2


@pytest.mark.tcp_only("no store is used")
def test_cuda_before_the_call_with_a_store_that_cannot_be_sent(job: Job) -> None:
    job.start(1, has_used_cuda, "own")
    job.wait_for_end()
    assert job[0].error == "RuntimeError"
    assert "CUDA is already initialized" in job[0].text and "at the top of a module" in job[0].text
