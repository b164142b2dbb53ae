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
from ft_wrapper.health_check import HealthCheck
from ft_wrapper.rank_assignment import RankAssignment, RankAssignmentCtx, ShiftRanks
from ft_wrapper.restart import call, loop
from ft_wrapper.state import State
from ft_wrapper.store import TCPStore

# ---- RankShouldRestart, raised by the function itself


def raises_the_interruption(rank: Rank) -> Any:
    settings = {"max_same_faults": 2, "soft_timeout": 100.0, "hard_timeout": 110.0, "barrier_timeout": 200.0}

    @Wrapper(**with_limits(**{**SETTINGS, **settings}))
    def train() -> None:
        if rank.slot == 1:
            raise RankShouldRestart("I want all of this again")
        rank.train()

    return train()


def test_it_never_leaves_the_call(job: Job) -> None:
    """It restarts at once, within the tests' patience, which is shorter than two soft timeouts."""
    job.start(2, raises_the_interruption)
    job.wait_for_end()
    assert [process.error for process in job.ranks.values()] == ["JobEnded", "RestartAbort"]
    assert "RankShouldRestart at test_user_code.py" in job[1].text
    assert "I want all of this again" in "".join(process.log for process in job.ranks.values())


# ---- children that the function forks


class OfTheRank(Exception):
    """What a child must not see."""


ENDS: list[tuple[BaseException | None, int]] = [
    (None, 0),
    (SystemExit(None), 0),
    (SystemExit(3), 3),
    (SystemExit("words"), 1),
    (ValueError("in the child"), 1),
    (KeyboardInterrupt(), 1),
    (RankShouldRestart("I want it again"), 1),
    (JobAbort("in the child"), 1),
]


def forks(rank: Rank) -> Any:
    """Forks a child for each way to end, which leaves the function by it, behind a block of its own."""

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        codes = []
        for error, _ in ENDS if rank.slot == 1 else ():
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(OfTheRank), call_wrapper.atomic():
                    raise OfTheRank
                if error is None:
                    return ["as the rank"]
                raise error
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return [call_wrapper.iteration, codes]

    return train()


def test_a_forked_child_is_not_the_rank(job: Job) -> None:
    job.start(2, forks)
    assert job.wait() == [[0, []], [0, [code for _, code in ENDS]]]
    assert "ValueError: in the child" in job[1].log


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


@pytest.mark.parametrize("assignment", ["unchanged", *at_night("another one runs always", ["shifts"])])
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


def test_one_that_still_fails_after_that_ends_its_rank(job: Job) -> None:
    job.start(2, has_a_health_check, 1, [0, 1])
    job.tell("go on", 0)
    job.wait_for_end()
    assert job[1].error == "HealthCheckError" and "told to" in job[1].text
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

    def signal_itself(state: FrozenState) -> None:
        """In the wrapper's own code, as seen from the function: between leaving and entering it."""
        if rank.slot == 1 and place == "between two iterations":
            os.kill(os.getpid(), signal.SIGCHLD)

    previous = signal.getsignal(signal.SIGCHLD)

    @Wrapper(**SETTINGS, finalize=signal_itself)
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


def test_cuda_before_the_call_has_the_monitor_started_by_exec(job: Job) -> None:
    job.start(2, has_used_cuda)
    job.expect("trains")
    for rank in job.ranks.values():
        (monitor,) = psutil.Process(rank.pid).children()
        assert "ft_wrapper.monitor.beside" in " ".join(monitor.cmdline())
    job.kill(1)
    assert job.wait(killed=(1,)) == [[2, 1]]


def test_cuda_before_the_call_with_a_store_that_cannot_be_sent(job: Job) -> None:
    job.start(1, has_used_cuda, "own")
    job.wait_for_end()
    assert job[0].error == "RuntimeError"
    assert "CUDA is already initialized" in job[0].text and "at the top of a module" in job[0].text
