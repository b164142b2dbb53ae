"""HSDP that loses no step: two replicas of two shards each, and two spares.

ftrun --nproc-per-node 6 examples/live_hsdp.py
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ft_wrapper import CallWrapper, Compose, LiveState, Wrapper
from ft_wrapper.rank_assignment import MaxActiveWorldSize, ReplicaGroups

REPLICAS, SHARDS = 2, 2


def batch(step):
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    return torch.randn(16, 32, generator=generator)


# The ranks of a replica stay together. A lost one's place is taken by a spare, which receives the lost shard
# from the other replica.
@Wrapper(rank_assignment=Compose(MaxActiveWorldSize(REPLICAS * SHARDS), ReplicaGroups(SHARDS)))
def train(call_wrapper: CallWrapper, steps):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // SHARDS, SHARDS), mesh_dim_names=("dp", "fsdp"))

    def build():  # in an iteration's function, since its mesh is of that iteration
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}

    live = LiveState(call_wrapper, build, seed=0, mesh=mesh)
    model, optimizer = live["model"], live["optimizer"]
    for step in live.steps(steps):
        optimizer.zero_grad()
        loss = (model(batch(step)) - 1).square().mean()
        loss.backward()
        live.commit()
    with torch.no_grad():  # not the loop's loss: after a late fault no step is left to do
        return (model(batch(steps)) - 1).square().mean().item()


if __name__ == "__main__":
    loss = train(100)
    if os.environ["RANK"] == "0":
        print(f"loss {loss:.6f}")
