"""`benchmarks/interrupts.py` with few interrupts: torch's and Python's contexts are whole after each."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.warm_ftrun import start_python

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "interrupts.py"
CONTEXTS = [
    "no_grad",
    "set_grad_enabled",
    "decorated_with_no_grad",
    "evaluation",
    "cudnn_flags",
    "patch_dict",
    "sdpa_kernel",
    "semaphore",
    "semaphore_and_finally",
    "semaphore_in_a_generator_manager",
    "default_dtype",
    "flop_counter_mode",
    "fake_tensors",
]

# What a restart does not put back.
NOT_PUT_BACK = [
    "inference_mode",
    "default_device",
    "saved_tensor_hooks",
    "parametrize_cached",
    "vmap",
    "func_grad",
    "func_jvp",
    "amp",
    "detect_anomaly",
    "multithreaded_backward",
    "mkldnn_flags",
]
NIGHTLY = pytest.mark.nightly("the other contexts are interrupted always")


def check(found: dict[str, Any], interrupts: int) -> None:
    assert len(found["took"]) == found["interrupts"] == interrupts
    assert (found["broken"], found["aborted"], found["stuck"], found["failed"]) == (0, 0, 0, 0), found


@pytest.fixture(scope="module")
def benchmark() -> Any:
    """The program as a module, whose processes have torch from their start."""
    spec = importlib.util.spec_from_file_location("interrupts_benchmark", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)

    def start(command: list[str], stdout: int, stderr: int, text: bool) -> subprocess.Popen[str]:
        return start_python(command[1:], stdout=stdout, stderr=stderr)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look themselves up there
        spec.loader.exec_module(module)
        patch.setattr(module, "subprocess", SimpleNamespace(Popen=start, PIPE=subprocess.PIPE))
        yield module


@pytest.mark.parametrize(
    "context", [*CONTEXTS, *(pytest.param(name, marks=NIGHTLY) for name in NOT_PUT_BACK)]
)
@pytest.mark.parametrize(
    "interrupts", [30, pytest.param(100, marks=pytest.mark.nightly("30 of them come always"))]
)
def test_a_context_is_whole_after_each_interrupt(benchmark: Any, context: str, interrupts: int) -> None:
    check(vars(benchmark.count(context, interrupts, seed=0)), interrupts)


@pytest.mark.nightly("the contexts are interrupted always")
def test_torch_compiles_after_it_was_interrupted_while_compiling() -> None:
    command = [sys.executable, str(SCRIPT), "--json", "--only", "aot_eager", "--interrupts", "6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    check(found, 6)
    assert found["inside"]
