"""Live state on the device: the same bits, and in which order a step is voted on and applied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import BACKEND, IS_CUDA, Rank, choosing, each_nccl, keep_busy, needs_gpu, run
from gpu_training_rank import STEPS, batch, build, digest
from torch.nn.parallel import DistributedDataParallel

from ft_wrapper import CallWrapper, Limits, LiveState, Wrapper
from ft_wrapper.live.wire import Ballot, Values

pytestmark = needs_gpu
BEFORE, IN_VOTE = 3, 6


class Planned(Exception):
    """A fault that a test wants."""


def trains(rank: Rank, faults: bool) -> tuple[str, list[str]]:
    """Trains with a slow backward pass; notes what a commit does, and what the device has done by then.

    Args:
        rank: the only one.
        faults: one before the commit of a step, one in the vote of another, when its gradients are whole.

    Returns:
        The final state's digest, and the notes.
    """
    torch.use_deterministic_algorithms(True)
    notes: list[str] = []
    committing: int | None = None
    wanted = {BEFORE, IN_VOTE} if faults else set()
    gradients: Any = torch.cuda.Event() if IS_CUDA else None
    vote = Ballot.vote

    def note_vote(self: Ballot, values: Values) -> Values:
        if committing is not None:
            done = gradients is None or gradients.query()
            notes.append(f"vote {committing}, gradients {'done' if done else 'queued'}")
            if committing == IN_VOTE and IN_VOTE in wanted:
                wanted.remove(IN_VOTE)
                raise Planned
        return vote(self, values)

    def update(objects: dict[str, Any]) -> None:
        notes.append(f"update {'in the recovery' if committing is None else committing}")
        objects["optimizer"].step()

    @Wrapper(limits=Limits(max_same_faults=None))
    def train(call_wrapper: CallWrapper) -> str:
        nonlocal committing
        committing = None
        dist.init_process_group(BACKEND)
        live = LiveState(call_wrapper, build, seed=0, update=update)
        ddp = DistributedDataParallel(live["model"], init_sync=False)
        for step in live.steps(STEPS):
            live["optimizer"].zero_grad()
            loss = (ddp(batch(step, 0)) - 1).square().mean()
            keep_busy(0.2)
            loss.backward()
            if gradients is not None:
                gradients.record()
            if step in wanted and step == BEFORE:
                wanted.remove(BEFORE)
                raise Planned
            committing = step
            live.commit()
            committing = None
        return digest(live)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ballot, "vote", note_vote)
        return train(), notes


@each_nccl
def test_the_order_of_a_step(nccl: str) -> None:
    """Live state: gradients are done before the vote, the update comes after it; same bits after faults"""
    ((clean, notes),) = run(trains, 1, False, environment=choosing(nccl))
    expected = [what for step in range(STEPS) for what in (f"vote {step}, gradients done", f"update {step}")]
    assert notes == expected
    ((state, notes),) = run(trains, 1, True, environment=choosing(nccl))
    expected[expected.index(f"update {IN_VOTE}")] = "update in the recovery"
    assert notes == expected
    assert state == clean
