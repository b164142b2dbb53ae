"""The fault runs' training under FSDP2, with replicas or without; fault_runs.py starts it by ftrun."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from live_job import Model, Run, main
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ft_wrapper import CallWrapper, LiveState


def train(run: Run, call_wrapper: CallWrapper = None) -> None:
    """One run."""
    run.begin(call_wrapper)
    rank, replicas = dist.get_rank(), run.replicas
    shards = dist.get_world_size() // replicas
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (shards,), mesh_dim_names=("shard",))

    def build() -> dict[str, Any]:
        model = Model(run.variant.batch_norm)
        for block in model.language.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return {"model": model, **run.optimizers(model)}

    def restore(objects: dict[str, Any]) -> int:
        return run.restore(objects, rank % shards, shards, mesh)

    below: dict[str, Any] = {"buddies": 1, "copy_every": run.every} if run.every else {"restore": restore}
    live = LiveState(call_wrapper, build, seed=0, mesh=mesh, **below)
    run.recovered(live)
    model = live["model"]

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    run.train(live, model, no_sync, lambda: rank < shards and run.save(call_wrapper, live, rank))
    run.end(live)


if __name__ == "__main__":
    main(train)
