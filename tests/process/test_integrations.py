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
