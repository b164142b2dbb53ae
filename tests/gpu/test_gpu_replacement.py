"""Ranks under ftrun that fail on a GPU: who is replaced, and whether all bits are the same at the end."""

from __future__ import annotations

import functools
import itertools
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from gpu_ranks import BACKEND, choosing, each_nccl, needs_cuda, needs_gpu

sys.path.append(str(Path(__file__).parents[1] / "process" / "agent"))
from agent_job import FtRun

pytestmark = needs_gpu
SCRIPT = str(Path(__file__).with_name("gpu_training_rank.py"))


def trains(
    folder: Path, backend: str, how: str, nccl: str = "", at: int = 4
) -> tuple[set[str], list[int], str]:
    """Runs a job of two ranks to its end.

    Returns:
        The ranks' final states, how many processes each rank had, and all that was said.
    """
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **(choosing(nccl) if nccl else {})}
    arguments = ["--nproc-per-node", "2", SCRIPT, backend, how, str(at)]
    with FtRun(folder, *arguments, environment=environment) as job:
        assert job.end() == 0, job.said
        states = re.findall(r"final state (\w+)", job.said)
        assert len(states) == 2, job.said
        return set(states), [len(job.pids(rank)) for rank in range(2)], job.said


@functools.cache
def clean(backend: str, nccl: str = "") -> set[str]:
    """The final states without a fault."""
    with tempfile.TemporaryDirectory() as folder:
        states, processes, said = trains(Path(folder), backend, "clean", nccl)
    assert len(states) == 1 and processes == [1, 1], said
    return states


def test_the_state_goes_to_a_new_process_over_gloo(tmp_path: Path) -> None:
    """A rank is killed: its replacement receives the state on the device from a peer, over gloo; same bits"""
    state, processes, said = trains(tmp_path, "gloo", "kill")
    assert state == clean("gloo") and processes == [1, 2], said
    assert "goes on at step 4 from" in said and "0 steps lost" in said


@needs_cuda
def test_a_device_side_assert_replaces_its_process(tmp_path: Path) -> None:
    """A device-side assert: the process ends with HealthCheckError and is replaced; same bits"""
    state, processes, said = trains(tmp_path, "gloo", "assert")
    assert state == clean("gloo") and processes == [1, 2], said
    assert "HealthCheckError" in said and "device-side assert" in said, said


@each_nccl
@pytest.mark.parametrize(
    ("how", "at"),
    [
        *itertools.product(["exception", "hang", "kill"], [-1, 0, 4]),  # -1: before the first collective
        pytest.param("assert", 4, marks=needs_cuda),
    ],
)
def test_a_rank_fails_while_the_other_is_in_a_collective(
    nccl: str, how: str, at: int, tmp_path: Path, seen: Callable[[str], None]
) -> None:
    """A rank fails, the other waits for it in a collective: only a lost process is replaced; same bits"""
    state, processes, said = trains(tmp_path, BACKEND, how, nccl, at)
    lost = how in ("kill", "assert")
    assert state == clean(BACKEND, nccl) and processes == [1, 1 + lost], said
    (line,) = re.findall(r"restart 1: .*", said)
    seen(line.rpartition(", ")[2])
