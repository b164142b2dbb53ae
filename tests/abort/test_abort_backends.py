"""Backends are aborted by what they can do, not by their class: in one order, within one start and end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ft_wrapper import torch_groups

TIMEOUT = 60.0


class Backend:
    """What the wrapper sees of one. Only the older NCCL's has a start and an end of its own."""

    def __init__(self, name: str, said: list[str], *, has_start: bool = False) -> None:
        self._name = name
        if has_start:
            self._group_start = lambda: said.append("start")
            self._group_end = lambda: said.append("end")

    def name(self) -> str:
        return self._name


class Group:
    """A group of one backend, or of two."""

    def __init__(self, name: str, said: list[str], *backends: Backend, fails: bool = False) -> None:
        self.name, self.fails = name, fails
        self._said = said
        self._by_device = dict(zip((torch.device("cuda"), torch.device("cpu")), backends, strict=False))
        self._device_types = [*self._by_device, torch.device("meta")]

    def _get_backend(self, device: torch.device) -> Backend:
        if device not in self._by_device:
            raise RuntimeError("no backend")
        return self._by_device[device]

    def abort(self) -> None:
        self._said.append(self.name)
        if self.fails:
            raise RuntimeError("it is broken")


def abort(*groups: Group) -> None:
    names = {group: group.name for group in groups}
    torch_groups._abort_backends(SimpleNamespace(_world=SimpleNamespace(pg_names=names)))


@pytest.mark.parametrize("name", ["nccl", "nccl2", "xccl", "someone's own"])
def test_any_backend_is_aborted(name: str) -> None:
    said: list[str] = []
    abort(*(Group(str(n), said, Backend(name, said), Backend("gloo", said)) for n in (0, 2, 1)))
    assert said == ["2", "1", "0"]


def test_gloo_is_left_to_its_sockets() -> None:
    said: list[str] = []
    abort(Group("0", said, Backend("gloo", said)))
    assert said == []


def test_all_are_aborted_within_one_start_and_end(caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    gloo, nccl = Backend("gloo", said), Backend("nccl", said, has_start=True)
    broken = Group("2", said, nccl, fails=True)
    with caplog.at_level(logging.WARNING):
        abort(Group("0", said, nccl, gloo), broken, Group("1", said, gloo))
    assert said == ["start", "2", "0", "end"]
    assert "could not abort group 2" in caplog.text


class Blocking(dist.ProcessGroup):
    """A Python class of its own: its collectives block until it is aborted."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.is_in, self._aborted = threading.Event(), threading.Event()

    def getBackendName(self) -> str:
        return "blocking"

    def barrier(self, options: Any = None) -> Any:
        self.is_in.set()
        assert self._aborted.wait(TIMEOUT), "it was not aborted"
        raise RuntimeError("aborted")

    def abort(self) -> None:
        self._aborted.set()


@pytest.fixture
def blocking() -> Iterator[Blocking]:
    """The default group of this process."""

    def make(store: Any, rank: int, size: int, timeout: Any) -> Blocking:
        return Blocking(rank, size)

    dist.Backend.register_backend("blocking", make, devices=["cpu"])
    dist.init_process_group("blocking", store=dist.HashStore(), rank=0, world_size=1)
    group: Any = dist.group.WORLD
    yield group
    torch_groups.release_process_groups(aborted=True)


def test_a_python_backend_is_freed(blocking: Blocking) -> None:
    raised: list[str] = []

    def wait() -> None:
        try:
            blocking.barrier()
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    assert blocking.is_in.wait(TIMEOUT)
    torch_groups.abort_all()
    thread.join(TIMEOUT)
    assert raised == ["aborted"]
