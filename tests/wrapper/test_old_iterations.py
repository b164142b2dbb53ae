"""What outlives its iteration in real ranks: said once, with the way to it; nothing where all is clean."""

from __future__ import annotations

import gc
import sys
import threading
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_harness import SETTINGS, Job, Rank
from torch.nn.parallel import DistributedDataParallel

import ft_wrapper
from ft_wrapper import CallWrapper, LiveState, Wrapper
from ft_wrapper.abort import wait_for_released_groups
from ft_wrapper.restart import leftover_check

# Importing FSDP takes seconds of CPU: of no interest here.
PATIENT: dict[str, Any] = {"soft_timeout": 80.0, "hard_timeout": 90.0, "barrier_timeout": 100.0}
RESTARTS = 3
EACH = {"FT_WRAPPER_LEFTOVERS": "1"}
NOT_SEEN = "of iteration "


def settings() -> dict[str, Any]:
    """The ranks', with the store that the test is run on."""
    return {**SETTINGS, **PATIENT, "max_same_faults": None}


def watch_looks() -> list[threading.Event]:
    """Has the check say when it has looked; for each look one event."""
    looks: list[threading.Event] = []
    look, run = leftover_check.LeftoverCheck.look, leftover_check.LeftoverCheck._run

    def looking(self: Any) -> None:
        before = self._thread
        ended = threading.Event()
        self._ended = ended
        look(self)
        if self._thread is before:
            ended.set()
        looks.append(ended)

    def running(self: Any, things: Any) -> None:
        try:
            run(self, things)
        finally:
            self._ended.set()

    setattr(leftover_check.LeftoverCheck, "look", looking)  # noqa: B010
    setattr(leftover_check.LeftoverCheck, "_run", running)  # noqa: B010
    return looks


# ---- nothing


def plain_ddp() -> Any:
    return DistributedDataParallel(torch.nn.Linear(8, 8))


def fsdp2() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return sharded(fully_shard, init_device_mesh("cpu", (2,)))


def hsdp() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert mesh["shard"].size() == 2
    return sharded(fully_shard, mesh)


def sharded(fully_shard: Any, mesh: Any) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    return model


def fsdp1() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(torch.nn.Linear(8, 8), device_id=torch.device("cpu"))


MODELS = {"DDP": plain_ddp, "FSDP2": fsdp2, "HSDP": hsdp, "FSDP1": fsdp1}


def trains(rank: Rank, name: str) -> list[int]:
    """Fails in backward on one rank after another; what the check says is in the log."""
    looks = watch_looks()

    @Wrapper(**settings())
    def train(call_wrapper: CallWrapper) -> int:
        dist.init_process_group("gloo")
        n, size = call_wrapper.iteration, dist.get_world_size()
        model = MODELS[name]()
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(2):
            loss = model(torch.ones(4, 8)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and n < RESTARTS:
                assert looks[n].wait(60)
                dist.barrier()
                if dist.get_rank() == n % size:
                    raise ValueError("as planned")
                dist.barrier()
        assert wait_for_released_groups(60)
        found.append(len(ft_wrapper.leftovers()))
        return n

    found: list[int] = []
    return [train(), *found]


@pytest.mark.tcp_only("what outlives an iteration is no store's business")
@pytest.mark.parametrize(("name", "ranks"), [("DDP", 2), ("FSDP2", 2), ("HSDP", 4), ("FSDP1", 2)])
def test_nothing_is_said_where_all_is_clean(job: Job, name: str, ranks: int) -> None:
    job.start(ranks, trains, name, env=EACH)
    assert job.wait() == [[RESTARTS, 0]] * ranks
    for slot in range(ranks):
        assert NOT_SEEN not in job[slot].log.replace("failed in iteration", ""), job[slot].log
        assert "earlier iterations" not in job[slot].log
