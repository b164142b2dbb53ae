"""What torch keeps from one iteration to the next: its own state, caches of old ranks, old models."""

from __future__ import annotations

import errno
import gc
import os
import signal
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from rank_harness import SETTINGS, Job, Rank, with_limits

from ft_wrapper import CallWrapper, Wrapper
from ft_wrapper.exception import RestartAbort
from ft_wrapper.monitor.frames import checkpoint_failure
from ft_wrapper.restart import call
from ft_wrapper.state import FrozenState
from ft_wrapper.store import StoreMixin

# Importing DTensor, dynamo or a checkpoint takes seconds of CPU: of no interest here.
PATIENT: dict[str, Any] = {"soft_timeout": 80.0, "hard_timeout": 90.0, "barrier_timeout": 100.0}


def settings() -> dict[str, Any]:
    """The ranks', with the store that the test is run on."""
    return {**SETTINGS, **PATIENT}


# ---- torch's own state


def leaves_things_behind(rank: Rank) -> Any:
    """Leaves gradients off; and models, since it wants no collection."""
    before, after = [], []
    models: list[weakref.ref[torch.nn.Module]] = []

    def note(state: FrozenState) -> None:
        before.append(torch.is_grad_enabled())

    def leave_off(state: FrozenState) -> None:
        after.append(torch.is_grad_enabled())
        torch._C._set_grad_enabled(False)

    @Wrapper(**with_limits(initialize=note, finalize=leave_off, collect_garbage=False, **settings()))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        enabled, alive = torch.is_grad_enabled(), sum(model() is not None for model in models)
        torch._C._set_grad_enabled(False)  # as an interrupt in the midst of `no_grad.__exit__` does
        model = torch.nn.Linear(8, 8)
        model.own = [model]  # only a collector frees it
        models.append(weakref.ref(model))
        if call_wrapper.iteration < 2:
            raise ValueError
        return [enabled, alive]

    gc.disable()  # nothing but the wrapper collects
    return [train(), before, all(after)]


def test_torchs_state_is_put_back_before_each_entry_and_the_collector_left_to_the_user(job: Job) -> None:
    job.start(2, leaves_things_behind)
    for (enabled, alive), before, after in job.wait():
        assert (enabled, before, after) == (True, [True, True, True], True)
        assert alive >= 1  # one may hear of a fault before it is in
    assert job[0].log.count("the function left torch's state changed") == 1


def returns_a_model_that_refers_to_the_call(rank: Rank) -> Any:
    @Wrapper(**settings())
    def train(call_wrapper: CallWrapper) -> torch.nn.Module:
        model = torch.nn.Linear(8, 8)
        model.call = call_wrapper
        return model

    gc.disable()
    return weakref.ref(train())() is None


def test_what_was_returned_needs_no_collector(job: Job) -> None:
    job.start(1, returns_a_model_that_refers_to_the_call)
    assert job.wait() == [True]


# ---- caches of old ranks


def shards(rank: Rank) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    @Wrapper(**with_limits(active_world_size=3, **settings()))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        place = int(os.environ["RANK"])
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (3,))
        numbers = torch.arange(6.0)
        whole = distribute_tensor(numbers, mesh, [Replicate()])
        rows = (whole * 2).redistribute(mesh, [Shard(0)]).to_local().tolist()
        if call_wrapper.iteration == 0:
            rank.say("in")
            rank.train()
        return [place, rows]

    return train()


def test_every_ranks_rows_are_its_own_after_ranks_have_moved(job: Job) -> None:
    job.start(4, shards)
    job.expect("in", 0, 1, 2)
    job.send_signal(0, signal.SIGKILL)
    assert job.wait(killed=(0,)) == [[place, [4.0 * place, 4.0 * place + 2]] for place in range(3)]


def compiles(rank: Rank) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        if not dist.is_initialized():  # a constant in compiled code
            return x
        return x * 0 + dist.get_rank() + 10 * dist.get_world_size()

    def warm_up() -> None:
        compiled(torch.ones(1))
        rank.say("warm")

    compiled = torch.compile(step, backend="eager")
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))  # imports
    call._WARMS_UP_AFTER = 0.0

    @Wrapper(**with_limits(rejoin=True, active_world_size=2, warm_up=warm_up, **settings()))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        from torch._dynamo.utils import counters

        dist.init_process_group("gloo")
        counters.clear()
        said = compiled(torch.ones(1)).item()
        frames = counters["frames"]["ok"]
        place = int(os.environ["RANK"])
        seen.append([call_wrapper.iteration, said == place + 20, frames > 0])
        if call_wrapper.iteration == 0:
            dist.barrier()
            if place == 1:
                raise ValueError("once")
            rank.hang()
        if call_wrapper.iteration == 1:
            dist.barrier()
            rank.say("in", n=1)
            rank.hang()
        return seen

    seen: list[Any] = []
    return train()


def test_compiled_code_that_asks_for_its_rank_is_compiled_again_if_that_has_moved(job: Job) -> None:
    """What is under test is dynamo's, so no other compiler is used. A spare has compiled in its warm-up."""
    job.start(3, compiles)
    job.expect("warm", 2)
    job.expect("in", 0, 1, n=1)
    job.send_signal(0, signal.SIGKILL)
    moved, promoted = job.wait(killed=(0,))
    # An exception moves no rank: the compiled code is kept. Rank 1 has become rank 0: both compile again.
    assert moved == [[0, True, True], [1, True, False], [2, True, True]]
    assert promoted == [[2, True, True]]
    assert "; ranks 0, 1 will compile again; 2 active" in job[1].log + job[2].log
    assert (job[1].log + job[2].log).count("will compile again") == 1


# ---- a checkpoint that fails


class FullDisk(torch.distributed.checkpoint.FileSystemWriter):
    """Has no space on rank 1."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if os.environ["RANK"] == "1":
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write_data(plan, planner)


def saves(rank: Rank, path: str) -> Any:
    from torch.distributed.checkpoint import _async_process_executor as executor

    @Wrapper(**with_limits(**settings()))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        dist.init_process_group("gloo")
        state = {"weight": torch.ones(2)}
        if call_wrapper.iteration == 0:
            process = SimpleNamespace(kill=lambda: rank.say("killed"), join=lambda timeout: None)
            executor._CHECKPOINT_PROCESS = SimpleNamespace(_save_process=process)  # of an async_save
            torch.distributed.checkpoint.save(state, storage_writer=FullDisk(path))
        return [
            call_wrapper.iteration,
            call_wrapper.faults[0].interruption.name,
            executor._CHECKPOINT_PROCESS,
        ]

    return train()


def test_a_full_disk_is_a_fault_like_others_and_a_process_that_saves_goes(job: Job, tmp_path: Path) -> None:
    """That process has a group with a process that may be gone, and would fail all saves to come."""
    job.start(2, saves, str(tmp_path / "checkpoint"))
    assert job.wait() == [[1, "EXCEPTION", None]] * 2
    assert [len(job[slot].said("killed")) for slot in (0, 1)] == [1, 1]
    logs = job[0].log + job[1].log
    assert "raised RuntimeError: CheckpointException: rank 1: OSError: [Errno 28] No space left" in logs
    assert "in write_data" in logs  # where it was raised


def test_another_base_exception_is_not_taken_for_a_checkpoint_failure() -> None:
    assert checkpoint_failure(KeyboardInterrupt()) is None


# ---- after a call


class Argument:
    """Of the wrapped function."""


def leaves_nothing(rank: Rank) -> None:
    """In the end slot 1 raises, and then slot 0 returns."""

    def stores() -> int:
        return sum(isinstance(thing, StoreMixin | dist.Store) for thing in gc.get_objects())

    argument = Argument()
    kept: list[weakref.ref[Any]] = [weakref.ref(argument)]

    @Wrapper(**with_limits(**settings()))
    def train(given: Argument, call_wrapper: CallWrapper) -> None:
        kept.extend(map(weakref.ref, (given, call_wrapper, call_wrapper.store)))
        dist.init_process_group("gloo")
        kept.append(weakref.ref(dist.group.WORLD))
        dist.barrier()
        if call_wrapper.iteration == 0:
            raise ValueError
        if rank.slot == 1:
            raise RestartAbort
        if call_wrapper.iteration == 1:
            rank.train()

    gc.collect()
    gc.disable()
    before = stores()
    try:
        train(argument)
    except RestartAbort:
        pass
    del argument
    rank.say("kept", refs=[repr(ref()) for ref in kept if ref() is not None], stores=stores() - before)
    if rank.slot == 1:
        raise RestartAbort


def test_nothing_is_kept_after_a_call(job: Job) -> None:
    job.start(2, leaves_nothing)
    job.wait_for_end()
    for slot in range(2):
        (kept,) = job[slot].said("kept")
        assert (kept["refs"], kept["stores"]) == ([], 0)
