"""Compiled code of an old rank, garbage, and the process that writes checkpoints: in one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ft_wrapper.torch_groups import caches
from ft_wrapper.torch_groups.release import release_process_groups


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "_compiled_for", None)
    monkeypatch.setattr(caches, "_frozen", set())
    monkeypatch.setattr(caches, "_frozen_modules", [])
    monkeypatch.setattr(caches, "_warned", set())


# ---- compiled code


@torch.compile(backend="eager")
def rank_of_four(x: torch.Tensor) -> torch.Tensor:
    return x + dist.get_rank() + 10 * dist.get_world_size()


def asked_as(rank: int) -> float:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        return rank_of_four(torch.zeros(1)).item()
    finally:
        release_process_groups(aborted=True)


@pytest.fixture
def compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_compiled_code_of_the_old_rank_is_dropped(compiled: None) -> None:
    caches.reset_compiled_code(1, 4)
    assert asked_as(1) == 41
    assert caches.reset_compiled_code(0, 4)
    assert asked_as(0) == 40


def test_torch_alone_goes_on_as_the_old_rank(compiled: None) -> None:
    """Once this fails, torch knows that ranks move, and compiled code need not be dropped."""
    assert asked_as(1) == 41
    assert asked_as(0) == 41


def test_what_a_spare_has_compiled_is_dropped_when_it_enters(compiled: None) -> None:
    caches.reset_compiled_code_at_entry()
    assert asked_as(1) == 41  # in its warm-up, whatever it was there
    assert caches.reset_compiled_code(0, 4)
    assert asked_as(0) == 40


def test_a_rank_that_keeps_its_number_keeps_its_code(compiled: None) -> None:
    caches.reset_compiled_code(1, 4)
    assert asked_as(1) == 41
    assert not caches.reset_compiled_code(1, 4)


# ---- garbage


class Cycle:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def uncollected(frozen_again: None) -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_what_refers_to_itself_is_freed_at_each_restart(uncollected: None) -> None:
    for _ in range(3):
        gone = weakref.ref(Cycle())
        assert gone() is not None
        caches.collect_garbage("restart")
        assert gone() is None


class SelfHeld(torch.nn.Linear):
    """A model that the collector alone frees."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.__dict__["own"] = self


@pytest.mark.parametrize("there_at", ["call", "restart", "warm-up"])
def test_a_model_that_was_frozen_is_freed_once_another_one_is_there(uncollected: None, there_at: str) -> None:
    points = ["call", "restart", "warm-up"]
    model = None
    for when in points[: points.index(there_at) + 1]:
        if when == there_at:
            model = SelfHeld()
        caches.collect_garbage(when)
    old, count = weakref.ref(model), gc.get_freeze_count()
    caches.collect_garbage("restart")  # the model is kept, and nothing is looked at
    assert old() is not None and gc.get_freeze_count() >= count
    model = SelfHeld()
    caches.collect_garbage("restart")
    assert old() is None
    assert gc.get_freeze_count() > count / 2, "all is looked at in each restart from now on"
    del model


# ---- the process of async_save


def test_the_process_that_writes_checkpoints_is_ended_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.checkpoint._async_process_executor as executor

    done: list[Any] = []
    process = SimpleNamespace(kill=lambda: done.append("kill"), join=lambda timeout: done.append(timeout > 0))
    monkeypatch.setattr(executor, "_CHECKPOINT_PROCESS", SimpleNamespace(_save_process=process))
    caches.end_checkpoint_process()
    assert done == ["kill", True] and executor._CHECKPOINT_PROCESS is None
    caches.end_checkpoint_process()
    assert done == ["kill", True]
