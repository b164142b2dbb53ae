"""The fault runs' training with Lightning: its Trainer, and Fabric."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from framework_job import EVERY, Run, is_due, main
from torch import nn
from torch.utils.data import DistributedSampler, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from ft_wrapper import CallWrapper, Limits
from ft_wrapper.integrations.lightning import FT

STRATEGY = (
    "ddp_find_unused_parameters_true"  # else DDP's first step sums in another order than the later ones
)


def train(run: Run, call_wrapper: CallWrapper = None) -> None:
    """One run."""
    run.begin(call_wrapper)
    ft = FT(call_wrapper, run.folder / "checkpoints", every=EVERY)
    (with_fabric if run.way == "fabric" else with_trainer)(run, ft)


def loader(run: Run, first: int, count: int) -> Any:
    """Two workers, shuffled; eight steps are an epoch."""
    rows = [torch.randn(8, generator=torch.Generator().manual_seed(first + row)) for row in range(count)]
    sampler = DistributedSampler(rows, 3, run.rank)  # type: ignore[var-annotated,arg-type]
    return StatefulDataLoader(rows, batch_size=2, sampler=sampler, num_workers=2, persistent_workers=True)


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Endless; each rank's goes on at a speed of its own."""

    def __init__(self, rank: int) -> None:
        self._rank, self._position = rank, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker: Any = get_worker_info()
        while True:
            self._position += self._rank + 1
            seed = 100_000 * worker.id + 10_000 * self._rank + self._position
            yield torch.randn(8, generator=torch.Generator().manual_seed(seed))

    def state_dict(self) -> dict[str, int]:
        """The position."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on there."""
        self._position = state["position"]


def layers() -> nn.Sequential:
    """The model, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))


class Module(L.LightningModule):
    """Dropout, a scheduler, evaluation, and faults at the beginning of a step."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.layers = layers()
        self._run = run

    def on_train_batch_start(self, *_: Any) -> None:
        """Says which step begins."""
        self._run.at(self.trainer.global_step)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """A loss."""
        loss: torch.Tensor = (self.layers(batch) - 1).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        """Takes part in collectives."""
        self.log("evaluated", self.layers(batch).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """With a scheduler."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10), "interval": "step"}
        ]


def with_trainer(run: Run, ft: FT) -> None:
    """Three epochs, an evaluation behind each."""
    module = Module(run)
    trainer = L.Trainer(
        **ft.trainer(),
        strategy=STRATEGY,
        **{"max_epochs": run.steps // 8} if run.way == "epochs" else {"max_steps": run.steps},
        accumulate_grad_batches=run.batches,
        callbacks=[ft.callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = (
        StatefulDataLoader(Stream(run.rank), 2, num_workers=2) if run.way == "stream" else loader(run, 0, 48)
    )
    trainer.fit(module, data, loader(run, 100, 12), ckpt_path=ft.newest())
    (optimizer,) = trainer.optimizers
    run.end({"model": module.layers.state_dict(), "optimizer": optimizer.state_dict()["state"]})


def with_fabric(run: Run, ft: FT) -> None:
    """The same without evaluation."""
    fabric = L.Fabric(**ft.trainer(), strategy=STRATEGY)
    fabric.launch()
    net = layers()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    data = loader(run, 0, 48)
    state = {"model": model, "optimizer": optimizer}
    step = ft.load(fabric, state, data)
    steps = len(data) // run.batches  # of an epoch
    while step < run.steps:
        data.sampler.set_epoch(step // steps)
        for number, batch in enumerate(data, 1):
            is_last = number % run.batches == 0
            if number % run.batches == 1 % run.batches:
                run.at(step)
                is_noticed = ft.begin_step(step)
            with fabric.no_backward_sync(model, enabled=not is_last):
                fabric.backward((model(fabric.to_device(batch)) - 1).square().mean() / run.batches)
            if not is_last:
                continue
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % EVERY == 0 or is_noticed:
                ft.save(fabric, state, step, data)
            if step == run.steps:
                break
    run.end({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})


_copy = shutil.copyfile


def _copy_half(source: Any, target: Any, **options: Any) -> Any:
    """What moves a file to another file system."""
    if is_due("write"):
        half = Path(source).read_bytes()
        Path(target).write_bytes(half[: len(half) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    return _copy(source, target, **options)


if __name__ == "__main__":
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    shutil.copyfile = _copy_half
    main(train, limits=Limits(join_window=0.1, cleanup_timeout=2.0))
