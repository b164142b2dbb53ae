"""FSDP2: what `build` must not do is said. What it may do is drawn; see draws.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_harness import Job, Rank
from torch import nn


class Net(nn.Module):
    """One parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class Copies:
    """Averages, which copies what it is given into what it has."""

    def __init__(self, net: nn.Module) -> None:
        self.shadow = {name: value.detach().clone() for name, value in net.named_parameters()}

    def state_dict(self) -> Any:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: Any) -> None:
        for name, value in self.shadow.items():
            value.copy_(state["shadow"][name])


class Hides(Net):
    """Has tensors where no one finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = [torch.ones(2)]


def mistakes(rank: Rank, folder: str) -> dict[str, str]:
    """What is said to each mistake, in a job of one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from ft_wrapper.live.state import Sharded

    dist.init_process_group("gloo", init_method=f"file://{folder}/0", rank=0, world_size=1)
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


def test_mistakes_are_named(job: Job, tmp_path: Path) -> None:
    job.start(1, mistakes, str(tmp_path))
    job.wait_for_end(leftovers=False)  # gloo's, of a group without a wrapper
    said = job[0].value
    expected = {
        "tensor parallel": r"ValueError: mesh=.* has 3 dimensions; pass one .* or two",
        "not sharded": r"ValueError: .*'net.scale' is not sharded; apply fully_shard\(module, mesh=mesh\)",
        "in part": r"ValueError: .*'head.weight' is not sharded",
        "another mesh": r"ValueError: .*'net.scale' is on .*, and mesh=.*",
        "reads": r"RuntimeError: build\(\) failed on the meta device.*device=\"cpu\"",
        "copies": r"RuntimeError: average.shadow.scale has stayed on the meta device.*assign",
        "hides": r"RuntimeError: net.tables.0 has stayed on the meta device.*make it a buffer",
    }
    assert said.keys() == expected.keys()
    for name, pattern in expected.items():
        assert re.match(pattern, said[name]), said[name]
