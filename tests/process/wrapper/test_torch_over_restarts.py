"""What torch keeps from one iteration to the next: its own state, caches of old ranks, old models."""

from __future__ import annotations

import errno
import gc
import inspect
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed.checkpoint
from rank_harness import SETTINGS, Job, Rank, with_limits
from support.torch_versions import needs_async_save_processes, needs_fsdp2_on_cpu

from ft_wrapper import CallWrapper, Wrapper
from ft_wrapper.abort import AbortTorchDistributed, wait_for_released_groups
from ft_wrapper.exception import RestartAbort
from ft_wrapper.finalize import Finalize
from ft_wrapper.initialize import Initialize
from ft_wrapper.monitor.frames import checkpoint_failure
from ft_wrapper.state import FrozenState
from ft_wrapper.store import StoreMixin

# Importing DTensor, dynamo or a checkpoint takes seconds of CPU: of no interest here.
PATIENT: dict[str, Any] = {"soft_timeout": 80.0, "hard_timeout": 90.0, "barrier_timeout": 100.0}


def settings() -> dict[str, Any]:
    """The ranks', with the store that the test is run on."""
    return {**SETTINGS, **PATIENT}


# ---- torch's own state


class NotesGradients(Initialize):
    """Before each entry."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def __call__(self, state: FrozenState) -> FrozenState:
        self.seen.append(torch.is_grad_enabled())
        return state


class LeavesGradientsOff(Finalize):
    """Notes whether they are on after the function was left, and turns them off once more."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def __call__(self, state: FrozenState) -> FrozenState:
        self.seen.append(torch.is_grad_enabled())
        torch._C._set_grad_enabled(False)
        return state


def leaves_gradients_off(rank: Rank) -> Any:
    notes, finalize = NotesGradients(), LeavesGradientsOff()

    @Wrapper(**with_limits(initialize=notes, finalize=finalize, **settings()))
    def train(call_wrapper: CallWrapper) -> bool:
        enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # as an interrupt in the midst of `no_grad.__exit__` does
        if call_wrapper.iteration < 2:
            raise ValueError
        return enabled

    return [train(), notes.seen, all(finalize.seen)]


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

    torch._inductor.config.compile_threads = 1  # torch 2.6 starts processes for them at once
    compiled = torch.compile(step, backend="aot_eager")
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(1))  # imports

    @Wrapper(**with_limits(rejoin=True, active_world_size=2, **settings()))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        from torch._dynamo.utils import counters

        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        counters.clear()
        said = compiled(model(torch.ones(1, 2))).item()
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
    """Aot_eager: what is under test is dynamo's, and inductor's C++ compiler takes half a minute."""
    job.start(3, compiles)
    job.expect("in", 0, 1, n=1)
    job.send_signal(0, signal.SIGKILL)
    moved, promoted = job.wait(killed=(0,))
    # An exception moves no rank: the compiled code is kept. Rank 1 has become rank 0: it compiles again.
    assert moved == [[0, True, True], [1, True, False], [2, True, True]]
    assert promoted == [[2, True, True]]
    assert "; rank 0 will compile again; 2 active" in job[1].log + job[2].log
    assert (job[1].log + job[2].log).count("will compile again") == 1


class AsksForItsRank(torch.nn.Module):
    """Its output says which rank it was compiled for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each rank has a factor of its own."""
        return (x * self.weight * (dist.get_rank() + 1)).sum()


def trains_compiled(rank: Rank) -> Any:
    import torch._inductor.compile_fx  # the spare, too, while it has nothing to do

    # Of the time that inductor takes, what can be spared: compiling in other processes, headers compiled
    # ahead, and five programs that try what the processor can do.
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.cpp_cache_precompile_headers = False
    torch._inductor.config.cpp.vec_isa_ok = False

    @Wrapper(**with_limits(active_world_size=2, **settings()))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        place = int(os.environ["RANK"])
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(AsksForItsRank())
        said = torch.compile(model)(torch.ones(4))
        said.backward()
        if call_wrapper.iteration == 0:
            rank.say("in", said=said.item(), gradient=model.module.weight.grad.tolist())
            rank.train()
        return [place, said.item(), model.module.weight.grad.tolist()]

    return train()


@pytest.mark.tcp_only("what is compiled is no store's business, and inductor takes its time")
@pytest.mark.nightly(
    "test_compiled_code_that_asks_for_its_rank_is_compiled_again_if_that_has_moved runs always"
)
def test_a_compiled_ddp_model_that_asks_for_its_rank_trains_right_after_ranks_have_moved(
    job: Job, tmp_path: Path
) -> None:
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}  # each kernel is compiled once
    job.start(3, trains_compiled, env=cache)
    first = job.expect("in", 0, 1)
    assert [(in_["said"], in_["gradient"]) for in_ in first] == [(4.0, [1.5] * 4), (8.0, [1.5] * 4)]
    job.send_signal(0, signal.SIGKILL)
    # Rank 1 has become rank 0. With its old code both would be rank 1, and the gradient 2.
    assert job.wait(killed=(0,)) == [[0, 4.0, [1.5] * 4], [1, 8.0, [1.5] * 4]]
    assert "; rank 0 will compile again; 2 active" in job[1].log + job[2].log


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
@pytest.mark.tcp_only("who writes checkpoints is no store's business, and each one imports torch")
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


def makes_models(rank: Rank, restarts: int, collects: bool) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    models: list[weakref.ref[torch.nn.Module]] = []
    alive: list[list[int]] = []

    def things() -> list[int]:
        return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]

    @Wrapper(**with_limits(collect_garbage=collects, max_same_faults=None, **settings()))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        n = call_wrapper.iteration
        wait_for_released_groups()
        living = [model() for model in models if model() is not None]
        alive.append([n, len(living), *things(), "; ".join(map(who_holds, living[:1]))])
        del living
        dist.init_process_group("gloo")
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
        for part in (*model, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
        model.own = [model]  # one cycle more
        models.append(weakref.ref(model))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(4, 256)).sum().backward()
        optimizer.step()
        if n < restarts:
            if rank.slot == n % 2:
                raise ValueError
            rank.hang()
        return alive

    gc.disable()  # nothing but the wrapper collects
    return train()


def who_holds(thing: object) -> str:
    """Kinds of objects that refer to it."""
    return ", ".join(
        f"{type(holder).__name__} {str(holder)[:80]}"
        for holder in gc.get_referrers(thing)
        if not inspect.isframe(holder)
    )


@pytest.mark.nightly("old models are looked for in test_old_iterations.py always")
@needs_fsdp2_on_cpu
def test_no_old_model_lives_over_thirty_restarts(job: Job) -> None:
    job.start(2, makes_models, 30, True)
    for alive in job.wait():
        assert len(alive) == 31
        assert [(n, models, holders) for n, models, *_, holders in alive if models] == []
        for column in (2, 3):  # descriptors, threads
            assert max(row[column] for row in alive[2:]) <= max(row[column] for row in alive[1:4]) + 2


@needs_fsdp2_on_cpu
def test_the_collector_can_be_left_to_the_user(job: Job) -> None:
    job.start(2, makes_models, 3, False)
    for alive in job.wait():
        assert [models for _, models, *_ in alive] == [0, 1, 2, 3]


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
