"""The lines for an outer restarter: which, on which rank, once, whatever logging is set to."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import pytest

from ft_wrapper.abort import Abort
from ft_wrapper.completion import Completion
from ft_wrapper.initialize import Initialize
from ft_wrapper.nested_restarter import (
    NestedRestarterAborted,
    NestedRestarterFinalized,
    NestedRestarterHandlingCompleted,
    NestedRestarterHandlingStarting,
)
from ft_wrapper.state import FrozenState
from ft_wrapper.terminate import Terminate

Lines = Callable[[], list[str]]


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    return lambda: capsys.readouterr().out.splitlines()


def state(initial_rank: int = 0) -> FrozenState:
    # The rank has changed since: the initial one counts.
    return FrozenState(rank=7, world_size=8, initial_rank=initial_rank)


@pytest.mark.parametrize(
    ("kind", "plug_in", "said"),
    [
        (NestedRestarterHandlingStarting, Abort, "state=handling stage=starting"),
        (NestedRestarterFinalized, Completion, "state=finalized"),
        (NestedRestarterAborted, Terminate, "state=aborted"),
    ],
)
def test_each_says_its_state(
    kind: type[NestedRestarterFinalized], plug_in: type, said: str, lines: Lines
) -> None:
    callback = kind()
    assert isinstance(callback, plug_in)
    given = state()
    assert callback(given) is given
    callback(state())
    both = lines()
    assert len(both) == 2
    for line in both:
        assert line.endswith(f"[NestedRestarter] name=[InProcess] {said}")


def test_the_first_initialize_differs_from_the_later_ones(lines: Lines) -> None:
    callback = NestedRestarterHandlingCompleted()
    assert isinstance(callback, Initialize)
    for _ in range(3):
        callback(state())
    assert [line.partition("name=[InProcess] ")[2] for line in lines()] == [
        "state=initialize",
        "state=handling stage=completed",
        "state=handling stage=completed",
    ]
    NestedRestarterHandlingCompleted()(state())
    assert lines()[0].endswith("state=initialize")


def test_only_the_special_rank_speaks(lines: Lines) -> None:
    NestedRestarterFinalized()(state(1))
    assert lines() == []
    callback = NestedRestarterFinalized(special_rank=1)
    callback(state(0))
    callback(state(1))
    assert len(lines()) == 1


@pytest.mark.parametrize("level", [logging.DEBUG, logging.CRITICAL])
def test_the_line_comes_once_whatever_logging_is_set_to(level: int, lines: Lines) -> None:
    root = logging.getLogger()
    before, handler = root.level, logging.StreamHandler(sys.stdout)
    root.addHandler(handler)
    root.setLevel(level)
    try:
        NestedRestarterAborted()(state())
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
    assert len(lines()) == 1
