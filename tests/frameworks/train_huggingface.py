"""The fault runs' training with Hugging Face: its Trainer, and Accelerate."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy
import safetensors.torch
import torch
import transformers.modeling_utils
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
from framework_job import EVERY, Run, cut, main
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from ft_wrapper import CallWrapper, LiveState
from ft_wrapper.checkpoints import Checkpoints
from ft_wrapper.integrations.accelerate import ForgetAccelerate, begin_step, load_newest, save_state
from ft_wrapper.integrations.transformers import FT


def train(run: Run, call_wrapper: CallWrapper = None) -> None:
    """One run."""
    run.begin(call_wrapper)
    ways = {"trainer": with_trainer, "accelerate": with_accelerate, "live": with_live_state}
    ways[run.way](run, call_wrapper)


# The Trainer ---------------------------------------------------------------------------------------------


def rows(first: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Rows of a language model's data, by number."""
    numbers = [torch.Generator().manual_seed(number) for number in range(first, first + count)]
    tokens = [torch.randint(32, (8,), generator=generator) for generator in numbers]
    return [{"input_ids": each, "labels": each} for each in tokens]


class Faults(TrainerCallback):
    """Faults at the beginning of a step."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Says which step begins."""
        self._run.at(state.global_step)


def with_trainer(run: Run, call: CallWrapper) -> None:
    """GPT2 with dropout, evaluation and two workers; ten steps are an epoch."""
    ft = FT(call, run.folder / "out")
    args = TrainingArguments(
        output_dir=ft.output_dir,
        max_steps=run.steps,
        save_steps=EVERY,
        eval_strategy="steps",
        eval_steps=6,
        gradient_accumulation_steps=run.batches,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        dataloader_num_workers=2,
        dataloader_persistent_workers=True,
        ddp_find_unused_parameters=True,  # else DDP's first step sums in another order than the later ones
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=1,
    )
    torch.manual_seed(0)  # the Trainer seeds when it is made, and that is too late for the model
    trainer = Trainer(
        GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2)),
        args,
        train_dataset=rows(0, 60),
        eval_dataset=rows(60, 9),
        callbacks=[ft.callback, Faults(run)],
    )
    trainer.train(resume_from_checkpoint=ft.newest())
    run.end({"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()["state"]})


# Accelerate ----------------------------------------------------------------------------------------------


def with_accelerate(run: Run, call: CallWrapper) -> None:
    """Dropout, shuffled; eight steps are an epoch."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=run.batches,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],  # as above
    )
    checkpoints = Checkpoints(call, run.folder / "checkpoints")
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    loader: Any = DataLoader(TensorDataset(torch.randn(48, 8)), batch_size=2, shuffle=True)
    # The loader's seed is this one: no other rank has it, and no later iteration.
    torch.manual_seed(run.rank if checkpoints.newest() is None else os.getpid())
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    step, is_noticed = load_newest(accelerator, checkpoints), False  # a step is a batch
    while step < run.steps * run.batches:
        epoch, done = divmod(step, len(loader))
        loader.set_epoch(epoch)
        for (batch,) in accelerator.skip_first_batches(loader, done) if done else loader:
            run.at(step // run.batches)
            is_noticed |= begin_step(accelerator, call, step)
            with accelerator.accumulate(model):
                accelerator.backward((model(batch) - 1).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            step += 1
            if accelerator.sync_gradients and (step % (EVERY * run.batches) == 0 or is_noticed):
                save_state(accelerator, checkpoints, step)
                is_noticed = False
            if step == run.steps * run.batches:
                break
    run.end({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})


class Pictures(Dataset[Any]):
    """As the computer vision example has them: random crops and flips."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        picture = torch.randn(3, 10, 10, generator=torch.Generator().manual_seed(index))
        top, left = random.randrange(3), numpy.random.randint(3)
        picture = picture[:, top : top + 8, left : left + 8]
        return picture.flip(-1) if torch.rand(()) < 0.5 else picture, index % 4


def build() -> dict[str, Any]:
    """A network with batch norm and dropout, and its training."""
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model = nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=100)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def with_live_state(run: Run, call: CallWrapper) -> None:
    """The computer vision example with a live state: no checkpoints, two workers that stay."""
    accelerator = Accelerator(cpu=True)
    live = LiveState(call, build, seed=0)
    model = live.data_parallel(find_unused_parameters=True)
    data = Pictures()
    loader = DataLoader(
        data, batch_size=2, sampler=DistributedSampler(data), num_workers=2, persistent_workers=True
    )
    for step, (pictures, labels) in live.batches(loader, run.steps):
        run.at(step)
        live["optimizer"].zero_grad()
        with accelerator.autocast():
            loss = nn.functional.cross_entropy(model(pictures), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        live.commit()
    run.end({name: live[name].state_dict() for name in ("model", "optimizer")})


# Files that are not written by torch.save ----------------------------------------------------------------

_save_model, _save_state = safetensors.torch.save_file, TrainerState.save_to_json


def _save_model_half(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
    _save_model(tensors, filename, *args, **kwargs)
    cut(filename)


def _save_state_half(self: TrainerState, json_path: str) -> None:
    _save_state(self, json_path)
    cut(json_path)


if __name__ == "__main__":
    transformers.modeling_utils.safe_save_file = _save_model_half
    TrainerState.save_to_json = _save_state_half  # type: ignore[method-assign]
    main(train, finalize=ForgetAccelerate(), initialize=ForgetAccelerate())
