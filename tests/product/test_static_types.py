"""What type checkers, and so editors, see of the wrapper: its arguments, and the wrapped function's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")
ROOT = Path(__file__).parents[2]

# Torch is left out: to read it takes half a minute.
SETTINGS = f"""
[mypy]
follow_imports = silent
mypy_path = {ROOT}

[mypy-torch.*]
follow_imports = skip
"""
PROGRAM = """
from datetime import timedelta

from ft_wrapper import CallWrapper, Compose, Limits, Wrapper
from ft_wrapper.abort import AbortTorchDistributed
from ft_wrapper.rank_assignment import ActivateAllRanks, ShiftRanks
from ft_wrapper.state import FrozenState

def note(state: FrozenState) -> FrozenState:
    return state

@Wrapper(soft_timeout=timedelta(seconds=3), hard_timeout=5,
         limits=Limits(on_join="now", max_same_faults=None),
         rank_assignment=Compose(ActivateAllRanks(), ShiftRanks()), finalize=lambda state: None,
         abort=Compose(note, AbortTorchDistributed()))
def train(steps: int) -> str:
    return ""

loss: str = train(5)
train("five")
Wrapper(soft_timout=3)
Wrapper(soft_timeout="3")
Wrapper(abort=ShiftRanks())
Wrapper(on_join="now")
Limits(soft_timeout=3)
Limits(join_window="3")

@Wrapper
def bare(call_wrapper: CallWrapper, steps: int) -> str:
    call_wrapper.ping(step=1)
    call_wrapper.ping("one")
    return ""

@Wrapper(rejoin=True, use_global_iteration=True)
def second(steps: int, call_wrapper: CallWrapper | None = None) -> int:
    return 1

loss = bare(5)
bare("five")
count: int = second(5)
"""


@pytest.mark.nightly("mypy checks the package itself in each lint")
def test_wrong_arguments_are_found(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy", "--cache-dir", "cache", program.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert not done.stderr
    errors = [line.partition("error: ")[2] for line in done.stdout.splitlines() if "error: " in line]
    expected = (
        '"train" has incompatible type "str"',
        "soft_timout",
        'of "Wrapper" matches argument type "str"',
        '"abort" to',
        'keyword argument "on_join"',
        'keyword argument "soft_timeout"',
        '"join_window" to',
        '"ping" of "CallWrapper" has incompatible type "str"',
        '"bare" has incompatible type "str"',
    )
    for error, text in zip(errors, expected, strict=True):
        assert text in error
