"""A rank of test_moved_ranks: says which rows of a DTensor are its own; rank 0 is killed in iteration 0."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch._dynamo  # the first DTensor imports it: more than all the rest of this job takes
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ft_wrapper import CallWrapper, Wrapper


@Wrapper(rejoin=True, soft_timeout=80, hard_timeout=90, barrier_timeout=100)
def train(folder: Path, call_wrapper: CallWrapper) -> None:
    """Doubles six numbers and takes its third of them."""
    rank, n = dist_rank(), call_wrapper.iteration
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (3,))
    numbers = distribute_tensor(torch.arange(6.0), mesh, [Replicate()])
    rows = (numbers * 2).redistribute(mesh, [Shard(0)]).to_local().tolist()
    dist.barrier()
    if n == 0 and rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    said = {"rank": rank, "pid": os.getpid(), "iteration": n, "rows": rows}
    (folder / f"rank-{rank}.json").write_text(json.dumps(said))


def dist_rank() -> int:
    """As the wrapper says."""
    return int(os.environ["RANK"])


if __name__ == "__main__":
    (Path(sys.argv[1]) / f"imported-{os.environ['RANK']}").touch()
    train(Path(sys.argv[1]))
