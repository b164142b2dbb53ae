"""Backends are aborted by what they can do, not by their class: all at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from ft_wrapper.abort import Abort, AbortProcesses, AbortTorchDistributed, may_hang
from ft_wrapper.compose import Compose
from ft_wrapper.state import FrozenState
from ft_wrapper.testing import OnAbort, blocking_backend
from ft_wrapper.torch_groups import abort as _abort
from ft_wrapper.torch_groups.abort import abort_all, describe_pending_aborts
from ft_wrapper.torch_groups.release import release_process_groups

TIMEOUT = 60.0


class Backend:
    """What the wrapper sees of one."""

    def __init__(self, name: str) -> None:
        self._name = name

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
    with mock.patch.object(_abort, "c10d", SimpleNamespace(_world=SimpleNamespace(pg_names=names))):
        _abort._abort_backends()


def test_any_backend_is_aborted_but_gloo_which_is_left_to_its_sockets() -> None:
    said: list[str] = []
    names = ["nccl", "nccl2", "someone's own"]
    abort(*(Group(name, said, Backend(name), Backend("gloo")) for name in [*names, "gloo"]))
    assert sorted(said) == sorted(names)


def test_one_that_fails_keeps_no_other_from_it(caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    gloo, nccl = Backend("gloo"), Backend("nccl")
    with caplog.at_level(logging.WARNING):
        abort(Group("0", said, nccl, gloo), Group("2", said, nccl, fails=True), Group("1", said, gloo))
    assert sorted(said) == ["0", "2"]
    assert "could not abort group 2 of nccl" in caplog.text
    assert describe_pending_aborts() == "not in a process group"


def test_those_whose_abort_has_not_returned_are_named() -> None:
    class Slow(Group):
        has_begun, may_end = threading.Event(), threading.Event()

        def abort(self) -> None:
            self.has_begun.set()
            assert self.may_end.wait(TIMEOUT)

    quick, slow = Group("0", [], Backend("nccl")), Slow("1", [], Backend("nccl"), Backend("gloo"))
    aborting = threading.Thread(target=abort, args=(quick, slow), daemon=True)
    aborting.start()
    assert slow.has_begun.wait(TIMEOUT)
    while "group 0" in describe_pending_aborts():  # its thread is about to end
        assert aborting.is_alive()
    assert describe_pending_aborts() == "group 1 of nccl, gloo"
    slow.may_end.set()
    aborting.join(TIMEOUT)
    assert describe_pending_aborts() == "not in a process group"


def test_before_torch_2_8_backends_are_aborted_where_they_can() -> None:
    said: list[str] = []
    nccl, gloo = Backend("nccl"), Backend("gloo")
    nccl.abort = lambda: said.append("nccl")  # type: ignore[attr-defined]

    class OldGroup(Group):
        abort = property()  # type: ignore[assignment]  # as if there were none

    abort(OldGroup("0", said, nccl, gloo))
    assert said == ["nccl"]


# ---- what needs a thread of its own


class Own(Abort):
    def __call__(self, state: FrozenState) -> FrozenState:
        return state


class OwnTorch(AbortTorchDistributed):
    pass


@pytest.mark.parametrize("own", [Own(), OwnTorch(), AbortProcesses(list), lambda state: state])
def test_a_users_plug_in_may_hang(own: Any) -> None:
    plain = Compose(AbortProcesses(), AbortTorchDistributed())
    assert not may_hang(plain) and not may_hang(None)
    assert may_hang(own)
    assert may_hang(Compose(own, plain))


def test_ending_processes_may_take_long_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as their grace time, or the user's ``spare``."""
    assert not may_hang(AbortProcesses(keep=lambda process: True, termination_grace_time=100.0))
    monkeypatch.setattr("ft_wrapper.abort.find_children", lambda: ["a child"])
    assert may_hang(AbortProcesses())


@pytest.mark.parametrize("backend", ["gloo", blocking_backend()])
def test_torchs_abort_may_hang_where_a_backend_aborts(backend: str, release: None) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.new_group([0], backend=backend)
    assert may_hang(Compose(AbortProcesses(), AbortTorchDistributed())) == (backend != "gloo")


def test_torchs_abort_may_hang_where_groups_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_abort, "groups_that_abort", None)
    assert may_hang(AbortTorchDistributed())


# ---- the stand-in


@pytest.fixture
def release() -> Iterator[None]:
    yield
    release_process_groups(aborted=True)


class Blocked:
    """A thread in a collective of a group that never ends by itself."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.raised: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert group.is_blocked.wait(TIMEOUT)

    def _run(self) -> None:
        try:
            dist.all_reduce(torch.ones(1), group=self.group)
        except RuntimeError as error:
            self.raised.append(str(error))

    def is_freed(self) -> bool:
        self._thread.join(TIMEOUT)
        return len(self.raised) == 1 and "was aborted" in self.raised[0]


def groups_of(*kinds: OnAbort) -> list[Any]:
    """Groups of this process alone."""
    first, *others = map(blocking_backend, kinds)
    dist.init_process_group(first, store=HashStore(), rank=0, world_size=1)
    return [dist.group.WORLD, *(dist.new_group([0], backend=name) for name in others)]


THREE = (OnAbort.RETURNS, OnAbort.IS_SLOW, OnAbort.RAISES)


@pytest.mark.parametrize("kinds", [THREE, THREE[::-1]])
def test_three_blocked_groups_are_freed(kinds: tuple[OnAbort, ...], release: None) -> None:
    blocked = [Blocked(group) for group in groups_of(*kinds)]
    abort_all()
    assert all(one.is_freed() for one in blocked)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_aborts_that_depend_on_each_other_are_under_way_together(
    order: tuple[int, ...], release: None
) -> None:
    groups = groups_of(*[OnAbort.DEPENDS] * 3)
    blocked = [Blocked(groups[number]) for number in order]
    thread = threading.Thread(target=abort_all, daemon=True)
    thread.start()
    assert all(one.is_freed() for one in blocked)
    thread.join(TIMEOUT)
    assert not thread.is_alive()


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "barrier", "all_gather", "reduce_scatter"])
def test_collectives_of_the_stand_in(collective: str, release: None) -> None:
    (group,) = groups_of(OnAbort.RETURNS)
    one = torch.ones(1)
    arguments: dict[str, tuple[Any, ...]] = {
        "broadcast": (one, 0),
        "barrier": (),
        "all_gather": ([one], one),
        "reduce_scatter": (one, [one]),
    }
    group.abort()
    with pytest.raises(RuntimeError, match="a collective of 'blocking-returns' was aborted"):
        getattr(dist, collective)(*arguments.get(collective, (one,)))
