"""Integrations of frameworks, where none of these is installed: small, and imported by their users alone."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from typing import Any

import pytest

from ft_wrapper import Wrapper
from ft_wrapper.integrations import accelerate
from ft_wrapper.integrations.noticed import begins_noticed
from ft_wrapper.protocol.notice import Notice
from ft_wrapper.state import FrozenState


@pytest.mark.parametrize(
    ("name", "framework", "install"),
    [
        ("lightning", "lightning", "this needs Lightning: pip install lightning"),
        ("transformers", "transformers", r"pip install 'transformers\[torch\]'"),
    ],
)
def test_a_framework_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, name: str, framework: str, install: str
) -> None:
    monkeypatch.setitem(sys.modules, framework, None)
    monkeypatch.delitem(sys.modules, f"ft_wrapper.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=install):
        importlib.import_module(f"ft_wrapper.integrations.{name}")


@pytest.mark.parametrize(
    ("version", "is_refused"), [("4.57.6", True), ("5.0.0rc1", False), ("5.23.0", False)]
)
def test_a_transformers_whose_trainer_has_other_arguments_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, is_refused: bool
) -> None:
    """Before, an AttributeError at the first step."""
    fake: Any = types.ModuleType("transformers")
    fake.__version__, fake.TrainerCallback = version, object
    monkeypatch.setitem(sys.modules, "transformers", fake)
    name = "ft_wrapper.integrations.transformers"
    monkeypatch.delitem(sys.modules, name, raising=False)
    text = r"FT needs transformers 5, not 4.57.6: pip install 'transformers\[torch\]>=5'"
    with pytest.raises(ImportError, match=text) if is_refused else contextlib.nullcontext():
        importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name, raising=False)  # it is not the real one's


def test_accelerate_that_is_not_imported_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    for known in [each for each in sys.modules if each.partition(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, known)
    for framework in ("accelerate", "transformers"):
        monkeypatch.setitem(sys.modules, framework, None)  # an import would fail
    importlib.reload(accelerate)
    state = FrozenState(rank=0, world_size=1)
    forget = accelerate.ForgetAccelerate()
    assert forget(state) is state
    Wrapper(finalize=forget, initialize=forget)


class Noticed:
    """In the place of a `CallWrapper`: all ranks see a notice from step 3 on."""

    rank = 0
    services: Any = types.SimpleNamespace()

    def __init__(self) -> None:
        self.notice: Notice | None = Notice("rank 0", "SIGUSR1", id="early")  # not agreed on yet

    def ping(self, step: int | None = None) -> None:
        if step is not None:
            self.notice = Notice("node 1", "SIGTERM", id="a", ends=step > 4) if step >= 3 else None


def test_the_step_at_whose_beginning_a_notice_is_seen() -> None:
    call: Any = Noticed()
    assert [step for step in range(7) if begins_noticed(call, step)] == [3]
    accelerator: Any = types.SimpleNamespace(process_index=0, gradient_accumulation_steps=1)
    call = Noticed()
    assert [step for step in range(7) if accelerate.begin_step(accelerator, call, step)] == [3]


def test_the_trainers_callback_has_that_step_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for transformers."""
    fake: Any = types.ModuleType("transformers")
    fake.__version__, fake.TrainerCallback = "5.0.0", object
    monkeypatch.setitem(sys.modules, "transformers", fake)
    name = "ft_wrapper.integrations.transformers"
    monkeypatch.delitem(sys.modules, name, raising=False)
    callback = importlib.import_module(name)._Callback(Noticed(), None, "out")
    saved = []
    for step in range(7):
        state, control = types.SimpleNamespace(global_step=step), types.SimpleNamespace(should_save=step == 6)
        callback.on_step_begin(types.SimpleNamespace(seed=0), state, control)
        callback.on_step_end(types.SimpleNamespace(save_strategy="steps"), state, control)
        saved += [step] * control.should_save
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert saved == [3, 6]
