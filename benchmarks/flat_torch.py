"""What `flat.py` trains with torch alone: DDP, compiled DDP, FSDP2, HSDP, tensor parallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

if TYPE_CHECKING:
    from flat import Flat

    from ft_wrapper import CallWrapper

WIDTH = 1024  # of a layer: 4 MB of weights


def ddp(flat: Flat, call_wrapper: CallWrapper) -> None:
    """An iteration with DDP."""
    dist.init_process_group("gloo")
    _train(flat, torch.nn.parallel.DistributedDataParallel(_layers()))


def compiled(flat: Flat, call_wrapper: CallWrapper) -> None:
    """An iteration with DDP, compiled by inductor."""
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(_layers())

    @torch.compile
    def forward(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch) - dist.get_rank()
        return loss

    _train(flat, model, forward)


def fsdp2(flat: Flat, call_wrapper: CallWrapper) -> None:
    """An iteration with FSDP2."""
    _shard(flat, (2,))


def hsdp(flat: Flat, call_wrapper: CallWrapper) -> None:
    """An iteration with HSDP: a mesh of two dimensions, two replicas of one shard."""
    _shard(flat, (2, 1))


def tp(flat: Flat, call_wrapper: CallWrapper) -> None:
    """An iteration with tensor parallel layers."""
    dist.init_process_group("gloo")
    model = _layers()
    plan = {str(number): (ColwiseParallel, RowwiseParallel)[number % 2]() for number in range(len(model))}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)  # type: ignore[arg-type]
    _train(flat, model)


def _shard(flat: Flat, shape: tuple[int, ...]) -> None:
    dist.init_process_group("gloo")
    model = _layers()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard")[-len(shape) :])
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    _train(flat, model)


def _layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def _train(flat: Flat, model: torch.nn.Module, forward: Callable[..., Any] | None = None) -> None:
    flat.made(model)
    forward = forward or model
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        forward(torch.ones(4, WIDTH)).sum().backward()
        if step:
            flat.fail()
        optimizer.step()
        optimizer.zero_grad()
    if not flat.is_over:
        dist.barrier()  # which the other one does not reach
