"""Lightning: kills in mid-write, what the integration refuses, signal handlers, memory over many restarts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lightning")
pytest.importorskip("torchdata")

import lightning as L
import torch
from framework_runs import KINDS, run_job
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from ft_wrapper.exception import JobAbort
from ft_wrapper.integrations import _lightning_loaders
from ft_wrapper.integrations._lightning_checks import check_order
from ft_wrapper.integrations.lightning import FT

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
    written = list((tmp_path / "job").rglob("state.ckpt"))
    assert len(written) >= 21
    for path in written:
        assert torch.load(path, weights_only=False)["global_step"] % 4 == 0
