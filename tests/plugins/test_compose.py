"""Compose: the order of its parts, what it is an instance of, and parts that forget to return."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from ft_wrapper.abort import Abort
from ft_wrapper.compose import Compose
from ft_wrapper.initialize import Initialize, RetryController
from ft_wrapper.rank_assignment import (
    ActivateAllRanks,
    MaxActiveWorldSize,
    RankAssignment,
    RankFilter,
    ShiftRanks,
)
from ft_wrapper.state import FrozenState


class Base:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, text: str) -> str:
        return f"{self.name}({text})"


class Left(Base): ...


class LeftOfLeft(Left): ...


class Right(Base): ...


class Silent(Base):
    def __call__(self, text: str) -> Any:
        return None


def test_the_right_most_runs_first() -> None:
    assert Compose(Base("a"), Base("b"), Base("c"))("x") == "a(b(c(x)))"
    assert Compose(Base("a"))("x") == "a(x)"


def test_it_is_what_all_parts_are() -> None:
    for composed, kinds, others in [
        (Compose(Left("a"), Right("b")), [Compose, Base], [Left, Right]),
        (Compose(LeftOfLeft("a"), Left("b")), [Left], [LeftOfLeft]),
        (Compose(LeftOfLeft("a"), LeftOfLeft("b")), [LeftOfLeft], []),
        (Compose(ActivateAllRanks(), MaxActiveWorldSize(1)), [RankFilter], [ActivateAllRanks]),
        (Compose(ActivateAllRanks(), ShiftRanks()), [RankAssignment], [RankFilter]),
        (Compose(RetryController(), ShiftRanks()), [Compose], [Initialize, RankAssignment]),
    ]:
        assert all(isinstance(composed, kind) for kind in kinds)
        assert not any(isinstance(composed, kind) for kind in others)


def test_it_nests() -> None:
    inner = Compose(Left("b"), LeftOfLeft("c"))
    for composed in (Compose(Left("a"), inner), Compose(inner, Left("d")), Compose(inner, inner)):
        assert isinstance(composed, Left)
    assert Compose(Left("a"), Compose(Left("b"), Right("c")))("x") == "a(b(c(x)))"


def test_functions_are_parts_too() -> None:
    assert Compose(str.upper, lambda text: text + "!")("x") == "X!"
    assert Compose(lambda text: f"b({text})", lambda text: f"c({text})")("x") == "b(c(x))"


def test_functions_that_take_no_argument() -> None:
    called: list[str] = []
    first, second = (lambda name=name: called.append(name) or name for name in "ab")
    assert Compose(second, first)() == "b"
    assert Compose(first, Compose(second, first))() == "a"
    assert "".join(called) == "ababa"[:2] + "aba"


def test_several_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="one argument on, or none, not 2"):
        Compose(len)(1, 2)


def test_it_can_be_copied() -> None:
    composed = Compose(Left("a"), Right("b"))
    again = copy.deepcopy(composed)
    assert again("x") == "a(b(x))"
    assert isinstance(again, Base)
    assert repr(Compose(RetryController(), len)).startswith("Compose(<ft_wrapper.initialize.RetryController")


def test_a_part_that_hands_nothing_on_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="Silent.*did not hand its argument on"):
        assert Compose(Base("a"), Silent("b"))("x") == "a(None)"


def test_none_handed_on_is_no_reason_to_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Compose(Silent("a"))(None) is None


def test_an_error_passes() -> None:
    def refuse(text: str) -> str:
        raise KeyError(text)

    with pytest.raises(KeyError, match="x"):
        Compose(Base("a"), refuse)("x")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Compose(), "at least one part"),
        (lambda: Compose(Base("a"), 3), "part 1 of Compose, 3"),
        (lambda: Compose(ShiftRanks), r"pass an instance: ShiftRanks\(\.\.\.\)"),
    ],
)
def test_bad_parts(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def test_plug_ins_that_share_nothing_but_their_base() -> None:
    class MyAbort(Abort):
        def __call__(self, state: FrozenState) -> FrozenState:
            return state

    state = FrozenState(rank=0, world_size=1)
    composed = Compose(MyAbort(), MyAbort())
    assert isinstance(composed, Abort)
    assert composed(state) is state
