"""A process group that was there before the call: the error names what has made it, and where."""

from __future__ import annotations

import linecache
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import pytest

from ft_wrapper.restart.early_group import already_initialized


def made_class(module: str, name: str) -> type:
    return type(name, (), {"__module__": module})


TrainingArguments = made_class("transformers.training_args", "TrainingArguments")
Accelerator = made_class("accelerate.accelerator", "Accelerator")
Own = type("Own", (TrainingArguments,), {"__module__": "__main__"})
Fabric = made_class("lightning.fabric.fabric", "Fabric")
OwnTrainer = type(
    "OwnTrainer", (made_class("pytorch_lightning.trainer.trainer", "Trainer"),), {"__module__": "__main__"}
)
Unrelated = made_class("mylib.accelerate", "Accelerator")


@pytest.fixture
def accelerate(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Accelerate's module of singletons, which hold something."""
    module = types.ModuleType("accelerate.state")
    module.PartialState = type("PartialState", (), {"_shared_state": {"device": "cpu"}})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "accelerate.state", module)
    return module


@pytest.fixture
def run() -> Iterator[Any]:
    """Runs a script, and returns what it has put into ``said``."""
    names = []

    def run(script: str) -> str:
        name = f"<script {len(names)}>"
        names.append(name)
        source = textwrap.dedent(script)
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        variables: dict[str, Any] = {**globals(), "wrapped": lambda: already_initialized(sys._getframe(1))}
        exec(compile(source, name, "exec"), variables)
        return str(variables["said"]).replace(name, "train.py")

    yield run
    for name in names:
        linecache.cache.pop(name, None)


AT_THE_TOP = """
    args = TrainingArguments()
    said = wrapped()
"""
IN_A_FUNCTION = """
    def main():
        args = None  # of another function
        return args

    def start():
        first = 1
        accelerator, more = Accelerator(), 2
        return wrapped()

    said = start()
"""
IN_A_CALLER = """
    def train(args):
        return wrapped()

    def main():
        if True:
            own_args = Own()
        return train(own_args)

    said = main()
"""
GLOBAL = """
    def other():
        args = None
        return args

    def main():
        global args
        return wrapped()

    accelerator = Unrelated()
    later = args = Own()
    args2 = Accelerator()
    said = main()
"""


@pytest.mark.parametrize(
    ("script", "made"),
    [
        (AT_THE_TOP, "args (TrainingArguments) in train.py, line 2"),
        (IN_A_FUNCTION, "accelerator (Accelerator) in train.py, line 8"),
        (IN_A_CALLER, "own_args (TrainingArguments) in train.py, line 7"),
        (GLOBAL, "args (TrainingArguments) in train.py, line 11"),
    ],
)
def test_the_line_to_move_is_named(accelerate: object, run: Any, script: str, made: str) -> None:
    expected = f"a process group is already initialized, by {made}: move this line into the wrapped function"
    assert run(script) == expected


@pytest.mark.parametrize(
    ("script", "made"),
    [
        ("fabric = Fabric()\nsaid = wrapped()", "fabric (Fabric)"),
        ("trainer = OwnTrainer()\nsaid = wrapped()", "trainer (Trainer)"),
    ],
)
def test_lightning_has_made_it(run: Any, script: str, made: str) -> None:
    expected = f"already initialized, by {made} in train.py, line 1: move this line into the wrapped function"
    assert expected in run(script)


def test_accelerate_has_made_it_if_it_has_a_state(accelerate: object, run: Any) -> None:
    assert "by args (TrainingArguments)" in run(
        "fabric = Fabric()\nargs = TrainingArguments()\nsaid = wrapped()"
    )


def test_an_object_that_no_variable_holds(accelerate: object, run: Any) -> None:
    assert run("said = wrapped()") == (
        "a process group is already initialized, by an Accelerator or TrainingArguments of Hugging Face: "
        "make that inside the wrapped function"
    )


def test_source_that_is_no_python(accelerate: object) -> None:
    code = compile("\nargs = TrainingArguments()\nsaid = wrapped()", "/nowhere/train.py", "exec")
    variables = {**globals(), "wrapped": lambda: already_initialized(sys._getframe(1))}
    exec(code, variables)
    assert "of Hugging Face" in str(variables["said"])


def test_a_group_that_accelerate_has_not_made(accelerate: Any, run: Any) -> None:
    accelerate.PartialState._shared_state.clear()
    assert "destroy_process_group()" in run(AT_THE_TOP)
