"""What `flat.py` trains with Lightning: its Trainer, and Fabric. Each iteration goes on from a checkpoint."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from ft_wrapper.integrations.lightning import FT

if TYPE_CHECKING:
    from flat import Flat

    from ft_wrapper import CallWrapper

WIDTH = 512  # of a layer: 1 MB of weights

logging.getLogger("lightning").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", module="lightning|torchdata")


def _data(call_wrapper: CallWrapper) -> Any:
    state, rows = call_wrapper.state, list(torch.ones(10_000, WIDTH))
    sampler: Any = DistributedSampler(rows, state.active_world_size, state.active_rank)  # type: ignore[arg-type]
    return StatefulDataLoader(rows, 4, sampler=sampler)


def _layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))


class _Module(L.LightningModule):
    def __init__(self, flat: Flat) -> None:
        super().__init__()
        self.layers = _layers()
        self._flat, self._steps = flat, 0

    def on_train_start(self) -> None:
        self._flat.made(self)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self._steps += 1
        if self._steps == 2:
            self._flat.fail()
        loss: torch.Tensor = self.layers(batch).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def lightning(flat: Flat, call_wrapper: CallWrapper) -> None:
    """An iteration with the Trainer."""
    ft = FT(call_wrapper, flat.folder, every=1)
    trainer = L.Trainer(
        **ft.trainer(),
        strategy="ddp",
        max_steps=flat.restarts + 2,
        callbacks=[ft.callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(_Module(flat), _data(call_wrapper), ckpt_path=ft.newest())


def lightning_fabric(flat: Flat, call_wrapper: CallWrapper) -> None:
    """An iteration with Fabric."""
    ft = FT(call_wrapper, flat.folder)
    fabric = L.Fabric(**ft.trainer(), strategy="ddp")
    fabric.launch()
    net = _layers()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    flat.made(model)
    data, state = _data(call_wrapper), {"model": model, "optimizer": optimizer}
    first = ft.load(fabric, state, data)
    for step, batch in enumerate(data, first):
        if step == first + 2:
            return
        if step == first + 1:
            flat.fail()
        ft.begin_step(step)
        fabric.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
        ft.save(fabric, state, step + 1, data)
