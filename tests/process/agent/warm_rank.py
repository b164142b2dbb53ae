"""A rank that dies when it is told to, in a job whose aborts last until its next process is back.

``warm_rank.py STEPS FAULT ...``: each fault is a slot and the step after which it is killed, as ``1:10``, in
another iteration each.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from ft_wrapper import CallWrapper, FrozenState, LiveState, Wrapper
from ft_wrapper.abort import AbortTorchDistributed
from ft_wrapper.protocol import Agreement
from ft_wrapper.store import TCPStore

STEPS = int(sys.argv[1])
SLOT = int(os.environ["RANK"])
FAULTS = {int(slot): int(step) for slot, step in (fault.split(":") for fault in sys.argv[2:])}


def say(*words: object) -> None:
    print(" ".join(map(str, words)) + "\n", end="", flush=True)


class AbortsUntilItIsBack(AbortTorchDistributed):
    """Returns once the killed slot's next process has asked to be let in."""

    def __call__(self, state: FrozenState) -> FrozenState:
        state = super().__call__(state)
        host, _, port = os.environ["FT_WRAPPER_STORE"].rpartition(":")
        iterations = Agreement(TCPStore(host, int(port))).iterations
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            head = iterations.read_head()
            assert head is not None
            if {*FAULTS} & {member.slot for member in iterations.joins_of(head.n) if member.incarnation}:
                break
            time.sleep(0.01)
        return state


def build() -> dict[str, object]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


@Wrapper(rejoin=True, active_world_size=2, abort=AbortsUntilItIsBack())
def train(call_wrapper: CallWrapper | None = None) -> None:
    assert call_wrapper is not None
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    say("in", call_wrapper.iteration, "slot", SLOT, "rank", rank, "of", dist.get_world_size())
    live = LiveState(call_wrapper, build, seed=0)
    for step in live.steps(STEPS):
        call_wrapper.ping()
        loss = live["model"](torch.randn(4, 8)).square().mean()
        live["optimizer"].zero_grad()
        loss.backward()
        for parameter in live["model"].parameters():
            dist.all_reduce(parameter.grad)
        live.commit()
        say("did", step, "slot", SLOT, "rank", rank)
        if FAULTS.get(SLOT) == step and call_wrapper.iteration == sorted(FAULTS.values()).index(step):
            os.kill(os.getpid(), signal.SIGKILL)
    weights = b"".join(one.detach().numpy().tobytes() for one in live["model"].parameters())
    say("weights", hashlib.sha256(weights).hexdigest()[:16])


train()
