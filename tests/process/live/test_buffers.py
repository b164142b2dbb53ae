"""Buffers that forward passes change: they are restored, and rank 0's reach all ranks."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import sys
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_harness import SETTINGS, Job, Rank
from support.apart import apart
from torch import nn

from ft_wrapper import CallWrapper, LiveState, Wrapper
from ft_wrapper.live import live_state
from ft_wrapper.live.buffers import Buffers
from ft_wrapper.live.performer import TorchPerformer, default_update
from ft_wrapper.protocol.seal import Seal

STEPS = 40
KINDS = ("data", "in place", "assign", "register", "delete", "none", "other data", "inference", "alias")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def some_tensor(choose: random.Random) -> torch.Tensor:
    shape = [choose.choice((1, 2, 5, 8)) for _ in range(choose.randrange(4))]
    values = [choose.choice((-0.0, 0.0, 1.0, 3.0, float("nan"))) for _ in range(torch.Size(shape).numel())]
    tensor = torch.tensor(values).view(shape)
    dtype = choose.choice(DTYPES)
    tensor = tensor.nan_to_num().to(dtype) if not dtype.is_floating_point else tensor.to(dtype)
    return tensor.mT.contiguous().mT if tensor.ndim > 1 and choose.random() < 0.5 else tensor


def build(drawn: int = 8) -> dict[str, Any]:
    choose = random.Random(7)
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 1))
    for number in range(drawn):
        owner = model[choose.randrange(3)]
        owner.register_buffer(f"own{number}", some_tensor(choose), persistent=choose.random() < 0.5)
    for number in range(4):  # any of them fits in another's place
        model[1].register_buffer(f"own {number}", torch.full((3,), float(number)))
    model[0].register_buffer("nothing", None)
    model[0].register_buffer("own leaf", torch.zeros(3, requires_grad=True))
    model[2].register_buffer("own table", torch.zeros(5, 2))
    model[2].register_buffer("own column", model[2]._buffers["own table"][:, 0])
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01)}


def change_some(model: nn.Sequential, choose: random.Random) -> None:
    """Changes buffers, as forward passes of all kinds do."""
    for _ in range(choose.randrange(4)):
        owner = model[choose.randrange(3)]
        own = sorted(name for name, each in owner._buffers.items() if "own" in name and each is not None)
        kind = choose.choice(KINDS)
        if kind == "register":
            new = choose.choice((some_tensor(choose), None))
            owner.register_buffer(f"own{choose.randrange(8, 12)}", new)
        elif not own:
            continue
        name = choose.choice(own) if own else ""
        if kind == "data":
            getattr(owner, name).data.fill_(choose.randrange(5))
        if kind == "in place":
            old = getattr(owner, name)
            with torch.inference_mode() if old.is_inference() else torch.no_grad():
                old.fill_(choose.randrange(5))
        if kind == "assign":
            setattr(owner, name, some_tensor(choose))
        if kind == "other data":
            old = getattr(owner, name)
            if not old.is_inference():  # reading its version would raise
                old.data = torch.ones_like(some_tensor(choose), dtype=old.dtype)
        if kind == "delete":
            delattr(owner, name)
        if kind == "none":
            setattr(owner, name, None)
        if kind == "inference":
            with torch.inference_mode():
                setattr(owner, name, getattr(owner, name) + 1)
        if kind == "alias":
            setattr(owner, name, getattr(owner, choose.choice(own)))


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    named = {
        f"{at}.{name}": each for at, part in model.named_modules() for name, each in part._buffers.items()
    }
    for name, each in sorted(named.items()):
        # Other ranks' copies may have other strides.
        said = None if each is None else (each.shape, each.dtype, each.detach().clone().flatten())
        found.update(repr((name, said and said[:2])).encode())
        if said is not None:
            found.update(said[2].view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def test_what_was_changed_is_put_back() -> None:
    for seed in range(100):
        choose, objects, buffers = random.Random(seed), build(), Buffers()
        model = objects["model"]
        owners = [f"model.{name}" for name, _ in model.named_children()]
        buffers.keep(objects)
        for _ in range(3):
            before = digest(model)
            change_some(model, choose)
            buffers.put_back(objects, owners)
            assert digest(model) == before, seed
            change_some(model, choose)
            if choose.random() < 0.5:
                buffers.look(objects)
            buffers.keep(objects)


def test_a_view_of_another_buffer_stays_one() -> None:
    objects, buffers = build(), Buffers()
    table, owners = objects["model"][2]._buffers["own table"], ["model.2"]
    buffers.keep(objects)
    table.fill_(1)
    buffers.put_back(objects, owners)
    table.fill_(2)
    assert objects["model"][2]._buffers["own column"].tolist() == [2] * 5


def averages(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.register_buffer("average", model.weight.detach().clone())

    def average(*_: Any) -> None:
        model.average.data.lerp_(model.weight.data, 0.1)

    optimizer.register_step_post_hook(average)


def refers(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.register_buffer("same", model.weight.detach())


@pytest.mark.parametrize("options", [{}, {"fused": True}])
@pytest.mark.parametrize("prepare", [averages, refers])
def test_what_an_update_writes_without_a_trace_is_kept(prepare: Any, options: dict[str, bool]) -> None:
    """By .data in a hook, or by fused kernels into a parameter's memory."""
    model, buffers = nn.Linear(3, 3), Buffers()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    prepare(model, optimizer)
    objects = {"model": model, "optimizer": optimizer}
    buffers.keep(objects)
    for _ in range(5):
        model(torch.ones(2, 3)).sum().backward()
        buffers.look(objects)
        default_update(objects)
        buffers.keep(objects)
        before = digest(model), model.weight.tolist()
        buffers.put_back(objects, ["model"])
        assert (digest(model), model.weight.tolist()) == before


@pytest.mark.parametrize("what", ["keep", "put_back", "share"])
def test_an_interruption_at_any_line_leaves_what_can_be_put_back(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(BaseException):
        pass

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if "ft_wrapper/live/" not in frame.f_code.co_filename:
            return None
        left -= event == "line"
        if event == "line" and left == 0:
            raise Interrupted
        return trace

    def broadcast(group: Any, there: list[torch.Tensor], size: int, root: int) -> None:
        for each in there:
            each.fill_(2)

    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr("ft_wrapper.live.buffers._broadcast_coalesced", broadcast)
    told = b"model.2.own table\0"
    for number in itertools.count(1):
        objects, buffers = build(2), Buffers()
        model, left = objects["model"], number
        buffers.keep(objects)
        before = digest(model)
        if what != "keep":
            for seed in range(4):
                change_some(model, random.Random(seed))
            buffers.look(objects)
            assert digest(model) != before
        arguments = [lambda said: told, None] if what == "share" else []
        sys.settrace(trace)
        try:
            apart(getattr(buffers, what), objects, *arguments)
            break
        except Interrupted:
            pass
        finally:
            sys.settrace(None)
        buffers.put_back(objects, ["model.0", "model.1", "model.2"])
        assert digest(model) == before
    assert number > 50


@pytest.mark.parametrize("forged", [b"", bytes(16), Seal(b"another").sign("buffers", b"")])
def test_buffers_that_are_not_signed_are_not_read(forged: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr("ft_wrapper.live.buffers.from_bytes", lambda said: pytest.fail("it was read"))
    objects, buffers = build(), Buffers()
    buffers.keep(objects)
    buffers.look(objects)
    with pytest.raises(RuntimeError, match="active rank 0's is not signed with the job's secret"):
        buffers.share(objects, lambda said: b"one\0what it is" + forged, None, Seal(b"the job's").sign)


def shares(rank: Rank) -> None:
    """Trains while forward passes change buffers; says, of each call, digests of them after each step.

    In the first call every rank changes its own choice of them, in the others only rank 0 does. In the last
    one rank 0 is killed in a vote.
    """

    class Killed(TorchPerformer):
        def vote(self, *arguments: Any) -> Any:
            if (kind, self._services.iteration, self.rank, done[-1:]) == ("killed", 0, 0, [KILLED]):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().vote(*arguments)

    live_state.TorchPerformer = Killed  # type: ignore[misc]

    @Wrapper(**SETTINGS, active_world_size=3)
    def train(call_wrapper: CallWrapper) -> list[str]:
        dist.init_process_group("gloo")
        live = LiveState(call_wrapper, build, seed=1)
        ddp = live.data_parallel(broadcast_buffers=False)
        found = []
        for step in live.steps(STEPS):
            live["optimizer"].zero_grad()
            ddp(torch.ones(8, 4) * (dist.get_rank() + 1)).sum().backward()
            choose = random.Random(f"{step} {dist.get_rank()}")
            # Most steps change nothing, so no rank expects a change.
            if choose.random() < 0.3 and (kind == "each" or dist.get_rank() == 0):
                change_some(live["model"], choose)
            mine = digest(live["model"])
            done.append(step)
            live.commit()
            found.append(digest(live["model"]))
            assert dist.get_rank() or found[-1] == mine, "rank 0's own buffers stay as they are"
        return found

    for kind in ("each", "first", "killed"):
        done: list[int] = []
        rank.say("call", kind=kind, value=train())


KILLED = 11
"""A step that changes some."""


def test_all_ranks_have_rank_0s_and_what_it_has_changed_is_not_lost_with_it(job: Job) -> None:
    """Rank 0 dies after telling the others; they finish the step with what it told them."""
    job.start(4, shares)
    job.wait_for_end()
    said = [one for process in job.ranks.values() for one in process.messages if one["event"] == "call"]
    each, first, killed = (
        [one["value"] for one in said if one["kind"] == kind and one["value"] is not None]
        for kind in ("each", "first", "killed")
    )
    assert each == [each[0]] * 3 and first == [first[0]] * 3
    assert len({*each[0]}) > 5 and len({*first[0]}) > 5
    assert "replicas differ" not in "".join(process.log for process in job.ranks.values())
    # If it died before they were ready, they redo the step.
    assert [*map(len, killed)] in ([STEPS - KILLED] * 3, [STEPS - KILLED - 1] * 3)
    assert killed == [first[0][-len(one) :] for one in killed]
