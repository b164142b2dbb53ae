"""The fault runs' training with torch alone: FSDP2, HSDP, tensor parallel with DCP; compiled DDP, loaders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from framework_job import EVERY, Run, main, seed_step
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ft_wrapper import CallWrapper
from ft_wrapper.checkpoints import Checkpoint, Checkpoints

WIDTH = 24
"""Divisible by 2, 3 and 4."""


def train(run: Run, call_wrapper: CallWrapper = None) -> None:
    """One run."""
    run.begin(call_wrapper)
    dist.init_process_group("gloo")
    {"compiled": compiled, "loader": loaded}.get(run.way, sharded)(run, call_wrapper)


def layers() -> nn.Sequential:
    """The model, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(2 * WIDTH, WIDTH),
        nn.Linear(WIDTH, 1),
    )


def loss_of(model: nn.Module) -> torch.Tensor:
    """On a batch by torch's random numbers."""
    loss: torch.Tensor = (model(torch.randn(4, WIDTH)) - 1).square().mean()
    return loss


# Shards, and torch.distributed.checkpoint -----------------------------------------------------------------


def sharded(run: Run, call: CallWrapper) -> None:
    """FSDP2 on one dimension, HSDP on two, or tensor parallel."""
    model = layers()
    if run.way == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan = {"0": ColwiseParallel(), "3": RowwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh, plan)
    else:
        shape = (2, dist.get_world_size() // 2) if run.way == "hsdp" else (dist.get_world_size(),)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard")[-len(shape) :])
        for layer in (model[0], model[3], model):
            fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpoints = Checkpoints(call, run.folder / "checkpoints")
    first = load(model, optimizer, checkpoints.newest())
    saver = Saver(run, call, checkpoints)
    for step in range(first, run.steps):
        call.ping()
        run.at(step)
        torch.manual_seed(step) if run.way == "tp" else seed_step(step)  # TP's ranks have one batch
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            saver.save(state_of(model, optimizer, step + 1), step + 1)
    saver.end()
    run.end(state_of(model, optimizer, run.steps))


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """What a checkpoint holds."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}


def load(model: nn.Module, optimizer: torch.optim.Optimizer, newest: Checkpoint | None) -> int:
    """Loads a checkpoint; returns its step."""
    if newest is None:
        return 0
    state = state_of(model, optimizer, 0)
    dcp.load(state, checkpoint_id=newest)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    step: int = state["step"]
    return step


class Saver:
    """Saves at once, or in the background.

    Args:
        run: its way says how.
        call: the wrapped call.
        checkpoints: where.
    """

    def __init__(self, run: Run, call: CallWrapper, checkpoints: Checkpoints) -> None:
        self._call = call
        self._checkpoints = checkpoints
        self._kind = {
            "async": AsyncCheckpointerType.THREAD,
            "process": AsyncCheckpointerType.PROCESS,
        }.get(run.way)
        self._group = dist.new_group(backend="gloo") if self._kind else None  # never the default one
        self._pending: Any = None

    def save(self, state: dict[str, Any], step: int) -> None:
        """Begins to save, once the last one is sealed."""
        self.end()
        folder = self._checkpoints.path(step)
        if self._kind is None:
            dcp.save(state, checkpoint_id=folder)
            self._checkpoints.seal(step)
            return
        future = dcp.async_save(
            state, checkpoint_id=folder, process_group=self._group, async_checkpointer_type=self._kind
        )
        self._pending = future, step

    def end(self) -> None:
        """Waits for the one that is being written, and seals it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            future, step = pending
            with self._call.disable_hang_protection():  # torch's checkpoint process imports torch at first
                future.result()
            self._checkpoints.seal(step)


# One file, which rank 0 writes ---------------------------------------------------------------------------


def compiled(run: Run, call: CallWrapper) -> None:
    """DDP, compiled, in a function that asks for its rank."""
    model = layers()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @torch.compile
    def loss(batch: torch.Tensor) -> torch.Tensor:
        return (ddp(batch) - dist.get_rank() - 1).square().mean()

    checkpoints = Checkpoints(call, run.folder / "checkpoints")
    first = load_file(checkpoints, model, optimizer)
    for step in range(first, run.steps):
        call.ping()
        run.at(step)
        seed_step(step)
        optimizer.zero_grad()
        # The first compilation takes longer than the timeouts here.
        patience = call.disable_hang_protection() if step == first else contextlib.nullcontext()
        with patience:
            loss(torch.randn(4, WIDTH)).backward()
        optimizer.step()
        save_file(checkpoints, model, optimizer, step + 1)
    run.end({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})


def loaded(run: Run, call: CallWrapper) -> None:
    """DDP, with a loader whose position is in the checkpoint: two workers, shuffled, over several epochs."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    data = [torch.full((WIDTH,), float(number)) for number in range(48)]
    sampler = StatefulDistributedSampler(data, shuffle=True, seed=1)
    loader = StatefulDataLoader(data, batch_size=2, sampler=sampler, num_workers=2, persistent_workers=True)
    model = layers()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoints = Checkpoints(call, run.folder / "checkpoints")
    first = load_file(checkpoints, model, optimizer, loader)
    # Behind the last batch of an epoch the loader still is in it.
    batches = epochs(loader, sampler, max(0, first - 1) * 2 * dist.get_world_size() // len(data))
    for step in range(first, run.steps):
        call.ping()
        run.at(step)
        batch = next(batches)
        seed_step(step)  # behind it: a loader that begins an epoch, or goes on in one, draws a number
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
        save_file(checkpoints, model, optimizer, step + 1, loader)
    run.end({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})


def epochs(loader: Any, sampler: Any, first: int) -> Iterator[torch.Tensor]:
    """The batches of all epochs from one on."""
    epoch = first
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def save_file(
    checkpoints: Checkpoints, model: nn.Module, optimizer: Any, step: int, loader: Any = None
) -> None:
    """Rank 0 writes the state, and each rank where its loader stands."""
    if step % EVERY:
        return
    folder = checkpoints.path(step)
    folder.mkdir(exist_ok=True)
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, folder / "state.pt")
    if loader is not None:
        torch.save(loader.state_dict(), folder / f"loader-{dist.get_rank()}.pt")
    checkpoints.seal(step)


def load_file(checkpoints: Checkpoints, model: nn.Module, optimizer: Any, loader: Any = None) -> int:
    """Loads the newest checkpoint; returns its step."""
    newest = checkpoints.newest()
    if newest is None:
        return 0
    state = torch.load(newest.path / "state.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if loader is not None:
        loader.load_state_dict(torch.load(newest.path / f"loader-{dist.get_rank()}.pt", weights_only=False))
    step: int = state["step"]
    return step


if __name__ == "__main__":
    main(train)
