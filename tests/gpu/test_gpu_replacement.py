"""Processes that are lost on a GPU and replaced by ftrun; their state comes from a living peer."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from gpu_ranks import choosing, each_nccl, needs_cuda, needs_gpu, needs_two_gpus

sys.path.append(str(Path(__file__).parents[1] / "agent"))
from agent_job import FtRun

pytestmark = needs_gpu
SCRIPT = str(Path(__file__).with_name("gpu_training_rank.py"))


def trains(folder: Path, backend: str, how: str, nccl: str = "") -> tuple[set[str], list[int], str]:
    """Runs a job of two ranks to its end.

    Returns:
        The ranks' final states, how many processes each rank had, and all that was said.
    """
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **(choosing(nccl) if nccl else {})}
    with FtRun(folder, "--nproc-per-node", "2", SCRIPT, backend, how, environment=environment) as job:
        assert job.end() == 0, job.said
        states = re.findall(r"final state (\w+)", job.said)
        assert len(states) == 2, job.said
        return set(states), [len(job.pids(rank)) for rank in range(2)], job.said


def test_the_state_goes_to_a_new_process_over_gloo(tmp_path: Path) -> None:
    """A rank is killed: its replacement receives the state on the device from a peer, over gloo; same bits"""
    clean, processes, _ = trains(tmp_path / "clean", "gloo", "clean")
    assert len(clean) == 1 and processes == [1, 1]
    state, processes, said = trains(tmp_path / "kill", "gloo", "kill")
    assert state == clean and processes == [1, 2], said
    assert "goes on at step 4 from" in said and "0 steps lost" in said


@needs_cuda
def test_a_device_side_assert_replaces_its_process(tmp_path: Path) -> None:
    """A device-side assert: the process ends with HealthCheckError and is replaced; same bits"""
    clean, _, _ = trains(tmp_path / "clean", "gloo", "clean")
    state, processes, said = trains(tmp_path / "assert", "gloo", "assert")
    assert state == clean and processes == [1, 2], said
    assert "HealthCheckError" in said and "device-side assert" in said, said


@each_nccl
@needs_two_gpus
@pytest.mark.parametrize("how", ["kill", "assert"])
def test_a_rank_is_replaced_with_nccl(nccl: str, how: str, tmp_path: Path) -> None:
    """A rank on a GPU of its own is lost and replaced, with NCCL; same bits"""
    clean, _, _ = trains(tmp_path / "clean", "nccl", "clean", nccl)
    state, processes, said = trains(tmp_path / how, "nccl", how, nccl)
    assert state == clean and processes == [1, 2], said
