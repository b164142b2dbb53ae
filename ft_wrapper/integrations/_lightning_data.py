"""A rank's data under Lightning: its position and its order after a restart, and its random numbers."""

import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities import CombinedLoader

from ..exception import JobAbort

#: In a checkpoint: all ranks' positions in their loaders. Lightning has those of rank 0 alone.
LOADERS = "ft_wrapper.loaders"


def seed(*parts: object) -> None:
    """Makes the random numbers that follow depend on these parts alone."""
    number = random.Random(repr(parts)).getrandbits(32)
    random.seed(number)
    torch.manual_seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)


def of_all_ranks(value: Any) -> list[Any]:
    """What each rank passes."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def own_of(values: list[Any]) -> Any:
    """What this rank passed, which may have moved; with another number of ranks it is rank 0's."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return values[rank if len(values) == size else 0]


def begin_loaders(trainer: Any, positions: list[Any] | None) -> None:
    """Checks a Trainer's loaders; behind a restart they begin in the epoch and at the position they had.

    Lightning begins them before it tells their samplers the epoch, so the order would be that of epoch 0.

    Raises:
        JobAbort: the order cannot be brought back.
    """
    fit_loop, loaders = trainer.fit_loop, CombinedLoader(trainer.train_dataloader).flattened
    samplers = [_sampler(loader) for loader in loaders]
    for sampler in samplers:
        inner = sampler.dataset._sampler if isinstance(sampler, DistributedSamplerWrapper) else sampler
        if hasattr(inner, "generator"):
            raise JobAbort(
                f"FT: a loader takes its order from a {type(inner).__name__}, whose random numbers are in no "
                "checkpoint: pass sampler=DistributedSampler(…), or one whose order depends on set_epoch"
            )
    if positions is None:
        return
    for sampler in samplers:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(fit_loop.epoch_progress.current.processed)
    if fit_loop.restarted_mid_epoch:
        stateful = [loader for loader in loaders if hasattr(loader, "load_state_dict")]
        for loader, position in zip(stateful, positions, strict=True):
            loader.load_state_dict(position)
    iter(fit_loop._data_fetcher)


def _sampler(loader: Any) -> Any:
    batches = getattr(loader, "batch_sampler", None)
    return getattr(batches, "sampler", None) or getattr(loader, "sampler", None)
