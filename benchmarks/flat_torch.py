"""What `flat.py` trains with torch alone: DDP, FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

if TYPE_CHECKING:
    from flat import Flat

    from ft_wrapper import CallWrapper

WIDTH = 1024  # of a layer: 4 MB of weights


def ddp(flat: Flat, call_wrapper: CallWrapper) -> None:
    """An iteration with DDP."""
    dist.init_process_group("gloo")
    _train(flat, torch.nn.parallel.DistributedDataParallel(_layers()))


def fsdp2(flat: Flat, call_wrapper: CallWrapper) -> None:
    """An iteration with FSDP2."""
    dist.init_process_group("gloo")
    model = _layers()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    _train(flat, model)


def _layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def _train(flat: Flat, model: torch.nn.Module) -> None:
    flat.made(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        model(torch.ones(4, WIDTH)).sum().backward()
        if step:
            flat.fail()
        optimizer.step()
        optimizer.zero_grad()
    if not flat.is_over:
        dist.barrier()  # which the other one does not reach
