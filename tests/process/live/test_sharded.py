"""FSDP2 and HSDP over a restart, on real gloo groups: the same bits as without one.

Each process trains without a restart first, then with one. In the restart ranks may move.
"""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing
import multiprocessing.connection
import re
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import forkserver as forkservers
from multiprocessing import resource_tracker as trackers
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.torch_versions import needs_fsdp2_on_cpu
from torch import nn

from ft_wrapper.torch_groups.caches import clear_caches

TIMEOUT = 200.0
NIGHTLY = pytest.mark.nightly("shards that move to other ranks run always, with and without replicas")
BEFORE, AFTER = 3, 3
"""Steps before the restart and after it."""


# ---- in a rank's process: DTensor takes seconds to import, and only the ranks need it


class Net(nn.Module):
    """Tied, frozen and uneven parameters, one with a row for one rank only; all kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.GELU(), nn.Linear(7, 6))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.linspace(0.0, 1.0, 6), persistent=False)
        self.table = torch.linspace(-1.0, 1.0, 6)  # neither a parameter nor a buffer
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        y = self.frozen(self.embed(x)) + self.offset + self.table
        return self.head(self.body(y) * self.scale)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Average:
    """Of the parameters over the steps: an object of the user's that holds tensors."""

    def __init__(self, net: Net) -> None:
        self.shadow = {name: value.detach().clone() for name, value in net.named_parameters()}

    def update(self, parameters: dict[str, Any]) -> None:
        for name, value in self.shadow.items():
            value.lerp_(parameters[name].detach(), 0.1)

    def state_dict(self) -> Any:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: Any) -> None:
        self.shadow = state["shadow"]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What is tried.

    Args:
        shape: of the mesh.
        foreach: AdamW's way of doing things.
        moves: the ranks after the restart, by the ranks before it.
        exchanges: each rank adopts what another process has exported.
        rolls: the last update before the restart is done after it, with the old objects.
    """

    shape: tuple[int, ...]
    foreach: bool = True
    moves: tuple[int, ...] = ()
    exchanges: bool = False
    rolls: bool = False


class Iteration:
    """One iteration of a job in this process."""

    def __init__(self, folder: Path, scenario: Scenario, number: int, rank: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        from ft_wrapper.live.state import Sharded

        world_size = torch.Size(scenario.shape).numel()
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/{number}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT),
        )
        self.rank = rank
        self.scenario = scenario
        self.mesh = init_device_mesh(
            "cpu", scenario.shape, mesh_dim_names=("replicas", "shards")[-len(scenario.shape) :]
        )
        self.form = Sharded(self.user_build, self.mesh)

    def user_build(self) -> dict[str, Any]:
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        net = Net()
        fully_shard(net.body, mesh=self.mesh)
        fully_shard(net, mesh=self.mesh)
        named = dict(net.named_parameters())
        body = [value for name, value in named.items() if name.startswith("body")]
        other = [value for name, value in named.items() if not name.startswith(("body", "frozen"))]
        frozen = list(net.frozen.parameters())
        groups: list[dict[str, Any]] = [
            {"params": body[:3], "weight_decay": 0.1},
            {"params": body[3:] + frozen},
        ]
        adam = torch.optim.AdamW(groups, lr=1e-2, foreach=self.scenario.foreach)
        sgd = torch.optim.SGD(other, lr=1e-2, momentum=0.9)
        return {
            "scheduler": torch.optim.lr_scheduler.OneCycleLR(adam, 3e-2, total_steps=BEFORE + AFTER + 1),
            "net": net,
            "adam": adam,
            "sgd": sgd,
            "average": Average(net),
        }

    def gradients(self, objects: dict[str, Any], step: int) -> None:
        torch.manual_seed(1000 * step + self.rank)
        x = torch.randint(11, (8,))
        loss = F.cross_entropy(objects["net"](x), x.roll(1))
        # The unsharded parameters are in their places now.
        parameters: dict[str, Any] = self.form.parameters(objects)
        assert all(value.device_mesh is self.mesh for value in parameters.values())
        loss.backward()  # type: ignore[no-untyped-call]
        for buffer in objects["net"].buffers():
            dist.broadcast(buffer, 0)

    def update(self, objects: dict[str, Any]) -> None:
        for name in ("adam", "sgd", "scheduler"):
            objects[name].step()
        named = {name.removeprefix("net."): value for name, value in self.form.parameters(objects).items()}
        objects["average"].update(named)
        objects["adam"].zero_grad()
        objects["sgd"].zero_grad()

    def train(self, objects: dict[str, Any], begin: int, end: int, *, updates_last: bool = True) -> None:
        for step in range(begin, end):
            self.gradients(objects, step)
            if updates_last or step < end - 1:
                self.update(objects)

    def gather(self, mine: Any) -> list[Any]:
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, mine)
        return said

    def digests(self, objects: dict[str, Any]) -> Any:
        """By rank: its shard, and a digest of all that it has."""
        return self.gather((self.form.shard, digest(self.described(objects))))

    def described(self, objects: dict[str, Any]) -> Any:
        """The state, with what is a rank's own."""
        from ft_wrapper.live.state import attributes_of, parts

        return {"common": self.form.describe(objects), "own": attributes_of(parts(objects))}

    def end(self) -> None:
        dist.barrier()
        dist.destroy_process_group()
        clear_caches()


def local(tensor: torch.Tensor) -> torch.Tensor:
    here: torch.Tensor = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
    return here


def digest(tree: Any) -> str:
    total = hashlib.sha256()

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = local(value)
            total.update(
                bytes(value.contiguous().view(-1).view(torch.uint8).tolist()) if value.numel() else b""
            )
        elif isinstance(value, dict):
            for key, each in value.items():
                walk(key)
                walk(each)
        elif isinstance(value, (list, tuple)):
            for each in value:
                walk(each)
        else:
            total.update(repr(value).encode())

    walk(tree)
    return total.hexdigest()


def trains(folder: Path, scenario: Scenario, rank: int) -> Any:
    clean = Iteration(folder, scenario, 0, rank)
    objects = clean.form.build()
    clean.train(objects, 0, BEFORE + AFTER)
    wanted = clean.digests(objects)
    clean.end()

    first = Iteration(folder, scenario, 1, rank)
    objects = first.form.build()
    first.train(objects, 0, BEFORE, updates_last=not scenario.rolls)
    first.end()

    second = Iteration(folder, scenario, 2, scenario.moves[rank] if scenario.moves else rank)
    if scenario.rolls:
        second.update(objects)
    exported, described = second.form.export(objects), second.described(objects)
    if scenario.exchanges:
        said = second.gather((first.form.shard, exported))
        objects = second.form.adopt(
            objects, next(state for shard, state in said[::-1] if shard == second.form.shard)
        )
    else:
        objects = second.form.rebind(objects)
        shards = scenario.shape[-1]
        assert memory(described, shards) == memory(second.described(objects), shards)
    second.train(objects, BEFORE, BEFORE + AFTER)
    assert objects["net"].calls == BEFORE + AFTER
    assert objects["scheduler"].optimizer is objects["adam"]
    assert objects["net"].head.weight is objects["net"].embed.weight
    assert not objects["net"].frozen.weight.requires_grad
    assert set(objects["net"].state_dict()) == set(Net().state_dict())
    check_mesh(second, objects)
    got = second.digests(objects)
    second.end()
    return wanted, got


def memory(described: Any, shards: int) -> dict[str, int]:
    """Where the tensors are, but for parameters whose shards FSDP2 pads."""
    from ft_wrapper.live.tree import named

    found = {
        path: local(tensor).data_ptr()
        for path, tensor in named(described)
        if not ("common.parameters." in path and tensor.shape[0] % shards)
    }
    assert len(found) > 20
    return found


def check_mesh(iteration: Iteration, objects: dict[str, Any]) -> None:
    """DTensors are on this iteration's mesh, and so is what is made of them."""
    from torch.distributed.tensor import DTensor

    for name, value in iteration.form.parameters(objects).items():
        assert isinstance(value, DTensor), name
        assert value.device_mesh is iteration.mesh, name
        made: Any = torch.zeros_like(value)
        assert made.device_mesh is iteration.mesh, name
    for optimizer in (objects["adam"], objects["sgd"]):
        for state in optimizer.state.values():
            assert all(
                each.device_mesh is iteration.mesh for each in state.values() if isinstance(each, DTensor)
            )


class Copies(Average):
    """Copies what it is given into what it has."""

    def load_state_dict(self, state: Any) -> None:
        for name, value in self.shadow.items():
            value.copy_(state["shadow"][name])


class Hides(Net):
    """Has tensors where no one finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = [torch.ones(2)]


def mistakes(folder: Path, rank: int) -> dict[str, str]:
    """What is said to each mistake, in a job of one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from ft_wrapper.live.state import Sharded

    dist.init_process_group("gloo", init_method=f"file://{folder}/0", rank=rank, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shards",))
    other = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "shards"))

    def rebinds(objects: Callable[[], dict[str, Any]]) -> Callable[[], object]:
        form = Sharded(objects, mesh)
        return lambda: form.rebind(form.build())

    def sharded(net: nn.Module, on: Any = mesh) -> Any:
        return fully_shard(net, mesh=on)

    def reads() -> dict[str, Any]:
        net = sharded(Net())
        assert net.scale.full_tensor().item() == 1.0
        return {"net": net}

    def copies() -> dict[str, Any]:
        net = sharded(Net())
        return {"net": net, "average": Copies(net)}

    def empty() -> Any:
        return {"net": nn.GELU()}

    calls: dict[str, Callable[[], object]] = {
        "no mesh": lambda: Sharded(empty, "cpu"),  # type: ignore[arg-type]
        "tensor parallel": lambda: Sharded(empty, init_device_mesh("cpu", (1, 1, 1))),
        "not sharded": Sharded(lambda: {"net": Net()}, mesh).build,
        "in part": Sharded(lambda: {"net": sharded(Net()), "head": nn.Linear(2, 2)}, mesh).build,
        "another mesh": Sharded(lambda: {"net": sharded(Net(), other)}, mesh).build,
        "reads": rebinds(reads),
        "copies": rebinds(copies),
        "hides": rebinds(lambda: {"net": sharded(Hides())}),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    return said


# ---- in the test


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> Iterator[None]:
    """One process imports torch and what the ranks need of it, and all ranks are forked from it."""
    server: Any = vars(forkservers)["_forkserver"]  # its _stop is for tests
    tracker: Any = vars(trackers)["_resource_tracker"]
    tracked = tracker._fd is not None
    server._stop()
    multiprocessing.set_forkserver_preload(
        ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"]
    )
    yield
    server._stop()
    multiprocessing.set_forkserver_preload([])
    if not tracked:
        tracker._stop()


def main(connection: Any, body: Callable[..., Any], *arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        connection.send((True, body(*arguments)))
    except BaseException:
        connection.send((False, traceback.format_exc()))


def run(body: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """What a function returns in so many processes; the rank is its last argument."""
    context = multiprocessing.get_context("forkserver")
    started, answers = [], {}
    deadline = time.monotonic() + TIMEOUT
    try:
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=main, args=(there, body, *arguments, rank))
            started.append((process, here))
            process.start()
            there.close()
        for rank, (_, here) in enumerate(started):
            assert here.poll(max(0.0, deadline - time.monotonic())), f"no answer from rank {rank}"
            answers[rank] = here.recv()
            assert answers[rank][0], f"rank {rank}: {answers[rank][1]}"
    finally:
        for rank, (process, here) in enumerate(started):
            here.close()
            process.join(5 if rank in answers else 0)
            process.kill()
            process.join()
            process.close()
    return [answers[rank][1] for rank in range(world_size)]


@needs_fsdp2_on_cpu
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(Scenario((2,), foreach=False, rolls=True), marks=NIGHTLY),
        pytest.param(Scenario((3,), moves=(1, 2, 0), exchanges=True), marks=NIGHTLY),
        Scenario((2, 2), foreach=False, moves=(3, 2, 1, 0), exchanges=True, rolls=True),
    ],
    ids=str,
)
def test_the_same_bits_as_without_a_restart(scenario: Scenario, tmp_path: Path) -> None:
    answers = run(trains, torch.Size(scenario.shape).numel(), tmp_path, scenario)
    wanted, _ = answers[0]
    shards = scenario.shape[-1]
    assert [shard for shard, _ in wanted] == [
        f"shard {rank % shards} of {shards}" for rank in range(len(wanted))
    ]
    assert len(set(wanted)) == shards
    for also_wanted, got in answers:
        assert also_wanted == got == wanted


def test_mistakes_are_named(tmp_path: Path) -> None:
    [said] = run(mistakes, 1, tmp_path)
    expected = {
        "no mesh": r"TypeError: mesh='cpu' must be a DeviceMesh; pass .*init_device_mesh",
        "tensor parallel": r"ValueError: mesh=.* has 3 dimensions; pass one of one dimension .* or two",
        "not sharded": r"ValueError: .*'net.scale' is not sharded; apply fully_shard\(module, mesh=mesh\)",
        "in part": r"ValueError: .*'head.weight' is not sharded",
        "another mesh": r"ValueError: 'net.scale' is on .*, and mesh=.*; pass the same mesh",
        "reads": r"RuntimeError: build\(\) failed on the meta device.*device=\"cpu\"",
        "copies": r"RuntimeError: average.shadow.scale has stayed on the meta device.*assign",
        "hides": r"RuntimeError: net.tables.0 has stayed on the meta device.*make it a buffer",
    }
    assert said.keys() == expected.keys()
    for name, pattern in expected.items():
        assert re.match(pattern, said[name]), said[name]
