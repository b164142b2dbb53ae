"""Compose: the order of its parts, what it is an instance of, and parts that forget to return."""

from __future__ import annotations

import copy
import functools
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
        (Compose(Left("a"), Compose(Left("b"), LeftOfLeft("c"))), [Left], [LeftOfLeft]),
        (copy.deepcopy(Compose(Left("a"), Right("b"))), [Base], [Left, Right]),
        (Compose(ActivateAllRanks(), MaxActiveWorldSize(1)), [RankFilter], [ActivateAllRanks]),
        (Compose(ActivateAllRanks(), ShiftRanks()), [RankAssignment], [RankFilter]),
        (Compose(RetryController(), ShiftRanks()), [Compose], [Initialize, RankAssignment]),
    ]:
        assert all(isinstance(composed, kind) for kind in kinds)
        assert not any(isinstance(composed, kind) for kind in others)


def test_the_right_most_gets_all_arguments_and_the_others_what_it_returned() -> None:
    assert Compose(repr, sum, lambda *numbers: [*numbers, 10])(1, 2, 3) == "16"
    assert Compose(lambda made: made + 1, lambda: 4)() == 5


def test_a_tuple_is_several_arguments() -> None:
    def shift(a: int, b: int, c: int) -> tuple[int, int, int]:
        return a + 1, b + 1, c + 1

    assert Compose(shift, shift, shift)(0, 1, 2) == (3, 4, 5)
    assert Compose(lambda a, b: a - b, divmod)(17, 5) == 1
    assert Compose(lambda: "none", lambda: ())() == "none"
    assert Compose(len, lambda: [(1, 2)])() == 1, "a list is one argument"


def test_functions_that_take_no_argument() -> None:
    called: list[str] = []

    def first() -> str:
        called.append("first")
        return "1"

    def second() -> str:
        called.append("second")
        return "2"

    def optional(generation: int = 2) -> None:
        called.append(f"generation {generation}")

    assert Compose(second, first)() == "2"
    assert Compose(first, Compose(second, first))() == "1"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Compose(optional, optional)() is None
    assert called == ["first", "second", *["first", "second", "first"], *["generation 2"] * 2]


def test_arrays_are_handed_on() -> None:
    """Which compare element by element."""
    seen: list[torch.Tensor] = []
    with pytest.warns(UserWarning, match="did not hand its argument on"):
        assert Compose(seen.append)(torch.ones(2)) is None
    assert len(seen) == 1


LINKS: list[tuple[Callable[[int], Any], Callable[[int], int]]] = [
    (lambda x: x + 3, lambda x: x + 3),
    (functools.partial(operator.mul, 5), lambda x: 5 * x),
    (operator.neg, lambda x: -x),
    ((7).__sub__, lambda x: 7 - x),
    (Compose(abs, lambda x: x - 20), lambda x: abs(x - 20)),
    (Compose(operator.add, lambda x: (x, x)), lambda x: 2 * x),
]


@given(st.lists(st.sampled_from(LINKS), min_size=1, max_size=8), st.integers(0, 7), st.integers(-50, 50))
def test_drawn_chains(drawn: list[Any], cut: int, start: int) -> None:
    """As many links as drawn, some of them in a Compose of their own, do what they do one after the other."""
    parts, expected = [link for link, _ in drawn], start
    cut %= len(parts)
    composed = Compose(*parts[:cut], Compose(*parts[cut:]))
    for _, link in reversed(drawn):
        expected = link(expected)
    assert composed(start) == expected
    assert copy.deepcopy(composed)(start) == expected


def test_a_part_that_hands_nothing_on_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="Silent.*did not hand its argument on"):
        assert Compose(Base("a"), Silent("b"))("x") == "a(None)"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Compose(Silent("a"))(None) is None, "None was handed on"


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
