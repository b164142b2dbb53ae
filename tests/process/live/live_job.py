"""What the fault runs are: a job of many runs, and the model.

A run is one wrapped call. The first one has no faults, and all others must end with the same bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import points
import torch
import torch.distributed as dist
from torch import nn

from ft_wrapper import CallWrapper, Compose, Limits, LiveState, Wrapper
from ft_wrapper.rank_assignment import FillGaps, MaxActiveWorldSize, ShiftRanks

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import train_lm

CHECKPOINT_EVERY = 5
OVERFLOWS = 7
"""The loss is infinite at each so-manieth step, if there is a GradScaler."""

SETTINGS: dict[str, Any] = {
    # An iteration's first step is slow on a busy machine: DTensor recomputes the sharding of each operation.
    "soft_timeout": 6.0,
    "hard_timeout": 9.0,
    "heartbeat_timeout": 10.0,
    "barrier_timeout": 60.0,
    "completion_timeout": 60.0,
    "heartbeat_interval": 0.2,
    "monitor_thread_interval": 0.1,
    "monitor_process_interval": 0.1,
    "progress_watchdog_interval": 0.1,
    "termination_grace_time": 0.3,
    "rejoin": True,
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """What a step is made of, and how a job goes on.

    Args:
        batch_norm: the model has running statistics.
        scaler: a GradScaler, with overflows.
        two_batches: gradients of two are accumulated.
        zero_after: gradients are zeroed behind the step.
        warm_up: DDP lays out its buckets in a backward pass before the first step.
        shift: ranks move down into gaps, instead of filling them from above.
    """

    batch_norm: bool
    scaler: bool
    two_batches: bool
    zero_after: bool
    warm_up: bool
    shift: bool

    @classmethod
    def of(cls, number: int) -> Variant:
        """The variant with this number: one bit for each."""
        return cls(*(bool(number >> bit & 1) for bit in range(len(dataclasses.fields(cls)))))


class Model(nn.Module):
    """The small language model of the examples, smaller."""

    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        self.language = train_lm.LanguageModel()
        self.norm = nn.BatchNorm1d(train_lm.CONTEXT) if batch_norm else nn.Identity()
        # In the middle of the backward pass.
        self.language.blocks[0].register_forward_hook(_ask_in_backward)

    def forward(self, x: torch.Tensor) -> Any:
        """The next bytes' scores."""
        return self.norm(self.language(x))


def _ask_in_backward(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: points.current.check("backward"))


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a job.

    Args:
        number: seed of its faults; the first one has none.
        folder: for its checkpoints and marks.
        steps: how many it trains.
        variant: what a step is made of.
        faults: what is to happen.
    """

    number: int
    folder: Path
    steps: int
    variant: Variant
    faults: list[points.Planned]

    def optimizers(self, model: nn.Module) -> dict[str, Any]:
        """All of the state but the model."""
        many, few = ([p for p in model.parameters() if (p.ndim > 1) is is_many] for is_many in (True, False))
        groups = [{"params": many, "weight_decay": 0.1}, {"params": few, "weight_decay": 0.0}]
        optimizer = points.TwoGroups(groups, lr=1e-3)
        objects: dict[str, Any] = {"optimizer": optimizer}
        objects["scheduler"] = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 3e-3, total_steps=self.steps + 1
        )
        if self.variant.scaler:
            objects["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=5)
        return objects

    @property
    def names(self) -> list[str]:
        """Of the objects of the state."""
        return ["model", "optimizer", "scheduler", *(["scaler"] if self.variant.scaler else [])]

    def begin(self, call: CallWrapper) -> None:
        """Makes this iteration's group, and its points."""
        self.folder.mkdir(parents=True, exist_ok=True)
        call.process_group("gloo")
        slot, rank = call.state.initial_rank, dist.get_rank()
        place = {"run": self.number, "iteration": call.iteration, "slot": slot, "rank": rank}
        points.current = points.Points(self.faults, self.folder, **place)
        points.current.say("entered")

    def recovered(self, live: LiveState) -> None:
        """Says what the recovery has done."""
        plan = live.plan
        routes = [(route.receiver, route.holders) for route in plan.routes]
        points.current.say(
            "recovered",
            rung=plan.rung.name,
            step=live.step,
            lost=plan.lost,
            rolls=sorted(plan.rolls),
            routes=routes,
        )

    def train(self, live: LiveState, model: nn.Module, no_sync: Callable[[], Any], save: Any) -> None:
        """All steps that are left.

        Args:
            live: the state.
            model: what is trained, as it is called.
            no_sync: a block in which gradients stay on the rank.
            save: called after some steps.
        """
        optimizer, scaler = live["optimizer"], live["scaler"] if self.variant.scaler else None
        for step in live.steps(self.steps):
            points.current.step = step
            points.current.check("step")
            if not self.variant.zero_after:
                optimizer.zero_grad()
            if self.variant.two_batches:
                with no_sync():
                    self._backward(model, scaler, is_infinite=False)
            points.current.check("micro")
            self._backward(model, scaler, is_infinite=step % OVERFLOWS == OVERFLOWS - 1)
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(live["model"].parameters(), 1.0)
            live.commit()
            points.current.check("after commit")
            if self.variant.zero_after:
                optimizer.zero_grad()
            if live.step % CHECKPOINT_EVERY == 0:
                save()

    def _backward(self, model: nn.Module, scaler: Any, *, is_infinite: bool) -> None:
        loss = loss_of(model)
        if scaler is not None:
            loss = scaler.scale(loss * (float("inf") if is_infinite else 1.0))
        loss.backward()

    def save(self, call: CallWrapper, live: LiveState) -> None:
        """Writes a checkpoint, as a whole or not at all."""
        with call.atomic():
            path = self.folder / f"step-{live.step:04}.pt"
            unfinished = path.with_suffix(f".{os.getpid()}")
            torch.save({name: live[name].state_dict() for name in self.names}, unfinished)
            os.replace(unfinished, path)

    def restore(self, objects: dict[str, Any]) -> int:
        """Loads the newest checkpoint; returns its step."""
        found = [0]
        if dist.get_rank() == 0:
            found = [max((int(path.stem[5:]) for path in self.folder.glob("step-*.pt")), default=0)]
        dist.broadcast_object_list(found)
        if found[0] > 0:
            state = torch.load(self.folder / f"step-{found[0]:04}.pt", weights_only=False)
            for name, value in objects.items():
                value.load_state_dict(state[name])
        return found[0]

    def end(self, live: LiveState) -> None:
        """Says what came out."""
        live["optimizer"].zero_grad()
        digest = hashlib.sha256()
        for name in self.names:
            _add(digest, live[name].state_dict())
        points.current.say("finished", digest=digest.hexdigest(), step=live.step)


def _add(digest: Any, value: Any) -> None:
    """Adds a state."""
    if isinstance(value, dict):
        for key in sorted(value, key=repr):
            digest.update(repr(key).encode())
            _add(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for each in value:
            _add(digest, each)
    elif isinstance(value, torch.Tensor):
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        digest.update(repr(value).encode())


_text: list[torch.Tensor] = []


def loss_of(model: nn.Module) -> torch.Tensor:
    """The loss on a batch of two, by torch's random numbers."""
    if not _text:
        _text.append(train_lm.load_text())
    return train_lm.loss_of(model, _text[0], 2, torch.device("cpu"))


def train(run: Run, call_wrapper: CallWrapper = None) -> None:
    """One run."""
    run.begin(call_wrapper)

    def build() -> dict[str, Any]:
        model = Model(run.variant.batch_norm)
        return {"model": model, **run.optimizers(model)}

    live = LiveState(call_wrapper, build, restore=run.restore, seed=0)
    run.recovered(live)
    # Buckets in the same order in each iteration, or the sums of the first step have other bits.
    in_order = not run.variant.warm_up
    ddp = live.data_parallel("model", find_unused_parameters=in_order)
    if run.variant.warm_up:
        loss_of(ddp).backward()
        live["optimizer"].zero_grad()
    is_writer = call_wrapper.state.active_rank == 0
    run.train(live, ddp, ddp.no_sync, lambda: is_writer and run.save(call_wrapper, live))
    run.end(live)


def main() -> None:
    """As many wrapped calls as there are runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--first", type=int, required=True, help="the first seed")
    parser.add_argument("--runs", type=int, required=True, help="with faults; a clean one comes before")
    parser.add_argument("--active", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--variant", type=int, required=True)
    args = parser.parse_args()
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.INFO)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    train_lm.TEXT_BYTES, train_lm.WIDTH, train_lm.CONTEXT = 100_000, 32, 32
    points.install()
    variant = Variant.of(args.variant)
    places = Compose(MaxActiveWorldSize(args.active), ShiftRanks() if variant.shift else FillGaps())
    settings = {**SETTINGS, "rank_assignment": places, "min_world_size": args.active}
    settings["limits"] = Limits(join_window=0.1)
    wrapped = Wrapper(**settings)(train)
    for number in (-1, *range(args.first, args.first + args.runs)):
        faults = [] if number < 0 else points.random_faults(number, args.steps, args.active)
        wrapped(Run(number, args.folder / f"run-{number}", args.steps, variant, faults))
    print("all runs are through", flush=True)


if __name__ == "__main__":
    main()
