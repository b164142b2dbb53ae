"""`benchmarks/interrupts.py` with few interrupts: torch's and Python's contexts are whole after each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


def interrupt(context: str, interrupts: int) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), "--json", "--only", context, "--interrupts", str(interrupts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert len(found["took"]) == found["interrupts"] == interrupts
    assert (found["broken"], found["aborted"], found["stuck"], found["failed"]) == (0, 0, 0, 0), found
    return found


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_context_is_whole_after_each_interrupt(context: str) -> None:
    interrupt(context, 100)


def test_torch_compiles_after_it_was_interrupted_while_compiling() -> None:
    assert interrupt("aot_eager", 6)["inside"]
