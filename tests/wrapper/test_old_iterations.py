"""What outlives its iteration in real ranks: said once, with the way to it; nothing where all is clean."""

from __future__ import annotations

import gc
import queue
import sys
import threading
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_harness import SETTINGS, Job, Rank
from support.torch_versions import needs_fsdp2_on_cpu
from torch.nn.parallel import DistributedDataParallel

import ft_wrapper
from ft_wrapper import CallWrapper, LiveState, Wrapper
from ft_wrapper.restart import leftover_check

# Importing FSDP takes seconds of CPU: of no interest here.
PATIENT: dict[str, Any] = {"soft_timeout": 80.0, "hard_timeout": 90.0, "barrier_timeout": 100.0}
RESTARTS = 3
EACH = {"FT_WRAPPER_LEFTOVERS": "1"}
NIGHTLY = pytest.mark.nightly("one of each kind runs always")


def settings() -> dict[str, Any]:
    """The ranks', with the store that the test is run on."""
    return {**SETTINGS, **PATIENT, "max_same_faults": None}


def watch_looks() -> list[threading.Event]:
    """Has the check say when it has looked; for each look one event. On a busy machine it may take longer."""
    setattr(leftover_check, "_LIMIT", 10.0)  # noqa: B010
    looks: list[threading.Event] = []
    look, look_at = leftover_check.LeftoverCheck.look, leftover_check.LeftoverCheck._look_at
    waiting: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()

    def looking(self: Any) -> None:
        ended = threading.Event()
        if look(self):
            waiting.put(ended)
        else:
            ended.set()
        looks.append(ended)

    def looking_at(self: Any, things: Any) -> None:
        try:
            look_at(self, things)
        finally:
            waiting.get(timeout=60).set()

    setattr(leftover_check.LeftoverCheck, "look", looking)  # noqa: B010
    setattr(leftover_check.LeftoverCheck, "_look_at", looking_at)  # noqa: B010
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
        found.append(len(ft_wrapper.leftovers()))
        return n

    found: list[int] = []
    return [train(), *found]


@pytest.mark.tcp_only("what outlives an iteration is no store's business")
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param("DDP", 2, marks=NIGHTLY),
        pytest.param("FSDP2", 2, marks=[needs_fsdp2_on_cpu, NIGHTLY]),
        pytest.param("HSDP", 4, marks=needs_fsdp2_on_cpu),
        pytest.param("FSDP1", 2, marks=NIGHTLY),
    ],
)
def test_nothing_is_said_where_all_is_clean(job: Job, name: str, ranks: int) -> None:
    job.start(ranks, trains, name, env=EACH)
    assert job.wait() == [[RESTARTS, 0]] * ranks
    for slot in range(ranks):
        said_nothing(job[slot].log)


def said_nothing(log: str) -> None:
    assert " of iteration " not in log and "earlier iterations" not in log, log


# ---- something


MESH = (
    "a DeviceMesh of iteration 0 is held by mylib.cache._MESHES['dp']: its sockets and memory stay, and it "
    "may be taken for the new one"
)


def keeps_a_mesh(rank: Rank, restarts: int) -> list[str]:
    """In a module's global, and frozen."""
    from torch.distributed.device_mesh import init_device_mesh

    looks = watch_looks()
    library: Any = types.ModuleType("mylib.cache")
    sys.modules["mylib.cache"], library._MESHES = library, {}

    @Wrapper(**settings())
    def train(call_wrapper: CallWrapper) -> list[str]:
        dist.init_process_group("gloo")
        n = call_wrapper.iteration
        library._MESHES.setdefault("dp", init_device_mesh("cpu", (2,)))
        if n == 0:
            gc.collect()
            gc.freeze()
        assert looks[n].wait(60)
        dist.barrier()
        if n < restarts:
            if rank.slot == 0:
                raise ValueError("as planned")
            rank.hang()
        return [str(each) for each in ft_wrapper.leftovers() if not each.within]

    try:
        return train()
    finally:
        del sys.modules["mylib.cache"]


@pytest.mark.tcp_only("what outlives an iteration is no store's business")
@pytest.mark.parametrize(
    ("env", "times"),
    [
        pytest.param(EACH, 3, marks=NIGHTLY),
        ({}, 1),
        pytest.param({"FT_WRAPPER_LEFTOVERS": "0"}, 0, marks=NIGHTLY),
    ],
)
def test_who_holds_a_mesh_of_an_earlier_iteration_is_said(job: Job, env: Any, times: int) -> None:
    job.start(2, keeps_a_mesh, 3, env=env)
    assert job.wait() == [[MESH]] * 2
    for slot in range(2):
        assert job[slot].log.count(MESH) == times
        assert job[slot].log.count(" of iteration ") == times  # what the mesh holds has no line of its own


def keeps_what_it_trained(rank: Rank) -> list[Any]:
    """A model in a local variable of the function's caller, and a group that it has destroyed itself."""
    looks = watch_looks()
    models: list[Any] = []
    library: Any = types.ModuleType("mylib")
    sys.modules["mylib"] = library

    @Wrapper(**settings())
    def train(call_wrapper: CallWrapper) -> list[Any]:
        dist.init_process_group("gloo")
        if call_wrapper.iteration == 0:
            models.append(plain_ddp())
            library.group = dist.new_group([0, 1])
        assert looks[call_wrapper.iteration].wait(60)
        dist.barrier()
        if call_wrapper.iteration == 0:
            dist.destroy_process_group()
            raise ValueError("as planned")
        return [(each.what, each.held_by) for each in ft_wrapper.leftovers() if not each.within]

    try:
        return train()
    finally:
        del sys.modules["mylib"]


@pytest.mark.tcp_only("what outlives an iteration is no store's business")
def test_models_and_groups_are_found_too(job: Job) -> None:
    job.start(2, keeps_what_it_trained)
    for found in job.wait():
        (model, way), group = sorted(found)
        assert model == "DistributedDataParallel"
        assert way.startswith("models[0] in "), way
        assert group == ["ProcessGroup", "mylib.group"]
    for slot in range(2):
        assert job[slot].log.count(" of iteration 0 is held by ") == 2


# ---- what stays on purpose


def lives(rank: Rank, shards: bool) -> list[Any]:
    """A live state; of FSDP2 it builds the modules again, and the old ones wait for the collector."""
    looks = watch_looks()

    @Wrapper(**settings())
    def train(call_wrapper: CallWrapper) -> list[Any]:
        dist.init_process_group("gloo")
        n, mesh = call_wrapper.iteration, None
        if shards:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (2,))

        def build() -> dict[str, Any]:
            model = sharded(fully_shard, mesh) if shards else torch.nn.Linear(8, 8)
            return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

        live = LiveState(call_wrapper, build, mesh=mesh)
        model = live["model"] if shards else DistributedDataParallel(live["model"])
        for _ in live.steps(2 * n + 2):
            live["optimizer"].zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            live.commit()
        assert looks[n].wait(60)
        dist.barrier()
        if n < RESTARTS:
            if rank.slot == n % 2:
                raise ValueError("as planned")
            rank.hang()
        return [live.step, [str(each) for each in ft_wrapper.leftovers() if each.held_by is not None]]

    return train()


@pytest.mark.tcp_only("what outlives an iteration is no store's business")
@pytest.mark.parametrize(
    "shards",
    [False, pytest.param(True, marks=[needs_fsdp2_on_cpu, NIGHTLY])],
    ids=["DDP", "FSDP2"],
)
def test_a_live_state_is_not_left_over(job: Job, shards: bool) -> None:
    job.start(2, lives, shards, env=EACH)
    job.wait_for_end(leftovers=not shards)  # gc.freeze at the first restart froze the modules of iteration 0
    for slot in range(2):
        assert job[slot].value == [2 * RESTARTS + 2, []]
        said_nothing(job[slot].log)


def keeps_its_group(rank: Rank) -> list[str]:
    looks = watch_looks()

    @Wrapper(**settings(), keep_groups=True)
    def train(call_wrapper: CallWrapper) -> list[str]:
        call_wrapper.process_group()
        assert looks[call_wrapper.iteration].wait(60)
        dist.barrier()
        if call_wrapper.iteration < 2:
            raise ValueError("as planned")
        return [str(each) for each in ft_wrapper.leftovers()]

    return train()


@pytest.mark.tcp_only("what outlives an iteration is no store's business")
def test_a_kept_group_is_not_left_over(job: Job) -> None:
    """Where torch cannot keep it, it is none either."""
    job.start(2, keeps_its_group, env=EACH)
    assert job.wait() == [[]] * 2
    for slot in range(2):
        said_nothing(job[slot].log)


# ---- and before anything begins


def counts_its_calls(rank: Rank) -> int:
    @Wrapper(**settings())
    def train() -> int:
        return 1

    return train()


@pytest.mark.tcp_only("it is refused before a store is asked")
def test_a_variable_that_says_something_else_is_refused(job: Job) -> None:
    job.start(1, counts_its_calls, env={"FT_WRAPPER_LEFTOVERS": "yes"})
    job.wait_for_end()
    (raised,) = job[0].said("raised")
    assert raised["error"] == "ValueError"
    assert "FT_WRAPPER_LEFTOVERS='yes' must be 1" in raised["text"] and "remove it" in raised["text"]
