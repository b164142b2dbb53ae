"""Buffers that forward passes change: put back, and those of rank 0 on all ranks."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_harness import SETTINGS, Job, Rank
from torch import nn

from ft_wrapper import CallWrapper, LiveState, Wrapper
from ft_wrapper.live.buffers import Buffers
from ft_wrapper.live.performer import TorchPerformer

STEPS = 40
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def some_tensor(choose: random.Random) -> torch.Tensor:
    shape = [choose.choice((1, 2, 5, 8)) for _ in range(choose.randrange(4))]
    values = [choose.choice((-0.0, 0.0, 1.0, 3.0, float("nan"))) for _ in range(torch.Size(shape).numel())]
    tensor = torch.tensor(values).view(shape)
    dtype = choose.choice(DTYPES)
    tensor = tensor.nan_to_num().to(dtype) if not dtype.is_floating_point else tensor.to(dtype)
    return tensor.mT.contiguous().mT if tensor.ndim > 1 and choose.random() < 0.5 else tensor


def build() -> dict[str, Any]:
    choose = random.Random(7)
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 1))
    for number in range(8):
        owner = model[choose.randrange(3)]
        owner.register_buffer(f"own{number}", some_tensor(choose), persistent=choose.random() < 0.5)
    model[0].register_buffer("nothing", None)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01)}


def change_some(model: nn.Sequential, choose: random.Random) -> None:
    """Changes buffers, as forward passes of all kinds do."""
    for _ in range(choose.randrange(4)):
        owner = model[choose.randrange(3)]
        own = sorted(name for name, each in owner._buffers.items() if "own" in name and each is not None)
        kind = choose.choice(("data", "in place", "assign", "register", "delete", "none", "other data"))
        if kind == "register":
            owner.register_buffer(f"own{choose.randrange(8, 12)}", some_tensor(choose))
        elif not own:
            continue
        name = choose.choice(own) if own else ""
        if kind == "data":
            getattr(owner, name).data.fill_(choose.randrange(5))
        if kind == "in place":
            getattr(owner, name).fill_(choose.randrange(5))
        if kind == "assign":
            setattr(owner, name, some_tensor(choose))
        if kind == "other data":
            old = getattr(owner, name)
            old.data = torch.ones_like(some_tensor(choose), dtype=old.dtype)
        if kind == "delete":
            delattr(owner, name)
        if kind == "none":
            setattr(owner, name, None)


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    named = {
        f"{at}.{name}": each for at, part in model.named_modules() for name, each in part._buffers.items()
    }
    for name, each in sorted(named.items()):
        # A copy on other ranks may lie in memory in another way.
        said = None if each is None else (each.shape, each.dtype, each.contiguous().view(-1))
        found.update(repr((name, said and said[:2])).encode())
        if said is not None:
            found.update(said[2].view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def test_what_was_changed_is_put_back() -> None:
    objects = build()
    model, buffers = objects["model"], Buffers()
    buffers.keep(objects)
    owners = [f"model{'.' * bool(name)}{name}" for name, _ in model.named_modules()]
    for seed in range(500):
        choose, before = random.Random(seed), digest(model)
        change_some(model, choose)
        buffers.put_back(objects, owners)
        assert digest(model) == before, seed
        change_some(model, choose)
        after = digest(model)
        if choose.random() < 0.5:
            buffers.look(objects)
        buffers.keep(objects)
        buffers.put_back(objects, owners)
        assert digest(model) == after, seed


def shares(rank: Rank, kind: str, killed: int = -1) -> Any:
    """Trains while forward passes change buffers: on rank 0 alone, or on each rank others.

    Args:
        rank: the harness's.
        kind: "each": on all ranks; "first": on rank 0 alone.
        killed: rank 0 is, in the vote of this step.

    Returns:
        Digests of the buffers after each step.
    """
    from ft_wrapper.live import live_state

    class Killed(TorchPerformer):
        def vote(self, *arguments: Any) -> Any:
            if self._call.own.member.view.n == 0 and (self.rank, said[-1:]) == (0, [killed]):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().vote(*arguments)

    live_state.TorchPerformer = Killed  # type: ignore[misc]
    said: list[Any] = []

    @Wrapper(**SETTINGS, active_world_size=2 if killed >= 0 else None)
    def train(call_wrapper: CallWrapper) -> list[str]:
        dist.init_process_group("gloo")
        live = LiveState(call_wrapper, build, seed=1)
        ddp = live.data_parallel(broadcast_buffers=False)
        found = []
        for step in live.steps(STEPS):
            live["optimizer"].zero_grad()
            ddp(torch.ones(8, 4) * (dist.get_rank() + 1)).sum().backward()
            choose = random.Random(f"{step} {dist.get_rank()}")
            # Most steps change nothing: what changes is new to all.
            if choose.random() < 0.3 and (kind == "each" or dist.get_rank() == 0):
                change_some(live["model"], choose)
            mine = digest(live["model"])
            said.append(step)
            live.commit()
            found.append(digest(live["model"]))
            assert dist.get_rank() or found[-1] == mine, "rank 0's own buffers stay as they are"
        return found

    return train()


@pytest.mark.tcp_only("of no other meaning with another store")
@pytest.mark.parametrize("kind", ["first", "each"])
def test_all_ranks_have_rank_0s(job: Job, kind: str) -> None:
    job.start(3, shares, kind)
    first, second, third = job.wait()
    assert first == second == third
    assert len(set(first)) > 5


@pytest.mark.tcp_only("of no other meaning with another store")
@pytest.mark.parametrize("killed", [4, 11])  # the first step that changes some, and a later one
def test_what_rank_0_has_changed_is_not_lost_with_it(job: Job, killed: int) -> None:
    """It is killed once it has told the others, who step without it: with what it has told them."""
    job.start(2, shares, "first")
    clean = job.wait()[0]
    job.start(3, shares, "first", killed)
    job.wait_for_end()
    lived = [process.value for process in job.ranks.values() if process.code == 0]
    assert "replicas differ" not in "".join(process.log for process in job.ranks.values())
    assert lived == [clean[killed + 1 :]] * 2  # this step was not done again
