"""The fault runs' training with Megatron-core and DeepSpeed; what clears them stands in the docs' pages."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from framework_job import EVERY, Run, main, seed_step
from torch import nn

from ft_wrapper import CallWrapper
from ft_wrapper.checkpoints import Checkpoints

DOCS = Path(__file__).resolve().parents[2] / "docs"
WIDTH = 24
PAIR = 2  # ranks of a tensor parallel group


def recipe(page: str) -> Any:
    """The ``finalize`` that a page of the docs gives.

    Args:
        page: its name; one of its blocks of Python sets ``finalize``.

    Raises:
        ValueError: none of its blocks does, or several do.
    """
    return recipe_in((DOCS / page).read_text(), page)


def recipe_in(text: str, page: str) -> Any:
    """As `recipe`, of the text of a page."""
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    [block] = [each for each in blocks if re.search(r"^finalize = ", each, re.MULTILINE)] or [""]
    if not block:
        raise ValueError(f"docs/{page} has no block that sets finalize")
    names: dict[str, Any] = {}
    exec(compile(block, page, "exec"), names)
    return names["finalize"]


# Megatron-core: tensor parallel pairs, data parallel between them ----------------------------------------


def megatron(run: Run, call_wrapper: CallWrapper = None) -> None:
    """One run: a tensor parallel block, whose pairs of ranks average their gradients."""
    from megatron.core import num_microbatches_calculator, parallel_state

    run.begin(call_wrapper)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=PAIR)
    pair, replicas = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_group()
    num_microbatches_calculator.init_num_microbatches_calculator(dist.get_rank(), None, 8, 4, 2)
    model = megatron_layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpoints = Checkpoints(call_wrapper, run.folder / "checkpoints")
    first = 0
    if (newest := checkpoints.newest()) is not None:
        first = load(newest.path / f"tensor-parallel-{pair}.pt", model, optimizer)
    for step in range(first, run.steps):
        call_wrapper.ping()
        run.at(step)
        torch.manual_seed(10_007 * step + parallel_state.get_data_parallel_rank())  # a pair has one batch
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=replicas)
        optimizer.step()
        if (step + 1) % EVERY == 0:
            folder = checkpoints.path(step + 1)
            if parallel_state.get_data_parallel_rank() == 0:
                folder.mkdir(exist_ok=True)
                save(folder / f"tensor-parallel-{pair}.pt", model, optimizer, step + 1)
            checkpoints.seal(step + 1)
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, list(model.parameters()))
    run.end(everything)


def megatron_layers() -> nn.Module:
    """A block whose inner width is spread over a pair."""
    from megatron.core import ModelParallelConfig, tensor_parallel

    config = ModelParallelConfig(tensor_model_parallel_size=PAIR, use_cpu_initialization=True)
    torch.manual_seed(0)
    make = {"config": config, "init_method": nn.init.xavier_normal_, "bias": True}

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tensor_parallel.ColumnParallelLinear(WIDTH, 2 * WIDTH, gather_output=False, **make)
            self.outer = tensor_parallel.RowParallelLinear(
                2 * WIDTH, WIDTH, input_is_parallel=True, skip_bias_add=False, **make
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner, _ = self.inner(x)
            outer, _ = self.outer(torch.relu(inner))
            return outer

    return Block()


def save(path: Path, model: nn.Module, optimizer: Any, step: int) -> None:
    """Writes one rank's file."""
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)


def load(path: Path, model: nn.Module, optimizer: Any) -> int:
    """Loads one rank's file; returns its step."""
    state = torch.load(path, weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step: int = state["step"]
    return step


# DeepSpeed: ZeRO-1 ---------------------------------------------------------------------------------------


def deepspeed(run: Run, call_wrapper: CallWrapper = None) -> None:
    """One run: ZeRO-1, with DeepSpeed's own checkpoints."""
    import deepspeed

    run.begin(call_wrapper)
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, 1))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": 4,
            # By default 500 million numbers, which are allocated at each step.
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000},
            "zero_allow_untested_optimizer": True,
        },
    )
    try:
        train_engine(run, call_wrapper, engine)
    finally:
        engine.destroy()


def train_engine(run: Run, call_wrapper: CallWrapper, engine: Any) -> None:
    """The steps of a run."""
    checkpoints = Checkpoints(call_wrapper, run.folder / "checkpoints")
    first = 0
    if (newest := checkpoints.newest()) is not None:
        _, state = engine.load_checkpoint(str(newest), tag="state")
        first = state["step"]
    for step in range(first, run.steps):
        call_wrapper.ping()
        run.at(step)
        seed_step(step)
        engine.backward((engine(torch.randn(4, WIDTH)) - 1).square().mean())
        engine.step()
        if (step + 1) % EVERY == 0:
            folder = checkpoints.path(step + 1)
            state = {"step": step + 1}
            engine.save_checkpoint(str(folder), tag="state", client_state=state, save_latest=False)
            checkpoints.seal(step + 1)
    run.end(engine.module.state_dict())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--way", required=True)
    way = parser.parse_known_args()[0].way
    if way == "deepspeed":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from deepspeed.comm.torch import build_shm_op

        build_shm_op()  # the first use compiles for minutes; one rank does it
    main({"megatron": megatron, "deepspeed": deepspeed}[way], finalize=recipe(f"{way}.md"))
