"""What `flat.py` trains with Hugging Face: Trainer, Accelerate. Each iteration goes on from a checkpoint."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments

from ft_wrapper.checkpoints import Checkpoints
from ft_wrapper.integrations.accelerate import ForgetAccelerate, begin_step, load_newest, save_state
from ft_wrapper.integrations.transformers import FT

if TYPE_CHECKING:
    from flat import Flat

    from ft_wrapper import CallWrapper

with contextlib.suppress(ImportError):
    # transformers imports it where it is installed. In an iteration its defaults would be that one's group.
    import deepspeed  # noqa: F401

WIDTH = 512  # of a layer: 1 MB of weights
SETTINGS: dict[str, Any] = {"finalize": ForgetAccelerate()}


class _Model(torch.nn.Module):
    """Fails in its second step."""

    def __init__(self, flat: Flat) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self._flat, self._steps = flat, 0

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        if self._steps == 0:
            self._flat.made(self)
        if self._steps == 1:
            self._flat.fail()
        self._steps += 1
        return {"loss": self.layers(rows).sum()}


def transformers(flat: Flat, call_wrapper: CallWrapper) -> None:
    """An iteration with the Trainer."""
    ft = FT(call_wrapper, flat.folder)
    arguments = TrainingArguments(
        output_dir=ft.output_dir,
        max_steps=flat.restarts + 2,
        save_steps=1,
        per_device_train_batch_size=4,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = [{"rows": row} for row in torch.ones(10_000, WIDTH)]
    trainer = Trainer(_Model(flat), arguments, train_dataset=rows, callbacks=[ft.callback])
    trainer.train(resume_from_checkpoint=ft.newest())


def accelerate(flat: Flat, call_wrapper: CallWrapper) -> None:
    """An iteration with Accelerate."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    net = _Model(flat)
    data = DataLoader(TensorDataset(torch.ones(10_000, WIDTH)), 4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), data)
    checkpoints = Checkpoints(call_wrapper, flat.folder)
    first = load_newest(accelerator, checkpoints)
    for step, (batch,) in enumerate(accelerator.skip_first_batches(loader, first), first):
        if step == first + 2:
            return
        begin_step(accelerator, call_wrapper, step)
        accelerator.backward(model(batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        save_state(accelerator, checkpoints, step + 1)
