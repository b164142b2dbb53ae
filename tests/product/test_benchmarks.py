"""The benchmarks run to their end, small, and print their tables. What they measure is tested elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
CONTEXTS = (
    *("no_grad", "set_grad_enabled", "decorated_with_no_grad", "evaluation", "cudnn_flags", "patch_dict"),
    *("sdpa_kernel", "semaphore", "semaphore_and_finally", "semaphore_in_a_generator_manager"),
    *("default_dtype", "flop_counter_mode", "fake_tensors", "inference_mode", "default_device", "vmap"),
    *("saved_tensor_hooks", "parametrize_cached", "func_grad", "func_jvp", "amp", "detect_anomaly"),
    *("multithreaded_backward", "mkldnn_flags"),
)
NIGHTLY = pytest.mark.nightly("what they measure is tested in tests/process always")


def run(folder: Path, name: str, *options: str, limit: float = 250.0) -> str:
    """What a benchmark prints."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stderr
    return done.stdout


@NIGHTLY
def test_restarts_leave_nothing(tmp_path: Path) -> None:
    printed = run(tmp_path, "flat", "--ddp", "11", "--fsdp2", "11")
    for kind in ("ddp", "fsdp2"):
        assert f"\n{kind}: 11 restarts of two ranks" in printed


@NIGHTLY
def test_hangs_are_noticed_and_the_job_goes_on(tmp_path: Path) -> None:
    job = ("--ranks", "2", "--steps", "0.02", "--hangs", "1", "--live")
    timeouts = ("--soft-timeout", "2", "--hard-timeout", "4")
    printed = run(tmp_path, "hangs", "--kinds", "sleep", "c_loop", *job, *timeouts)
    assert "0 lost, 0 done again; 2 hangs" in printed
    assert "0 restarts without a hang, 0 jobs given up" in printed
    assert "missed" not in printed


@NIGHTLY
def test_noise_is_no_fault(tmp_path: Path) -> None:
    noise = ("--noise", "gc", "loader", "sleep", "stop")
    timeouts = ("--soft-timeout", "60", "--hard-timeout", "90")
    printed = run(tmp_path, "false_alarms", "--seconds", "20", "--live", *noise, *timeouts)
    assert "0 lost, 0 done again" in printed


@NIGHTLY
@pytest.mark.timeout(1800)
def test_torchs_contexts_are_whole_after_each_interrupt(tmp_path: Path) -> None:
    for interrupts, contexts in (("6", ("aot_eager",)), ("30", CONTEXTS)):
        printed = run(
            tmp_path, "interrupts", "--json", "--interrupts", interrupts, "--only", *contexts, limit=1500
        )
        for found in map(json.loads, printed.splitlines()):
            assert [found[each] for each in ("broken", "aborted", "stuck", "failed")] == [0, 0, 0, 0], found
