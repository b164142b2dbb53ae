"""What each rank has of its own under Lightning: random numbers, and positions in its loaders."""

import random
import sys
from typing import Any

import torch
import torch.distributed as dist

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
