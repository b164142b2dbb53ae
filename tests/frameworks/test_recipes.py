"""The recipes of the docs: with them a second iteration has groups of its own, without them there is none."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

pytestmark = pytest.mark.frameworks("megatron-core, deepspeed")

SCRIPT = r"""
import sys, weakref
sys.path.insert(0, sys.argv[1])
import train_recipes
from ft_wrapper import Limits, Wrapper, find_leaks

way, without = sys.argv[2:]
page = f"{way}.md"
text = (train_recipes.DOCS / page).read_text()
lines = [line for line in text.splitlines() if not without or without not in line]
assert (len(lines) < len(text.splitlines())) == bool(without)
finalize = train_recipes.recipe_in("\n".join(lines), page)


def megatron():
    import torch.distributed as dist
    from megatron.core import num_microbatches_calculator, parallel_state
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, 8, 4, 2)
    dist.all_reduce(torch.ones(1), group=parallel_state.get_data_parallel_group())


def deepspeed():
    import deepspeed
    import torch.distributed as dist
    from deepspeed.comm import comm
    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo", verbose=False)
    assert all(each() is not comm.cdb for each in backends), "an old backend is still in use"
    backends.append(weakref.ref(comm.cdb))
    model = torch.nn.Linear(2, 2)
    zero = {"stage": 1, "reduce_bucket_size": 100, "allgather_bucket_size": 100}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
    config["zero_optimization"] = zero
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    engine.destroy()


import torch

backends = []


@Wrapper(finalize=finalize, limits=Limits(max_same_faults=3))
def train(call_wrapper=None):
    {"megatron": megatron, "deepspeed": deepspeed}[way]()
    if call_wrapper.iteration < 2:
        raise RuntimeError(f"fault {call_wrapper.iteration}")
    print("held:", [str(each) for each in find_leaks()], flush=True)


if way == "deepspeed":
    from deepspeed.comm.torch import build_shm_op
    build_shm_op()
train()
"""


def run(tmp_path: Path, way: str, without: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a rank through two faults; without those lines of the recipe that have a text in them."""
    if importlib.util.find_spec(way) is None:  # not imported: DeepSpeed sets variables
        pytest.skip(f"{way} is not installed")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ftrun = [sys.executable, "-m", "ft_wrapper.run", "--standalone", "--nproc-per-node", "1"]
    return subprocess.run(
        [*ftrun, str(script), str(HERE), way, without],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.parametrize("way", ["megatron", "deepspeed"])
def test_nothing_of_two_iterations_is_held(tmp_path: Path, way: str) -> None:
    done = run(tmp_path, way)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held: []" in done.stdout


@pytest.mark.parametrize(
    ("way", "without", "error"),
    [
        ("megatron", "parallel_state.destroy_model_parallel()", "already initialized"),
        ("megatron", ".destroy_num_microbatches_calculator()", "already initialized"),
        ("deepspeed", "comm.cdb = None", "an old backend is still in use"),
        ("deepspeed", "_release_process_group_references()", "is not registered"),
    ],
)
def test_without_one_of_its_lines_no_iteration_comes_through(
    tmp_path: Path, way: str, without: str, error: str
) -> None:
    done = run(tmp_path, way, without)
    assert done.returncode != 0, done.stdout + done.stderr
    assert error in done.stderr
    assert "held:" not in done.stdout


def test_a_page_without_a_recipe_is_an_error() -> None:
    recipes = importlib.import_module("train_recipes")
    with pytest.raises(ValueError, match="has no block that sets finalize"):
        recipes.recipe("lightning.md")
