"""Hugging Face: kills in mid-save, what the integrations refuse, what of Accelerate is forgotten and kept."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from fakes import FakeCall, FakeCheckpoints
from framework_runs import KINDS, run_job
from noticed_runs import check_notices, check_preemption
from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from ft_wrapper import Wrapper
from ft_wrapper.exception import JobAbort
from ft_wrapper.integrations.accelerate import ForgetAccelerate, begin_step, load_newest, save_state
from ft_wrapper.integrations.transformers import FT
from ft_wrapper.state import FrozenState

pytestmark = pytest.mark.frameworks("transformers, accelerate")
STATE = FrozenState(rank=0, world_size=1)

# ---- the Trainer is killed while it saves

FILES = [
    *((0, name) for name in ("model.safetensors", "training_args.bin", "optimizer.pt", "scheduler.pt")),
    *((rank, f"rng_state_{rank}.pth") for rank in range(3)),
    (0, "trainer_state.json"),
]
PLACES = [(rank, f"write {name}") for rank, name in FILES] + [(rank, "seal") for rank in range(2)]


@pytest.mark.usefixtures("warm_process")
@pytest.mark.timeout(900)
def test_a_trainer_killed_in_mid_save_is_back_in_one_restart(tmp_path: Path) -> None:
    """In the first save, when there is no checkpoint to go back to, and in a later one; in each file."""
    faults = [f"sigkill:{point}:{step}:{rank}" for rank, point in PLACES for step in (0, 9)]
    assert len(faults) == 20
    verdicts = run_job(KINDS["transformers"], tmp_path / "job", faults)
    wrong = [f"{faults[v.number]}: {'; '.join(v.wrong)}" for v in verdicts if v.wrong]
    assert not wrong, "\n".join(wrong)
    assert len(verdicts) == 21
    again = [f"{faults[v.number]}: {v.restarts}" for v in verdicts[1:] if v.restarts != 1]
    assert not again, "more than one restart:\n" + "\n".join(again)


@pytest.mark.usefixtures("warm_process")
def test_accelerate_with_a_live_state_and_random_crops_ends_with_the_same_bits(tmp_path: Path) -> None:
    """After two kills in the middle of an epoch, whose length is 9."""
    verdicts = run_job(KINDS["accelerate-live"], tmp_path / "job", ["sigkill:step:5:0,sigkill:step:13:1"])
    assert [verdict.wrong for verdict in verdicts] == [[], []]


# ---- notices


@pytest.mark.usefixtures("warm_process")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("batches", [1, 2])
def test_a_trainer_saves_the_step_of_a_notice_once(tmp_path: Path, batches: int) -> None:
    """An epoch has 15 batches, so the last step of it may have one."""
    check_notices("transformers", tmp_path / "job", batches, saves_last=True)


@pytest.mark.usefixtures("warm_process")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("batches", [1, 3])
def test_accelerate_saves_the_step_of_a_notice_once(tmp_path: Path, batches: int) -> None:
    """Its checkpoints count batches."""
    check_notices("accelerate", tmp_path / "job", batches, unit=batches)


@pytest.mark.usefixtures("warm_process")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "batches", "unit"), [("transformers", 2, 1), ("accelerate", 3, 3)])
def test_a_preempted_job_goes_on_where_it_was(tmp_path: Path, name: str, batches: int, unit: int) -> None:
    check_preemption(name, tmp_path, batches, unit=unit)


# ---- the Trainer's callback, in a Trainer on one process


class Model(torch.nn.Module):
    """A Trainer's model with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(4, 1)

    def forward(self, rows: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        out = self.line(torch.nn.functional.dropout(rows, 0.5, self.training))
        return {"loss": (out - 1).square().mean(), "out": out}


@pytest.fixture
def ft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FT:
    monkeypatch.setattr("ft_wrapper.integrations.transformers.Checkpoints", FakeCheckpoints)
    return FT(FakeCall(), tmp_path / "out")  # type: ignore[arg-type]


def trainer(ft: FT, *callbacks: TrainerCallback, **arguments: Any) -> Trainer:
    """Two steps, of which each is saved, and four batches of evaluation behind each."""
    arguments = {"output_dir": ft.output_dir, "max_steps": 2, "save_steps": 1, "eval_steps": 1} | arguments
    arguments = {"eval_strategy": "steps", "save_strategy": "steps"} | arguments
    fixed = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "per_device_eval_batch_size": 1}
    args = TrainingArguments(**fixed, **arguments)
    rows = [{"rows": torch.ones(4), "labels": torch.zeros(1)}] * 4
    torch.manual_seed(0)
    return Trainer(
        Model(), args, train_dataset=rows * 8, eval_dataset=rows, callbacks=[ft.callback, *callbacks]
    )


def test_it_pings_and_seals_when_all_is_written(ft: FT) -> None:
    trainer(ft).train(resume_from_checkpoint=ft.newest())
    callback: Any = ft.callback
    assert callback._call_wrapper.pings == 2 + 2 * 4
    assert set(callback._checkpoints.sealed) == {1, 2}
    for names in callback._checkpoints.sealed.values():
        assert names >= {
            "model.safetensors",
            "optimizer.pt",
            "scheduler.pt",
            "rng_state.pth",
            "trainer_state.json",
        }
    assert ft.newest() == str(Path(ft.output_dir) / "checkpoint-2")


def test_a_step_has_its_own_random_numbers_whatever_was_drawn_before(ft: FT) -> None:
    class Draws(TrainerCallback):
        def __init__(self, others: int) -> None:
            self.seen: list[float] = []
            self.others = others

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.seen.append(torch.rand(()).item())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.rand(self.others)

    seen = []
    for others in (3, 8):
        draws = Draws(others)
        trainer(ft, draws, save_strategy="no").train()
        seen.append(draws.seen)
    assert seen[0] == seen[1] and len(set(seen[0])) == 2


def test_a_notice_in_the_last_step_of_an_epoch_that_is_saved_anyway(ft: FT) -> None:
    """Once, and behind the evaluation that the checkpoint is to have."""
    ft.callback._call_wrapper.noticed_at = 3
    epochs = {"eval_strategy": "epoch", "save_strategy": "epoch", "max_steps": 6}
    trainer(ft, **epochs, per_device_train_batch_size=8).train()
    assert set(ft.callback._checkpoints.sealed) == {4, 6}
    state = TrainerState.load_from_json(str(Path(ft.output_dir) / "checkpoint-4" / "trainer_state.json"))
    assert [entry["step"] for entry in state.log_history if "eval_loss" in entry] == [4]


@pytest.mark.parametrize(("unit", "saved"), [("steps", {2, 4}), ("epoch", {4, 6})])
def test_a_notice_in_a_step_whose_evaluation_would_decide(ft: FT, unit: str, saved: set[int]) -> None:
    """The Trainer saves the best ones alone: the evaluation is left out. An epoch has four steps."""
    ft.callback._call_wrapper.noticed_at = 3
    best = {"save_strategy": "best", "metric_for_best_model": "loss", "greater_is_better": True}
    steps = {"eval_strategy": unit, "eval_steps": 2, "max_steps": 6, "per_device_train_batch_size": 8}
    trainer(ft, **best, **steps).train()
    assert set(ft.callback._checkpoints.sealed) == saved


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"output_dir": "elsewhere"}, "output_dir='elsewhere' must be FT's output_dir"),
        ({"save_total_limit": 2}, r"save_total_limit= removes what is still needed: use FT\(…, keep=\)"),
        ({"save_only_model": True}, "save_only_model=True leaves out what a restart needs: leave it False"),
        ({"save_on_each_node": True}, "save_on_each_node=True writes a file several times: leave it False"),
        (
            {"accelerator_config": {"use_seedable_sampler": False}},
            "use_seedable_sampler=False loses the order",
        ),
        (
            {"train_sampling_strategy": "group_by_length"},
            "train_sampling_strategy='group_by_length' does so, too",
        ),
    ],
)
def test_arguments_that_do_not_go_with_restarts(
    ft: FT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    callback: Any = ft.callback
    refused = TrainerState()
    args = trainer(ft, **arguments).args
    with pytest.raises(JobAbort, match=words):
        callback.on_train_begin(args, refused, None)


def test_a_trainer_lets_a_refusal_through(ft: FT) -> None:
    with pytest.raises(JobAbort):
        trainer(ft, save_only_model=True).train()
    assert not ft.callback._checkpoints.sealed


def test_trials_are_refused(ft: FT) -> None:
    callback: Any = ft.callback
    with pytest.raises(JobAbort, match="wrap single trials"):
        callback.on_train_begin(trainer(ft).args, TrainerState(is_hyper_param_search=True), None)


def test_a_second_training_needs_another_folder(ft: FT) -> None:
    trainer(ft).train()
    with pytest.raises(JobAbort, match=r"a second train.* make another FT"):
        trainer(ft).train()
    trainer(ft, max_steps=3).train(resume_from_checkpoint=ft.newest())  # goes on with the first
    assert set(ft.callback._checkpoints.sealed) == {1, 2, 3}


def test_the_best_one_stays(ft: FT) -> None:
    assert ft.callback._checkpoints.keep == 3
    trainer(ft, load_best_model_at_end=True).train()
    assert ft.callback._checkpoints.keep > 1_000_000


# ---- Accelerate


@pytest.fixture(autouse=True)
def no_accelerator() -> Iterator[None]:
    """Each test begins and ends without."""
    ForgetAccelerate()(STATE)
    yield
    ForgetAccelerate()(STATE)


def accelerator(loader: DataLoader[Any] | None = None, *, seedable: bool = True, **arguments: Any) -> Any:
    """One with a model and a loader, both prepared; the loader is shuffled."""
    made = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable), **arguments
    )
    model = torch.nn.Linear(1, 1)
    loader = loader or DataLoader(range(16), batch_size=4, shuffle=True)  # type: ignore[arg-type]
    made.prepare(model, torch.optim.SGD(model.parameters()), loader)
    return made


def test_nothing_of_the_old_ranks_is_kept() -> None:
    accelerator()
    singletons = (PartialState, AcceleratorState, GradientState)
    assert all(each._shared_state for each in singletons)
    assert ForgetAccelerate()(STATE) is STATE
    assert not any(each._shared_state for each in singletons)
    Wrapper(finalize=ForgetAccelerate(), initialize=ForgetAccelerate())


def test_the_order_goes_on_with_the_seed_that_it_began_with(tmp_path: Path) -> None:
    orders = []
    for seed in (5, 6):
        ForgetAccelerate()(STATE)
        torch.manual_seed(seed)
        made = accelerator()
        checkpoints: Any = FakeCheckpoints(None, tmp_path, 3)
        if orders:
            checkpoints.sealed[2] = set()
        assert load_newest(made, checkpoints) == (2 if orders else 0)
        (loader,) = made._dataloaders
        loader.set_epoch(1)
        orders.append([batch.tolist() for batch in loader])
        save_state(made, checkpoints, 1 + len(orders))
        assert "custom_checkpoint_0.pkl" in checkpoints.sealed[1 + len(orders)]
    assert orders[0] == orders[1]
    torch.manual_seed(6)
    made = accelerator()
    loader = made._dataloaders[0]
    loader.set_epoch(1)
    assert [batch.tolist() for batch in loader] != orders[0], "this test shows nothing"


def test_the_steps_of_a_call_are_those_of_the_optimizer() -> None:
    """Within them ranks do not wait for each other: they would see a notice at different batches."""
    made, call = accelerator(gradient_accumulation_steps=3), FakeCall()
    for batch in range(7):
        begin_step(made, call, batch)  # type: ignore[arg-type]
    assert call.steps == [0, 0, 0, 1, 1, 1, 2]


def test_a_step_depends_on_seed_step_and_rank_alone() -> None:
    made, call = accelerator(), FakeCall()

    def drawn(step: int, seed: int = 0) -> float:
        torch.rand(7)
        begin_step(made, call, step, seed)  # type: ignore[arg-type]
        return torch.rand(()).item()

    assert drawn(3) == drawn(3)
    assert len({drawn(3), drawn(4), drawn(3, seed=1)}) == 3
    assert call.pings == 5
    ranked = SimpleNamespace(process_index=1, gradient_accumulation_steps=1)
    begin_step(ranked, call, 3)  # type: ignore[arg-type]
    assert torch.rand(()).item() != drawn(3)


@pytest.mark.parametrize("at", ["load", "save"])
@pytest.mark.parametrize(
    ("loader", "arguments", "words"),
    [
        (
            None,
            {"seedable": False},
            "number 1 takes its order from a RandomSampler.*use_seedable_sampler=True",
        ),
        (
            DataLoader(range(4), sampler=WeightedRandomSampler([1.0] * 4, 4)),  # type: ignore[arg-type]
            {},
            "from a WeightedRandomSampler.*set_epoch",
        ),
        (
            None,
            {"project_config": ProjectConfiguration("out", automatic_checkpoint_naming=True)},
            "automatic_checkpoint_naming=True saves in its own folder: leave it False",
        ),
    ],
)
def test_states_that_would_not_bring_back_all(
    tmp_path: Path, loader: Any, arguments: dict[str, Any], words: str, at: str
) -> None:
    made, checkpoints = accelerator(loader, **arguments), FakeCheckpoints(None, tmp_path, 3)
    with pytest.raises(JobAbort, match=words):
        if at == "load":
            load_newest(made, checkpoints)  # type: ignore[arg-type]
        else:
            save_state(made, checkpoints, 4)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_stateful_loader_is_refused(tmp_path: Path) -> None:
    made = accelerator()
    made._dataloaders[0].use_stateful_dataloader = True
    with pytest.raises(JobAbort, match=r"use_stateful_dataloader=True: .* use accelerator\.skip_first"):
        load_newest(made, FakeCheckpoints(None, tmp_path, 3))  # type: ignore[arg-type]


def test_nothing_is_prepared(tmp_path: Path) -> None:
    with pytest.raises(JobAbort, match=r"call accelerator.prepare\(model, …\) before load_newest"):
        load_newest(Accelerator(cpu=True), FakeCheckpoints(None, tmp_path, 3))  # type: ignore[arg-type]


def test_an_order_that_no_random_number_changes_is_fine(tmp_path: Path) -> None:
    data: Any = range(4)
    for sampler in (None, DistributedSampler(data, 1, 0, shuffle=True)):
        ForgetAccelerate()(STATE)
        made = accelerator(DataLoader(data, sampler=sampler), seedable=False)
        assert load_newest(made, FakeCheckpoints(None, tmp_path, 3)) == 0  # type: ignore[arg-type]


# ---- made before the call

EARLY = """
from ft_wrapper import Wrapper
from transformers import TrainingArguments

args = TrainingArguments(output_dir="out", use_cpu=True, report_to=[])


@Wrapper
def train():
    raise AssertionError("it was called")


train()
"""


def test_arguments_that_are_made_before_the_call_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(EARLY)
    command = [sys.executable, "-m", "ft_wrapper.run", "--nproc-per-node", "2", "--max-rank-restarts", "0"]
    ended = subprocess.run([*command, script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode != 0
    said = ended.stdout + ended.stderr
    assert "a process group is already initialized; " in said and "TrainingArguments()" in said
    assert "it was called" not in said


# ---- the pages


@pytest.mark.parametrize(
    ("page", "result"), [("transformers", "final/model.safetensors"), ("accelerate", "final.pt")]
)
def test_the_script_on_the_page_runs(tmp_path: Path, page: str, result: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text()
    script = text.split("```python\n")[1].partition("```")[0]
    (tmp_path / "train.py").write_text(script)
    options = ["--nproc-per-node", "3", "--active-world-size", "2", "--max-rank-restarts", "0"]
    command = [sys.executable, "-m", "ft_wrapper.run", *options, "train.py"]
    subprocess.run(command, cwd=tmp_path, timeout=300, check=True)
    assert (tmp_path / result).is_file()
