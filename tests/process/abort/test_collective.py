"""Where a thread stands in torch.distributed: said at once, whatever its groups do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from ft_wrapper.protocol.records import CollectivePosition, GroupSequence
from ft_wrapper.testing import BlockingGroup, blocking_backend
from ft_wrapper.torch_groups.abort import abort_all
from ft_wrapper.torch_groups.collective import current_collective
from ft_wrapper.torch_groups.release import release_process_groups, wait_for_released_groups

TIMEOUT = 60.0


@pytest.fixture
def group() -> Iterator[BlockingGroup]:
    """The default group, whose first collective passes."""
    dist.init_process_group(blocking_backend(passes=1), store=HashStore(), rank=0, world_size=1)
    world: Any = dist.group.WORLD
    yield world
    abort_all()
    release_process_groups()
    assert wait_for_released_groups()


def stand_in(blocks: Callable[[], object], at: BlockingGroup) -> tuple[str, CollectivePosition]:
    """Where a thread is said to be while it is blocked in a group, which is aborted then."""

    def train() -> None:
        with pytest.raises(RuntimeError, match="was aborted"):
            blocks()

    thread = threading.Thread(target=train)
    thread.start()
    assert at.is_blocked.wait(TIMEOUT) and thread.ident is not None
    place = current_collective(thread.ident)
    abort_all()
    thread.join(TIMEOUT)
    assert not thread.is_alive() and place is not None
    return place


def test_it_says_operation_number_and_group(group: BlockingGroup) -> None:
    def train() -> None:
        dist.barrier()
        dist.all_reduce(torch.ones(1))

    words, position = stand_in(train, group)
    assert position == CollectivePosition("all_reduce", "0", (GroupSequence("0", 1, 2, True),))
    assert words.startswith("in all_reduce #2 of group 0, called at test_collective.py:")
    assert words.endswith(" in train")


def test_an_operation_on_objects_is_named_and_so_is_a_group_that_has_a_name(group: BlockingGroup) -> None:
    other: Any = dist.new_group(backend=blocking_backend(), group_desc="data")
    words, position = stand_in(lambda: dist.all_gather_object([None], "x", group=other), other)
    counts = (GroupSequence("1 (data)", 1, 1, True), GroupSequence("0", 1, 0, True))
    assert position == CollectivePosition("all_gather_object", "1 (data)", counts)
    assert words.startswith("in all_gather_object #1 of group 1 (data), called at ")


def test_what_one_receives_does_not_count(group: BlockingGroup) -> None:
    def train() -> None:
        dist.barrier()
        dist.recv(torch.ones(1), src=None)

    _, position = stand_in(train, group)
    assert (position.in_collective, str(position)) == (False, "recv #1 of group 0")


@pytest.mark.parametrize("hangs", [True, False])
def test_a_group_that_does_not_say_its_number_is_left_out(
    group: BlockingGroup, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    frees = threading.Event()

    def ask() -> int:
        if not hangs:
            raise RuntimeError("this backend does not count")
        frees.wait(TIMEOUT)
        return 7  # too late

    dist.new_group(backend=blocking_backend())
    monkeypatch.setattr(group, "_get_sequence_number_for_group", ask)

    def train() -> None:
        for _ in range(2):
            dist.barrier()

    try:
        words, position = stand_in(train, group)
    finally:
        frees.set()
    others = () if hangs else (GroupSequence("1", 1, 0, True),)
    assert position == CollectivePosition("barrier", "0", others)
    assert words.startswith("in barrier of group 0, called at ")


def test_many_groups_are_not_all_told(group: BlockingGroup) -> None:
    groups: list[Any] = [dist.new_group(backend=blocking_backend()) for _ in range(10)]
    _, position = stand_in(lambda: dist.barrier(group=groups[-1]), groups[-1])
    assert [count.group for count in position.counts] == ["10", "0", "1", "2", "3", "4", "5", "6"]


def test_elsewhere_there_are_only_the_numbers(group: BlockingGroup) -> None:
    dist.barrier()
    place = current_collective(threading.get_ident())
    assert place is not None and place[1] == CollectivePosition(counts=(GroupSequence("0", 1, 1, True),))


def test_a_gloo_group_counts_what_it_sends_too() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1))
        place = current_collective(threading.get_ident())
        assert place is not None and place[1].counts == (GroupSequence("0", 1, 1, False),)
    finally:
        release_process_groups()
        assert wait_for_released_groups()


def test_a_thread_that_is_gone_is_nowhere() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join(TIMEOUT)
    assert thread.ident is not None and current_collective(thread.ident) is None
