"""What torch keeps from one iteration to the next: its own state, caches of old ranks, old models."""

from __future__ import annotations

import errno
import gc
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from rank_harness import SETTINGS, Job, Rank, with_limits
from support.torch_versions import needs_async_save_processes

from ft_wrapper import CallWrapper, Wrapper
from ft_wrapper.abort import AbortTorchDistributed
from ft_wrapper.exception import RestartAbort
from ft_wrapper.monitor.frames import checkpoint_failure
from ft_wrapper.state import FrozenState
from ft_wrapper.store import StoreMixin

# Importing DTensor, dynamo or a checkpoint takes seconds of CPU: of no interest here.
PATIENT: dict[str, Any] = {"soft_timeout": 80.0, "hard_timeout": 90.0, "barrier_timeout": 100.0}


def settings() -> dict[str, Any]:
    """The ranks', with the store that the test is run on."""
    return {**SETTINGS, **PATIENT}


# ---- torch's own state


def leaves_gradients_off(rank: Rank) -> Any:
    before, after = [], []

    def note(state: FrozenState) -> None:
        before.append(torch.is_grad_enabled())

    def leave_off(state: FrozenState) -> None:
        after.append(torch.is_grad_enabled())
        torch._C._set_grad_enabled(False)

    @Wrapper(**with_limits(initialize=note, finalize=leave_off, **settings()))
    def train(call_wrapper: CallWrapper) -> bool:
        enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # as an interrupt in the midst of `no_grad.__exit__` does
        if call_wrapper.iteration < 2:
            raise ValueError
        return enabled

    return [train(), before, all(after)]


def test_torchs_state_is_put_back_before_each_entry(job: Job) -> None:
    job.start(2, leaves_gradients_off)
    assert job.wait() == [[True, [True, True, True], True]] * 2
    assert job[0].log.count("the function left torch's state changed") == 1


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
        return x * 0 + dist.get_rank() + 10 * dist.get_world_size()

    compiled = torch.compile(step, backend="eager")
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))  # imports

    @Wrapper(**with_limits(rejoin=True, active_world_size=2, **settings()))
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
    """What is under test is dynamo's, so no other compiler is used."""
    job.start(3, compiles)
    job.expect("in", 0, 1, n=1)
    job.send_signal(0, signal.SIGKILL)
    moved, promoted = job.wait(killed=(0,))
    # An exception moves no rank: the compiled code is kept. Rank 1 has become rank 0: it compiles again.
    assert moved == [[0, True, True], [1, True, False], [2, True, True]]
    assert promoted == [[2, True, True]]
    assert "; rank 0 will compile again; 2 active" in job[1].log + job[2].log
    assert (job[1].log + job[2].log).count("will compile again") == 1


# ---- a checkpoint that fails


class FullDisk(torch.distributed.checkpoint.FileSystemWriter):
    """Has no space on rank 1."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if os.environ["RANK"] == "1":
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write_data(plan, planner)


def saves(rank: Rank, path: str) -> Any:
    @Wrapper(**with_limits(**settings()))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        dist.init_process_group("gloo")
        state = {"weight": torch.ones(2)}
        if call_wrapper.iteration == 0:
            torch.distributed.checkpoint.save(state, storage_writer=FullDisk(path))
        return [call_wrapper.iteration, call_wrapper.faults[0].interruption.name]

    return train()


def test_a_full_disk_is_a_fault_like_others(job: Job, tmp_path: Path) -> None:
    job.start(2, saves, str(tmp_path / "checkpoint"))
    assert job.wait() == [[1, "EXCEPTION"]] * 2
    logs = job[0].log + job[1].log
    assert "raised RuntimeError: CheckpointException: rank 1: OSError: [Errno 28] No space left" in logs
    assert "in write_data" in logs  # where it was raised


def test_another_base_exception_is_not_taken_for_a_checkpoint_failure() -> None:
    assert checkpoint_failure(KeyboardInterrupt()) is None


def saves_in_a_process(rank: Rank, folder: str) -> Any:
    from torch.distributed.checkpoint import _async_process_executor as executor
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    # `AbortProcesses`, part of the default, would end the process, which then had but to be forgotten.
    @Wrapper(**with_limits(abort=AbortTorchDistributed(), **settings()))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        dist.init_process_group("gloo")
        n = call_wrapper.iteration
        saving: Any = torch.distributed.checkpoint.async_save(
            {"weight": torch.full((2,), float(n))},
            checkpoint_id=f"{folder}/{n}",
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        try:
            saving.result()
        except Exception as error:
            return [n, repr(error)]
        if n == 0:
            assert executor._CHECKPOINT_PROCESS is not None
            processes.append(executor._CHECKPOINT_PROCESS._save_process)
            rank.say("saved")
            rank.train()
        loaded = {"weight": torch.zeros(2)}
        torch.distributed.checkpoint.load(loaded, checkpoint_id=f"{folder}/{n}")
        return [n, loaded["weight"].tolist(), [process.is_alive() for process in processes]]

    processes: list[Any] = []
    return train()


@needs_async_save_processes
@pytest.mark.nightly(
    "such a process is ended in tests/process/torch_state/test_compiled_and_garbage.py always"
)
def test_a_process_that_writes_checkpoints_for_async_save_goes_with_its_ranks(
    job: Job, tmp_path: Path
) -> None:
    job.start(2, saves_in_a_process, str(tmp_path))
    job.expect("saved", 0, 1)
    job.send_signal(1, signal.SIGKILL)
    job.wait_for_end(leftovers=False)  # the last one ends with the rank
    # The first one has a group with a process that is gone, and would fail this save and all others.
    assert job[0].value == [1, [1.0, 1.0], [False]]


# ---- old models


def makes_models(rank: Rank) -> Any:
    models: list[weakref.ref[torch.nn.Module]] = []
    alive: list[int] = []

    @Wrapper(**with_limits(collect_garbage=False, max_same_faults=None, **settings()))
    def train(call_wrapper: CallWrapper) -> list[int]:
        alive.append(sum(model() is not None for model in models))
        model = torch.nn.Linear(8, 8)
        model.own = [model]  # only a collector frees it
        models.append(weakref.ref(model))
        if call_wrapper.iteration < 3:
            raise ValueError
        return alive

    gc.disable()  # nothing but the wrapper collects
    return train()


def test_the_collector_can_be_left_to_the_user(job: Job) -> None:
    job.start(1, makes_models)
    assert job.wait() == [[0, 1, 2, 3]]


# ---- after a call


class Argument:
    """Of the wrapped function."""


def leaves_nothing(rank: Rank, how: str) -> None:
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
        if how == "raises":
            raise RestartAbort

    gc.collect()
    gc.disable()
    before = stores()
    try:
        train(argument)
    except RestartAbort:
        pass
    del argument
    rank.say("kept", refs=[repr(ref()) for ref in kept if ref() is not None], stores=stores() - before)
    if how == "raises":
        raise RestartAbort


@pytest.mark.parametrize(
    "how", ["returns", pytest.param("raises", marks=pytest.mark.nightly("a call that returns runs always"))]
)
def test_nothing_is_kept_after_a_call(job: Job, how: str) -> None:
    job.start(2, leaves_nothing, how)
    job.wait_for_end()
    for slot in range(2):
        (kept,) = job[slot].said("kept")
        assert (kept["refs"], kept["stores"]) == ([], 0)
