"""Lightning: kills in mid-write, what the integration refuses, signal handlers, memory over many restarts."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")
pytest.importorskip("torchdata")

import lightning as L
import torch
from fakes import FakeCall, FakeCheckpoints
from framework_runs import KINDS, run_job
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from noticed_runs import check_notices, check_preemption
from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from ft_wrapper.exception import JobAbort
from ft_wrapper.integrations.lightning import FT, WholeFiles, check_order

pytestmark = pytest.mark.frameworks("lightning, torchdata")

# ---- killed in mid-write


@pytest.mark.usefixtures("warm_process")
@pytest.mark.timeout(900)
def test_no_torn_file_is_loaded_with_temporary_files_on_another_file_system(tmp_path: Path) -> None:
    """Where Lightning itself copies; twenty kills, in each of the first five checkpoints."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is no other file system")
    faults = [f"sigkill:write:{step}:0" for step in (0, 4, 8, 12, 16) * 4]
    with tempfile.TemporaryDirectory(dir=memory) as temporary:
        verdicts = run_job(KINDS["lightning"], tmp_path / "job", faults, Path(temporary))
    wrong = [f"{faults[v.number]}: {'; '.join(v.wrong)}" for v in verdicts if v.wrong]
    assert not wrong, "\n".join(wrong)
    assert len(verdicts) == 21
    assert [verdict.restarts for verdict in verdicts] == [0, *[1] * 20]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_file_is_whole_or_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    def tears(_: object, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    def no_temporary_files(*_: object, **__: object) -> None:
        raise AssertionError("TMPDIR is used")

    path = tmp_path / "folder" / "state.ckpt"
    if is_there:
        WholeFiles().save_checkpoint({"a": 1}, path)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", tears)
        patched.setattr(tempfile, "mkstemp", no_temporary_files)
        with pytest.raises(KeyboardInterrupt):
            WholeFiles().save_checkpoint({"a": 2}, path)
    assert [each.name for each in path.parent.iterdir()] == ["state.ckpt"] * is_there
    if is_there:
        assert WholeFiles().load_checkpoint(path) == {"a": 1}


# ---- notices


@pytest.mark.usefixtures("warm_process")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "batches"),
    [("lightning-steps", 1), ("lightning-steps", 3), ("lightning-fabric", 1), ("lightning-fabric", 2)],
)
def test_a_notice_saves_its_step_once(tmp_path: Path, name: str, batches: int) -> None:
    """An epoch has eight batches, so a Trainer's last step of it has two of three."""
    check_notices(name, tmp_path / "job", batches)


@pytest.mark.usefixtures("warm_process")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "batches"), [("lightning-steps", 3), ("lightning-fabric", 2)])
def test_a_preempted_job_goes_on_where_it_was(tmp_path: Path, name: str, batches: int) -> None:
    check_preemption(name, tmp_path, batches)


# ---- a Trainer on one process


class Module(L.LightningModule):
    """Notes a random number, and SIGTERM's handler, in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(4, 1)
        self.drawn: list[float] = []
        self.handlers: set[Any] = set()

    def training_step(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        self.drawn.append(torch.rand(()).item())
        self.handlers.add(signal.getsignal(signal.SIGTERM))
        loss: torch.Tensor = self.line(rows).square().mean()
        return loss

    def validation_step(self, rows: torch.Tensor, index: int) -> None:
        self.handlers.add(signal.getsignal(signal.SIGTERM))

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def ft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FT:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ft_wrapper.integrations.lightning.Checkpoints", FakeCheckpoints)
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    return FT(FakeCall(), tmp_path / "out", every=2)  # type: ignore[arg-type]


def data(rows: int, **arguments: Any) -> DataLoader[Any]:
    every: Any = list(torch.ones(rows, 4))
    return DataLoader(every, **arguments)


def trainer(ft: FT, *callbacks: Any, **arguments: Any) -> L.Trainer:
    arguments = {**ft.trainer(), "max_steps": 6, "callbacks": [*callbacks, ft.callback], **arguments}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return L.Trainer(**quiet, **arguments)


def test_it_pings_saves_and_seals(ft: FT) -> None:
    one = trainer(ft, num_sanity_val_steps=1)
    one.fit(Module(), data(4), data(3), ckpt_path=ft.newest())
    call: Any = ft._call_wrapper
    assert call.pings == 6 + 1 + 3
    assert ft._checkpoints.sealed == {step: {"state.ckpt"} for step in (2, 4, 6)}  # type: ignore[attr-defined]
    assert ft.newest() == str(Path("out/checkpoint-6/state.ckpt").absolute())
    for run in (one.test, one.predict):
        before = call.pings
        run(Module(), data(3))
        assert call.pings == before + 3


def test_a_step_with_several_batches_is_saved_once(ft: FT) -> None:
    trainer(ft, accumulate_grad_batches=3).fit(Module(), data(100))
    assert set(ft._checkpoints.sealed) == {2, 4, 6}  # type: ignore[attr-defined]


class TwoOptimizers(Module):
    """Each makes a step at each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, rows: torch.Tensor, index: int) -> None:  # type: ignore[override]
        self.manual_backward(self.line(rows).square().mean())
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.parameters()]


def test_the_steps_of_a_call_follow_each_other_with_several_optimizers(ft: FT) -> None:
    """The step at which all ranks see a notice is two steps ahead, which would else be the next batch."""
    call: Any = ft._call_wrapper
    call.noticed_at = 2
    trainer(ft, max_steps=10).fit(TwoOptimizers(), data(8))
    assert call.steps == [0, 1, 2, 3, 4]
    assert set(ft._checkpoints.sealed) == {2, 4, 6, 8, 10}  # type: ignore[attr-defined]


@pytest.mark.parametrize("batches", [1, 3])
def test_a_notice_has_its_step_saved(ft: FT, batches: int) -> None:
    ft._call_wrapper.noticed_at = 2  # type: ignore[attr-defined]
    trainer(ft, accumulate_grad_batches=batches).fit(Module(), data(100))
    assert set(ft._checkpoints.sealed) == {2, 3, 4, 6}  # type: ignore[attr-defined]


def test_a_step_has_its_own_random_numbers_whatever_was_drawn_before(ft: FT) -> None:
    drawn = []
    for others in (3, 8):
        torch.rand(others)
        module = Module()
        trainer(ft, max_steps=1, accumulate_grad_batches=2).fit(module, data(4))
        drawn.append(module.drawn)
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 2


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_lightning_s_signal_handlers_are_not_there(ft: FT, is_interrupted: bool) -> None:
    def own(*_: object) -> None:
        pass

    class Interrupted(BaseException):
        pass

    class Interrupts(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            if is_interrupted:
                raise Interrupted

    before = signal.signal(signal.SIGTERM, own)
    try:
        module = Module()
        one = trainer(ft, Interrupts())
        try:
            one.fit(module, data(4), data(2))
            one.validate(module, data(2))
            one.test(module, data(2))
            one.predict(module, data(2))
        except Interrupted:
            pass
        assert module.handlers == {own}
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- what is refused


@pytest.mark.parametrize(
    "callback",
    [lambda: ModelCheckpoint("best", save_on_exception=True), lambda: OnExceptionCheckpoint("best")],
)
def test_checkpoints_on_an_exception(ft: FT, callback: Any) -> None:
    with pytest.raises(JobAbort, match=r"Checkpoint saves when there is an exception.*leave save_on_exc"):
        trainer(ft, callback()).fit(Module(), data(4))
    assert not ft._checkpoints.sealed  # type: ignore[attr-defined]


def test_other_checkpoints_are_fine(ft: FT) -> None:
    trainer(ft, ModelCheckpoint("best")).fit(Module(), data(4))
    assert list(Path("best").iterdir())


def test_a_trainer_without_its_arguments(ft: FT) -> None:
    with pytest.raises(
        JobAbort, match=r"the Trainer has no arguments of FT: Trainer\(\*\*ft.trainer\(\), …\)"
    ):
        L.Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[ft.callback]).fit(Module(), data(4))


def test_other_plugins_are_kept(ft: FT) -> None:
    mine = object()
    assert ft.trainer(mine)["plugins"][-1] is mine
    with pytest.raises(Exception, match="Received multiple values for CheckpointIO"):
        L.Trainer(**ft.trainer(TorchCheckpointIO()))


@pytest.mark.parametrize("every", [0, "often", 2.5])
def test_every_is_a_number_of_steps(ft: FT, tmp_path: Path, every: Any) -> None:
    with pytest.raises(JobAbort, match=f"FT: every={every!r}"):
        FT(FakeCall(), tmp_path, every=every)  # type: ignore[arg-type]


def test_no_call_wrapper(tmp_path: Path) -> None:
    with pytest.raises(JobAbort, match="must be the CallWrapper that the function is given"):
        FT(None, tmp_path)  # type: ignore[arg-type]


def test_a_training_that_does_not_go_on(ft: FT) -> None:
    trainer(ft).fit(Module(), data(4))
    with pytest.raises(
        JobAbort, match=r"begins at step 0, but step 6 is saved: pass fit\(…, ckpt_path=ft.newest"
    ):
        trainer(ft).fit(Module(), data(4))
    trainer(ft, max_steps=8).fit(Module(), data(4), ckpt_path=ft.newest())
    assert set(ft._checkpoints.sealed) == {2, 4, 6, 8}  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_an_order_that_is_in_no_checkpoint(ft: FT, kind: Any) -> None:
    with pytest.raises(JobAbort, match=r"from a RandomSampler.*pass sampler=DistributedSampler\(…\)"):
        trainer(ft).fit(Module(), kind(list(torch.ones(4, 4)), shuffle=True))


def test_an_order_that_lightning_has_wrapped() -> None:
    rows: Any = range(4)
    with pytest.raises(JobAbort, match="from a WeightedRandomSampler"):
        check_order(DistributedSamplerWrapper(WeightedRandomSampler([1.0] * 4, 4), num_replicas=2, rank=0))
    for fine in (
        None,
        DistributedSampler(rows, 2, 0),
        DistributedSamplerWrapper(range(4), num_replicas=2, rank=0),
    ):
        check_order(fine)


# ---- Lightning's clean-up behind an interrupt

SCRIPT = r"""
import os
import signal
import sys
import threading
import time

import lightning as L
import torch
from lightning.pytorch.loggers import Logger

from ft_wrapper import CallWrapper, Limits, Wrapper
from ft_wrapper.integrations.lightning import FT

GRACE, SECONDS = map(float, sys.argv[1:])


class Slow(Logger):
    name = version = "slow"

    def log_metrics(self, *_, **__):
        pass

    log_hyperparams = log_metrics

    def finalize(self, status):
        if status == "failed":
            time.sleep(SECONDS)
            os.write(1, b"finalized\n")


class Module(L.LightningModule):
    def __init__(self, fails):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)
        self.fails = fails

    def training_step(self, rows, index):
        if self.fails and self.trainer.global_step == 2:
            if self.global_rank == 1:
                raise ValueError
            threading.Event().wait()  # for the interruption: in a collective the broken connection is faster
        return self.line(rows).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())


def own(*_):
    pass


@Wrapper(barrier_timeout=200, limits=Limits(cleanup_timeout=GRACE, max_same_faults=None))
def train(call_wrapper: CallWrapper = None):
    slot, iteration = call_wrapper.state.active_rank, call_wrapper.iteration
    os.write(1, f"entered with {signal.getsignal(signal.SIGTERM).__qualname__}\n".encode())  # in one piece
    ft = FT(call_wrapper, "checkpoints")
    logger = Slow() if slot == 0 else False
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": logger}
    trainer = L.Trainer(**ft.trainer(), **quiet, strategy="ddp", max_steps=4, callbacks=[ft.callback])
    data = torch.utils.data.DataLoader(list(torch.ones(64, 4)))
    trainer.fit(Module(iteration < 3), data, ckpt_path=ft.newest())


signal.signal(signal.SIGTERM, own)
train()
os.write(1, f"left with {signal.getsignal(signal.SIGTERM).__qualname__}\n".encode())
"""


@pytest.mark.parametrize(("grace", "seconds", "finalized"), [(60.0, 1.5, 3), (0.5, 1000.0, 0)])
def test_a_slow_logger_gets_its_grace_and_no_handler_is_left(
    tmp_path: Path, grace: float, seconds: float, finalized: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", "-m", "ft_wrapper.run", "--nproc-per-node", "2"]
    command += ["--max-rank-restarts", "0", str(script), str(grace), str(seconds)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("entered with own") == 2 * 4
    assert lines.count("left with own") == 2
    assert lines.count("finalized") == finalized


# ---- the page


@pytest.mark.parametrize("number", [0, 1])
def test_the_scripts_on_the_page_run(tmp_path: Path, number: int) -> None:
    text = (Path(__file__).parents[2] / "docs" / "lightning.md").read_text()
    scripts = [part.partition("```")[0] for part in text.split("```python\nimport ")[1:]]
    assert len(scripts) == 2
    (tmp_path / "train.py").write_text(f"import {scripts[number]}")
    options = ["--nproc-per-node", "3", "--active-world-size", "2", "--max-rank-restarts", "0"]
    command = [sys.executable, "-m", "ft_wrapper.run", *options, "train.py"]
    subprocess.run(command, cwd=tmp_path, timeout=300, check=True)
    assert (tmp_path / "final.ckpt").is_file()
