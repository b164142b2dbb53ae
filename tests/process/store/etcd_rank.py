"""A rank that uses torch.distributed on an EtcdStore. Arguments: endpoints, prefix, rank, world size."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed

from ft_wrapper.store import EtcdStore


def main() -> None:
    endpoints, prefix, rank, world_size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    store = EtcdStore(endpoints, prefix, timeout=timedelta(seconds=60))
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    for _ in range(2):
        total = torch.full((1,), rank + 1.0)
        group = torch.distributed.new_group()
        torch.distributed.all_reduce(total, group=group)
        assert total.item() == sum(range(world_size + 1)), total
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    store.close()


if __name__ == "__main__":
    main()
