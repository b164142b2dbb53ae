"""Small scripts as people have them, with loaders: after kills and exceptions the same losses as without."""

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

import pytest
import torch
import torch.distributed as dist
from rank_harness import SETTINGS, Job, Rank
from support.nightly import at_night
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ft_wrapper import CallWrapper, LiveState, Wrapper

pytestmark = pytest.mark.tcp_only("a test starts two jobs, each of which begins with its store")

STEPS = 14
Objects = dict[str, Any]


# ---- as minGPT's with DDP: characters, dropout, two workers, a shuffled DistributedSampler


class Characters(Dataset[Any]):
    text = torch.tensor([*map(ord, "to be, or not to be, that is the question: " * 4)]) % 32

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        part = self.text[3 * index : 3 * index + 9]
        return part[:-1], part[1:]


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, 16), nn.Embedding(8, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.drop(self.tokens(x) + self.places(torch.arange(8)))
        mask = nn.Transformer.generate_square_subsequent_mask(8)
        logits: torch.Tensor = self.head(self.block(found, src_mask=mask, is_causal=True))
        return logits


def build_gpt() -> Objects:
    model = Gpt()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=3e-3)}


def gpt_loader() -> DataLoader[Any]:
    data = Characters()
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data), num_workers=2)


def gpt_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


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


# ---- both


KINDS: dict[str, Any] = {
    "gpt": (build_gpt, None, gpt_loader, gpt_loss),
    "images": (build_images, update_images, image_loader, image_loss),
}


def trains(rank: Rank, kind: str, folder: str, faults: dict[str, str]) -> Any:
    build, update, make_loader, loss_of = KINDS[kind]

    @Wrapper(**SETTINGS, active_world_size=2)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        dist.init_process_group("gloo")
        live = LiveState(call_wrapper, build, update=update, seed=3)
        ddp = live.data_parallel(find_unused_parameters=True)
        for step, batch in live.batches(make_loader(), STEPS):
            live["optimizer"].zero_grad()
            loss = loss_of(ddp, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(live["model"].parameters(), 1.0)
            with Path(folder, f"losses-{dist.get_rank()}").open("a") as file:
                file.write(f"{step} {loss.item().hex()}\n")
            fault = faults.get(f"{call_wrapper.iteration}:{step}:{dist.get_rank()}")
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "raise":
                raise ValueError(f"in step {step}")
            live.commit()
        return [digest([each.state_dict() for each in live._kept.objects.values()]), live.step]

    try:
        return train()
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's stays from the first loader with workers on


def digest(tree: Any) -> str:
    found = hashlib.sha256()
    leaves, _ = torch.utils._pytree.tree_flatten(tree)
    for leaf in leaves:
        found.update(leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else repr(leaf).encode())
    return found.hexdigest()


def losses_of(folder: Path) -> dict[tuple[str, str], set[str]]:
    """Each rank's losses of each step; a step that is begun again has the same one."""
    losses = defaultdict(set)
    for path in folder.glob("losses-*"):
        for line in path.read_text().splitlines():
            step, loss = line.split()
            losses[path.name, step].add(loss)
    return losses


# An epoch of the first kind has 6 steps, of the second 5.
FAULTS = [
    {"0:3:0": "kill", "1:9:1": "kill"},
    {"0:4:1": "raise", "1:8:0": "raise", "2:11:0": "kill"},
]


@pytest.mark.parametrize(
    ("kind", "faults"),
    [
        *zip(KINDS, FAULTS, strict=True),
        *at_night("each kind and each fault runs always", zip(KINDS, reversed(FAULTS), strict=True)),
    ],
)
def test_the_same_losses_as_without_faults(
    job: Job, tmp_path: Path, kind: str, faults: dict[str, str]
) -> None:
    found = []
    for number, planned in enumerate(({}, faults)):
        folder = tmp_path / str(number)
        folder.mkdir()
        job.start(4, trains, kind, str(folder), planned)
        job.wait_for_end()
        ends = {tuple(process.value) for process in job.ranks.values() if process.code == 0 and process.value}
        found.append((ends, losses_of(folder)))
        assert len(ends) == 1 and len(found[-1][1]) == 2 * STEPS
        assert all(math.isfinite(float.fromhex(loss)) for one in found[-1][1].values() for loss in one)
    assert found[0] == found[1]
    killed = sum(process.code == -signal.SIGKILL for process in job.ranks.values())
    assert killed == [*faults.values()].count("kill")


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


def refused(rank: Rank) -> None:
    @Wrapper(**SETTINGS)
    def train(call_wrapper: CallWrapper) -> None:
        dist.init_process_group("gloo")
        live = LiveState(call_wrapper, build_images, seed=3)
        for _ in live.batches(x for x in range(3)):  # type: ignore[arg-type]
            live.commit()

    train()


def test_a_loader_without_a_length_ends_the_call_at_once(job: Job) -> None:
    job.start(1, refused)
    job.wait_for_end()
    assert job[0].error == "JobAbort" and "generator has no len()" in job[0].text
