"""A job that saves at a notice: ``noticed.py FOLDER live|plain STEPS``. Prints what it does, a line each."""

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ft_wrapper import CallWrapper, Limits, LiveState, Wrapper

folder, kind, total = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
pause = float(os.environ.get("PAUSE", "0.02"))


def build() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)}


def restore(objects: dict[str, Any]) -> int:
    saved = sorted(folder.glob("step*.pt"), key=lambda path: int(path.stem[4:]))
    if not saved:
        return 0
    state = torch.load(saved[-1], weights_only=True)
    for name, one in objects.items():
        one.load_state_dict(state[name])
    return int(saved[-1].stem[4:])


def save(objects: dict[str, Any], step: int) -> None:
    say("saves", step)
    if dist.get_rank() == 0:
        part = folder / f"part.{os.getpid()}"
        torch.save({name: one.state_dict() for name, one in objects.items()}, part)
        part.rename(folder / f"step{step}.pt")


def say(what: str, result: object) -> None:
    # In one piece: ranks share their stdout, and an unbuffered print writes the end of the line apart.
    os.write(1, f"rank {dist.get_rank()} {what} {result}\n".encode())


def gradients(objects: dict[str, Any], step: int) -> None:
    objects["optimizer"].zero_grad()
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
    (objects["model"](data) - 1).square().mean().backward()
    for parameter in objects["model"].parameters():
        dist.all_reduce(parameter.grad)
    time.sleep(pause)


@Wrapper(rejoin=True, heartbeat_timeout=60, limits=Limits(warm_up=False))
def train(call_wrapper: CallWrapper | None = None) -> None:
    assert call_wrapper is not None
    dist.init_process_group("gloo")
    if kind == "live":
        live = LiveState(call_wrapper, build, restore=restore, on_notice=save)
        say("begins at", live.step)
        for step in live.steps(total):
            gradients(live, step)  # type: ignore[arg-type]
            live.commit()
            say("has done", step)
        finish(live["model"])
        return
    objects = build()
    first, saved = restore(objects), False
    say("begins at", first)
    for step in range(first, total):
        call_wrapper.ping(step)
        gradients(objects, step)
        objects["optimizer"].step()
        say("has done", step)
        if call_wrapper.notice and not saved:
            save(objects, step + 1)
            saved = True
    finish(objects["model"])


def finish(model: torch.nn.Module) -> None:
    weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    say("ends with", hashlib.sha256(weights).hexdigest()[:16])


train()
