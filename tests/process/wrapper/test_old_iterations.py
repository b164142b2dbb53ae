"""What outlives its iteration in real ranks: warned of once, and its holder is found; else silence."""

from __future__ import annotations

import gc
import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from rank_harness import SETTINGS, Job, Rank, with_limits
from support.torch_versions import needs_fsdp2_on_cpu
from torch.nn.parallel import DistributedDataParallel

import ft_wrapper
from ft_wrapper import CallWrapper, LiveState, Wrapper

# Importing FSDP takes seconds of CPU: of no interest here.
PATIENT: dict[str, Any] = {"soft_timeout": 80.0, "hard_timeout": 90.0, "barrier_timeout": 100.0}
RESTARTS = 3


def settings() -> dict[str, Any]:
    """The ranks', with the store that the test is run on."""
    return {**SETTINGS, **PATIENT, "max_same_faults": None}


# ---- nothing


@needs_fsdp2_on_cpu
def test_nothing_is_said_where_all_is_clean(job: Job) -> None:
    job.start(4, trains)
    assert job.wait() == [[RESTARTS, 0]] * 4
    for slot in range(4):
        said_nothing(job[slot].log)


def trains(rank: Rank) -> list[int]:
    """Fails in the backward pass of HSDP on one rank after another; a warning would be in the log."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    @Wrapper(**with_limits(**settings()))
    def train(call_wrapper: CallWrapper) -> int:
        dist.init_process_group("gloo")
        n, size = call_wrapper.iteration, dist.get_world_size()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        assert mesh["shard"].size() == 2
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(2):
            loss = model(torch.ones(4, 8)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and n < RESTARTS:
                dist.barrier()
                if dist.get_rank() == n % size:
                    raise ValueError("as planned")
                dist.barrier()
        found.append(len(ft_wrapper.find_leaks()))
        return n

    found: list[int] = []
    return [train(), *found]


def said_nothing(log: str) -> None:
    assert "earlier iterations" not in log, log


# ---- something


MESH = (
    "a DeviceMesh of iteration 0 is held by mylib.cache._MESHES['dp']: its sockets and memory stay, and it "
    "may be taken for the new one"
)


def keeps_a_mesh(rank: Rank, restarts: int) -> list[str]:
    """In a module's global, and frozen."""
    from torch.distributed.device_mesh import init_device_mesh

    library: Any = types.ModuleType("mylib.cache")
    sys.modules["mylib.cache"], library._MESHES = library, {}

    @Wrapper(**with_limits(**settings()))
    def train(call_wrapper: CallWrapper) -> list[str]:
        dist.init_process_group("gloo")
        n = call_wrapper.iteration
        library._MESHES.setdefault("dp", init_device_mesh("cpu", (2,)))
        if n == 0:
            gc.collect()
            gc.freeze()
        dist.barrier()
        if n < restarts:
            if rank.slot == 0:
                raise ValueError("as planned")
            rank.hang()
        return [str(each) for each in ft_wrapper.find_leaks() if not each.within]

    try:
        return train()
    finally:
        del sys.modules["mylib.cache"]


def test_a_mesh_of_an_earlier_iteration_is_one_warning_and_its_holder_is_found(job: Job) -> None:
    job.start(2, keeps_a_mesh, 3)
    assert job.wait() == [[MESH]] * 2
    for slot in range(2):
        assert job[slot].log.count("objects of earlier iterations are still alive") == 1
        assert job[slot].log.count("alive, with their memory: 1 DeviceMesh; ft_wrapper.find_leaks()") == 1


# ---- what stays on purpose


def lives(rank: Rank) -> list[Any]:
    @Wrapper(**with_limits(**settings()))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        dist.init_process_group("gloo")
        n = call_wrapper.iteration

        def build() -> dict[str, Any]:
            model = torch.nn.Linear(8, 8)
            return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

        live = LiveState(call_wrapper, build)
        model = DistributedDataParallel(live["model"])
        for _ in live.steps(2 * n + 2):
            live["optimizer"].zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            live.commit()
        dist.barrier()
        if n < RESTARTS:
            if rank.slot == n % 2:
                raise ValueError("as planned")
            rank.hang()
        return [live.step, [str(each) for each in ft_wrapper.find_leaks() if each.referrer is not None]]

    return train()


def test_a_live_state_is_not_left_over(job: Job) -> None:
    job.start(2, lives)
    for value in job.wait():
        assert value == [2 * RESTARTS + 2, []]
    for slot in range(2):
        said_nothing(job[slot].log)


def keeps_its_group(rank: Rank) -> list[str]:
    @Wrapper(**with_limits(**settings(), keep_groups=True))
    def train(call_wrapper: CallWrapper) -> list[str]:
        call_wrapper.process_group()
        dist.barrier()
        if call_wrapper.iteration < 2:
            raise ValueError("as planned")
        return [str(each) for each in ft_wrapper.find_leaks()]

    return train()


def test_a_kept_group_is_not_left_over(job: Job) -> None:
    """Where torch cannot keep it, it is none either."""
    job.start(2, keeps_its_group)
    assert job.wait() == [[]] * 2
    for slot in range(2):
        said_nothing(job[slot].log)
