"""Spares warm up while they wait: once in a process, and no longer than they are left alone."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_harness import SETTINGS, TIMEOUT, Job, Rank, with_limits

from ft_wrapper import CallWrapper, Wrapper
from ft_wrapper.protocol.operations import read
from ft_wrapper.restart import call
from ft_wrapper.testing import FakeStore
from ft_wrapper.torch_groups import warm_up as _warm_up

TWO_ACTIVE = {"active_world_size": 2}


class WarmUp:
    """Says when it runs; may do something then."""

    def __init__(self, rank: Rank, does: str = "nothing") -> None:
        self.rank, self.does, self.runs = rank, does, 0

    def __call__(self) -> None:
        self.runs += 1
        self.rank.say("warms", runs=self.runs)
        if self.does == "waits" or (self.does == "waits once" and self.runs == 1):
            self.rank.hang()
        if self.does == "trains":
            self.rank.train()
        if self.does == "raises":
            raise KeyError("told to")
        if self.does == "leaves":
            raise SystemExit(5)
        if self.does == "fails when interrupted" and self.runs == 1:
            try:
                self.rank.hang()
            except BaseException:
                raise ValueError from None


def at_once(rank: Rank, after: float = 0.0) -> None:
    """Without torch's own part; what is in its place says that all before it is done."""
    call._WARMS_UP_AFTER = after
    _warm_up.import_lazy_modules = lambda: None
    _warm_up._train = lambda: rank.say("warm")


def waits_for_its_turn(rank: Rank, does: dict[str, str], outside: list[int]) -> Any:
    """Two ranks train, the others wait, and do something then; slot 0 says when it ends."""
    own = does.get(str(rank.slot), "nothing")
    at_once(rank, 1000.0 if own == "soon" else 0.0)
    warm_up = False if own == "off" else WarmUp(rank, own)

    @Wrapper(**with_limits(**SETTINGS, **TWO_ACTIVE, warm_up=warm_up))
    def train(call_wrapper: CallWrapper) -> int:
        rank.say("in", n=call_wrapper.iteration)
        if os.environ["RANK"] == "0":
            rank.await_word()
        return call_wrapper.iteration

    if rank.slot not in outside:
        return train()
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.append(train()))
    thread.start()
    thread.join()
    return values[0]


# ---- who warms up, and when


def calls_thrice(rank: Rank) -> Any:
    at_once(rank)
    made = [WarmUp(rank) for _ in range(2)]
    for n in range(3):
        _warm_up._train = functools.partial(rank.say, "warm", n=n)

        @Wrapper(**with_limits(**{**SETTINGS, **TWO_ACTIVE, "rejoin": True}, warm_up=made[n % 2]))
        def train(word: str) -> None:
            if rank.slot == 0:
                assert rank.hear() == word

        train(str(n))
    return [each.runs for each in made]


def test_each_function_runs_once_in_a_process_over_calls(job: Job) -> None:
    with job.announced_store() as (_, address):
        job.start(3, calls_thrice, env={"FT_WRAPPER_STORE": address})
        for n in range(3):
            job.expect("warm", 2, n=n)
            job.tell(str(n), 0)
        assert job.wait() == [[0, 0], [0, 0], [1, 1]]


# ---- cut short, and failing


def test_spares_that_are_needed_leave_their_warm_up_and_so_they_do_at_the_end_of_the_call(job: Job) -> None:
    does = {
        2: "fails when interrupted",
        3: "waits once",
        4: "raises",
        5: "leaves",
        6: "waits",
        7: "trains",
        8: "off",
        9: "soon",
    }
    job.start(10, waits_for_its_turn, does, [7])
    job.expect("in", 0, 1, n=0)
    job.expect("warms", 2, 3, 4, 6, 7, runs=1)
    job.expect("warm", 4)
    job.wait_for_end(5, leftovers=False)  # its monitor thread stays until the others end the iteration
    assert job[5].code == 5 and not job[0].said("in")[1:], "a spare that leaves ends nothing"
    job.kill(1)
    job.expect("in", 0, 2, n=1)
    job.expect("warm", 3)  # which waits again, and begins again
    job.kill(2)
    job.expect("in", 0, 3, n=2)
    job.kill(3)
    job.expect("in", 0, 4, n=3)
    job.tell("finish", 0)
    job.forget(5)
    assert job.wait(killed=(1, 2, 3)) == [3, 3, *[None] * 4]
    assert [len(job[slot].said("warms")) for slot in (0, 1, 2, 3, 4, 8, 9)] == [0, 0, 1, 2, 1, 0, 0]
    assert [len(job[slot].said("warm")) for slot in (2, 3, 4, 8, 9)] == [0, 1, 1, 0, 0]
    assert job[4].log.count("warm_up failed") == job[4].log.count("KeyError: 'told to'") == 1
    for slot in (2, 3, 6, 7):
        assert "warm_up failed" not in job[slot].log and "leaves the job" not in job[slot].log


def imports_for_long(rank: Rank) -> Any:
    def imports() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # an import is not interrupted
        rank.say("imports")
        rank.hear()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())

    at_once(rank)
    _warm_up.import_lazy_modules = imports

    @Wrapper(**SETTINGS, **TWO_ACTIVE)
    def train(call_wrapper: CallWrapper) -> int:
        rank.say("in", n=call_wrapper.iteration)
        rank.await_word()
        if call_wrapper.iteration == 0:
            rank.hear()
            raise ValueError("told to")
        return call_wrapper.iteration

    return train()


def test_no_one_waits_for_a_spare_that_imports_until_it_is_needed(job: Job) -> None:
    job.start(3, imports_for_long)
    job.expect("imports", 2)
    job.tell("fail", 1)
    job.expect("in", 0, 1, n=1)
    job.kill(1)
    job.expect("in", 0, n=2)
    assert not job[2].said("in"), "it ends its imports before the function"
    job.tell("go on", 2)
    job.expect("in", 2, n=2)
    job.tell("finish", 0, 2)
    assert job.wait(killed=(1,)) == [2, 2]
    assert len(job[2].said("imports")) == 1


def hangs(rank: Rank) -> Any:
    at_once(rank)

    def warm_up() -> None:
        rank.say("warms")
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # as deaf as a call into C
        signal.sigwait([signal.SIGUSR1])

    settings = {**SETTINGS, **TWO_ACTIVE, "soft_timeout": 2.0, "hard_timeout": 3.0}

    @Wrapper(**with_limits(**settings, warm_up=warm_up))
    def train(call_wrapper: CallWrapper) -> int:
        rank.say("in", n=call_wrapper.iteration)
        while not rank.is_told():
            call_wrapper.ping()
            time.sleep(0.02)
        return call_wrapper.iteration

    return train()


def test_a_spare_that_hangs_in_it_is_ended_and_ends_no_iteration(job: Job) -> None:
    job.start(3, hangs)
    job.expect("warms", 2)
    job.wait_for_end(2, leftovers=False)
    job.tell("finish", 0, 1)
    assert job.wait(killed=(2,)) == [0, 0]
    assert [len(job[slot].said("in")) for slot in (0, 1)] == [1, 1]


# ---- what it does


def looks_at_itself(rank: Rank) -> Any:
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)

    def look() -> dict[str, Any]:
        return {
            "torch's numbers": torch.default_generator.get_state().tolist(),
            "Python's numbers": random.getstate(),
            "default dtype": torch.get_default_dtype(),
            "default device": torch.get_default_device(),
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "threads": (torch.get_num_threads(), os.listdir("/proc/self/task")),
            "environment": dict(os.environ),
        }

    before = look()
    _warm_up.warm_up(None, lambda: False)
    after = look()
    return [name for name in before if before[name] != after[name]], len(_warm_up._done)


def test_warming_torch_leaves_no_trace(job: Job) -> None:
    job.start(1, looks_at_itself)
    assert job.wait() == [[[], 2]]
    assert "failed" not in job[0].log


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a CUDA that is none was asked for; in use, and with NCCL, unless a test says otherwise."""
    said: list[str] = []
    tensor = SimpleNamespace(device="cuda")
    monkeypatch.setattr(_warm_up, "import_lazy_modules", lambda: None)
    monkeypatch.setattr(_warm_up, "_done", [_warm_up._train])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch, "ones", lambda size, device: said.append(f"{size} on {device}") or tensor)
    monkeypatch.setattr(torch.cuda.nccl, "all_reduce", lambda tensors: said.append(f"{tensors == (tensor,)}"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("synchronize"))
    return said


def test_nccl_reduces_once_on_its_own(reduced: list[str]) -> None:
    for _ in range(2):
        _warm_up.warm_up(None, lambda: False)
    assert reduced == ["1 on cuda", "True", "synchronize"]


@pytest.mark.parametrize(("module", "name"), [(torch.cuda, "is_initialized"), (dist, "is_nccl_available")])
def test_nccl_is_left_alone_where_cuda_is_not_in_use_or_there_is_none(
    reduced: list[str], monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    monkeypatch.setattr(module, name, lambda: False)
    _warm_up.warm_up(None, lambda: False)
    assert not reduced


def test_nccls_failure_is_logged_once_and_the_spare_waits(
    reduced: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(tensors: object) -> None:
        raise RuntimeError("NCCL Error 2: unhandled system error")

    monkeypatch.setattr(torch.cuda.nccl, "all_reduce", fails)
    for _ in range(2):
        _warm_up.warm_up(None, lambda: False)
    assert reduced == ["1 on cuda"]
    [record] = caplog.records
    assert "warming torch failed: this spare keeps waiting" in record.message


def test_what_comes_after_the_imports_waits_for_a_thread_that_starts_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread may have started, and still not have come to its first line."""
    order: list[str] = []
    late: list[threading.Thread] = []

    class Begun(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            late.pop().start()
            return super().wait(TIMEOUT)

    def put_off(what: str, work: Callable[[], object]) -> None:
        late.append(threading.Thread(target=work, daemon=True))

    monkeypatch.setattr(_warm_up, "_imports_begun", Begun())
    monkeypatch.setattr(_warm_up, "_imports_through", threading.Event())
    monkeypatch.setattr(_warm_up, "in_background", put_off)
    monkeypatch.setattr(_warm_up, "import_lazy_modules", lambda: order.append("imports"))
    monkeypatch.setattr(_warm_up, "_train", lambda: order.append("train"))
    monkeypatch.setattr(_warm_up, "_done", [])
    _warm_up.warm_up(None, lambda: False)
    assert order == ["imports", "train"]


# ---- a process in place of a lost one


class Cuda:
    """A CUDA that is none: eight devices, of which the process sees so many; this rank has number 3."""

    def __init__(self, patch: pytest.MonkeyPatch, sees: int = 8) -> None:
        self.made: list[str] = []
        self.operations: list[str] = []
        self.store = FakeStore()
        patch.setenv("LOCAL_RANK", "3")
        patch.setattr(torch.backends.cuda, "is_built", lambda: True)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: sees)
        patch.setattr(torch, "zeros", lambda size, device: self.made.append(device))
        patch.setattr(_warm_up, "read", lambda *what: self.operations.append("read") or read(*what))

    def make(self, incarnation: int = 1) -> list[str]:
        """The devices whose contexts a new process makes early."""
        _warm_up.make_context_early(self.store, incarnation)
        _warm_up.await_early_context()
        assert not _warm_up._early
        return self.made


def test_a_new_process_makes_its_context_early_if_the_others_use_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Cuda(monkeypatch)
    assert cuda.make() == []
    _warm_up.announce_cuda(cuda.store)
    assert cuda.make() == ["cuda:3"]


def test_without_cuda_no_one_tells_of_it_or_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    _warm_up.announce_cuda(cuda.store)
    assert cuda.store.num_keys() == 0
    assert cuda.make(incarnation=0) == []  # one of the job's first processes
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert cuda.make() == []
    assert cuda.operations == []


@pytest.mark.parametrize(("sees", "local_rank"), [(7, "3"), (8, "8"), (8, "")])
def test_a_process_whose_device_is_not_known_waits_for_the_function(
    monkeypatch: pytest.MonkeyPatch, sees: int, local_rank: str
) -> None:
    cuda = Cuda(monkeypatch)
    _warm_up.announce_cuda(cuda.store)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: sees)
    assert cuda.make() == []


def test_a_context_that_cannot_be_made_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = Cuda(monkeypatch)
    _warm_up.announce_cuda(cuda.store)

    def fails(size: object, device: str) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", fails)
    cuda.make()
    [record] = caplog.records
    assert record.message == "making the device's context early failed: CUDA error: out of memory"
