"""A small script as people have it, with a loader: after kills and exceptions the same losses as without."""

from __future__ import annotations

import hashlib
import math
import os
import random
import signal
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_harness import SETTINGS, Job, Rank
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ft_wrapper import CallWrapper, LiveState, Wrapper

STEPS = 14
Objects = dict[str, Any]


# ---- as timm's: random operations on images, persistent workers, mixup, EMA, a cosine schedule


class Images(Dataset[Any]):
    OPERATIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda x: x.flip(-1),
        lambda x: x.roll(random.randint(-2, 2), -2),
        lambda x: x * random.uniform(0.5, 1.5),
        lambda x: x + 0.1 * torch.randn_like(x),
    )

    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> Any:
        import numpy

        image = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))
        for number in numpy.random.choice(4, 2):
            image = self.OPERATIONS[number](image)
        return image, index % 5


def mixup(samples: list[Any]) -> Any:
    images, labels = torch.utils.data.default_collate(samples)
    weight, other = random.betavariate(0.8, 0.8), torch.randperm(len(images))
    one_hot = nn.functional.one_hot(labels, 5).float()
    return images.lerp(images[other], weight), one_hot.lerp(one_hot[other], weight)


def build_images() -> Objects:
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    ema: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    return {"model": model, "ema": ema.requires_grad_(False), "optimizer": optimizer, "scheduler": scheduler}


def update_images(objects: Objects) -> None:
    objects["optimizer"].step()
    objects["scheduler"].step()
    objects["ema"].update_parameters(objects["model"])


def image_loader() -> DataLoader[Any]:
    data = Images()
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "collate_fn": mixup}
    return DataLoader(data, 4, sampler=DistributedSampler(data), drop_last=True, **options)


def image_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)


# ---- the jobs


def trains(rank: Rank, folder: str, plans: list[dict[str, str]]) -> None:
    """One wrapped call for each plan of faults, by iteration, step and rank; says what it ends with."""

    @Wrapper(**SETTINGS, active_world_size=2)
    def train(number: int, call_wrapper: CallWrapper = None) -> list[Any]:
        dist.init_process_group("gloo")
        live = LiveState(call_wrapper, build_images, update=update_images, seed=3)
        ddp = live.data_parallel(find_unused_parameters=True)
        for step, batch in live.batches(image_loader(), STEPS):
            live["optimizer"].zero_grad()
            loss = image_loss(ddp, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(live["model"].parameters(), 1.0)
            with Path(folder, f"{number}-losses-{dist.get_rank()}").open("a") as file:
                file.write(f"{step} {loss.item().hex()}\n")
            fault = plans[number].get(f"{call_wrapper.iteration}:{step}:{dist.get_rank()}")
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "raise":
                raise ValueError(f"in step {step}")
            live.commit()
        return [digest([each.state_dict() for each in live._kept.objects.values()]), live.step]

    try:
        for number in range(len(plans)):
            rank.say("call", number=number, value=train(number))
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's stays from the first loader with workers on


def digest(tree: Any) -> str:
    found = hashlib.sha256()
    leaves, _ = torch.utils._pytree.tree_flatten(tree)
    for leaf in leaves:
        found.update(leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else repr(leaf).encode())
    return found.hexdigest()


def losses_of(folder: Path, number: int) -> dict[tuple[str, str], set[str]]:
    """Each rank's losses of each step; a step that is begun again has the same one."""
    losses = defaultdict(set)
    for path in folder.glob(f"{number}-losses-*"):
        for line in path.read_text().splitlines():
            step, loss = line.split()
            losses[path.name[-1], step].add(loss)
    return losses


# An epoch has 5 steps.
FAULTS = {"0:3:0": "kill", "1:4:1": "raise", "2:8:0": "raise", "3:11:0": "kill"}


def test_the_same_losses_as_without_faults(job: Job, tmp_path: Path) -> None:
    job.start(4, trains, str(tmp_path), [{}, FAULTS])
    job.wait_for_end()
    said = [one for process in job.ranks.values() for one in process.messages if one["event"] == "call"]
    ends = [{tuple(one["value"]) for one in said if one["number"] == n and one["value"]} for n in range(2)]
    clean, faulty = (losses_of(tmp_path, number) for number in range(2))
    assert len(ends[0]) == 1 and ends[0] == ends[1]
    assert len(clean) == 2 * STEPS and clean == faulty
    assert all(math.isfinite(float.fromhex(loss)) for one in clean.values() for loss in one)
    killed = sum(process.code == -signal.SIGKILL for process in job.ranks.values())
    assert killed == [*FAULTS.values()].count("kill")


def draws(rank: Rank) -> list[Any]:
    """What a step draws, with a loader that draws and without one."""

    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        dist.init_process_group("gloo")
        found = []
        for name in ("with", "without"):
            live = LiveState(call_wrapper, build_images, seed=3, name=name)
            pairs = live.batches(DataLoader(Images(), 9, shuffle=True)) if name == "with" else None
            numbers = []
            for step in live.steps(6) if pairs is None else (step for step, _ in pairs):
                numbers.append([step, random.random(), torch.rand(()).item()])
                if step == 5:
                    break
                live["model"](torch.ones(2, 3, 8, 8)).sum().backward()
                live.commit()
            found.append(numbers)
        return found

    return train()


def test_what_a_loader_draws_does_not_move_a_steps_random_numbers(job: Job) -> None:
    job.start(1, draws)
    ((with_loader, without),) = job.wait()
    assert with_loader == without and len(without) == 6
