"""What a user's code may do: raise the interruption itself, say nothing in a plug-in, handle signals."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import torch
from rank_harness import SETTINGS, Job, Rank, with_limits

from ft_wrapper import CallWrapper, FrozenState, Wrapper, health_check
from ft_wrapper.exception import JobAbort, RankShouldRestart
from ft_wrapper.restart import call, loop
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


# ---- a spare whose health check fails


def has_a_health_check(rank: Rank) -> Any:
    def check(state: FrozenState) -> None:
        if rank.slot == 2:
            raise OSError("told to")

    @Wrapper(**with_limits(**SETTINGS, health_check=check, active_world_size=2))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        return [call_wrapper.iteration, os.environ["WORLD_SIZE"], len(call_wrapper.faults)]

    return train()


def test_it_ends_the_spare_alone(job: Job) -> None:
    job.start(3, has_a_health_check)
    # The spare's monitor thread waits for the iteration's end, which the spare does not bring about.
    job.wait_for_end(leftovers=False)
    assert job[2].error == "HealthCheckError"
    assert [job[slot].value for slot in (0, 1)] == [[0, "2", 0]] * 2


# ---- signal handlers that raise


class Signalled(Exception):
    pass


def _raise(signum: int, frame: Any) -> None:
    raise Signalled("a worker was killed")


def signal_before(owner: Any, name: str, signum: signal.Signals, condition: Callable[..., bool]) -> None:
    """Has a method of the wrapper's send this process a signal before it begins, if a condition holds."""
    method = getattr(owner, name)

    def signalled(self: Any, *args: Any) -> Any:
        if condition(self):
            os.kill(os.getpid(), signum)
        return method(self, *args)

    setattr(owner, name, signalled)


def is_signalled(rank: Rank) -> Any:
    """A signal whose handler raises an `Exception` comes in the wrapper's own code.

    Between two iterations, then while slot 1 gets its rank, then while it waits for the others in the end.
    """
    if rank.slot == 1:
        signal_before(call.Call, "apply_state", signal.SIGCHLD, lambda self: self.own.member.view.n == 1)
        signal_before(loop.Membership, "await_completion", signal.SIGCHLD, lambda self: True)

    def finalize(state: FrozenState) -> None:
        if (rank.slot, state.iteration) == (1, 0):
            os.kill(os.getpid(), signal.SIGCHLD)

    previous = signal.getsignal(signal.SIGCHLD)

    @Wrapper(**SETTINGS, finalize=finalize)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        if call_wrapper.iteration < 2:
            signal.signal(signal.SIGCHLD, _raise)  # as torch does for a DataLoader
            rank.say("in", n=call_wrapper.iteration)
            if call_wrapper.iteration == 0 and rank.slot == 0:
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


def test_what_a_handler_raises_in_the_wrappers_own_code_throws_nobody_out(job: Job) -> None:
    job.start(2, is_signalled)
    job.expect("in", 0, 1, n=0)
    job.tell("fail", 0)
    # What came before an iteration was over is of no interest; before the function was entered it is a fault.
    assert job.wait() == [[2, "2", [[1, "EXCEPTION"]]]] * 2
    assert "a worker was killed" in job[1].log


def is_interrupted(rank: Rank) -> Any:
    if rank.slot == 1:
        signal_before(loop.Membership, "await_completion", signal.SIGINT, lambda self: True)

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
    os.close(0)  # what the monitor is given must not be lost if it has this number
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
