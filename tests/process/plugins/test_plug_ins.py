"""What all plug-ins share: a base class each, or any callable; and importing them starts nothing."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ft_wrapper import Compose, FrozenState, Wrapper
from ft_wrapper.abort import Abort, AbortTorchDistributed
from ft_wrapper.completion import Completion
from ft_wrapper.finalize import Finalize
from ft_wrapper.health_check import HealthCheck
from ft_wrapper.initialize import Initialize
from ft_wrapper.rank_assignment import RankAssignment, RankFilter
from ft_wrapper.terminate import Terminate

KINDS = [Abort, Completion, Finalize, HealthCheck, Initialize, RankAssignment, RankFilter, Terminate]


@pytest.mark.parametrize("kind", KINDS)
def test_a_plug_in_needs_a_call(kind: type) -> None:
    with pytest.raises(TypeError, match="abstract"):
        kind()

    class Mine(kind):  # type: ignore[misc]
        def __call__(self, argument: object) -> object:
            return argument

    assert Mine()(5) == 5


ARGUMENTS = {
    **dict.fromkeys(("initialize", "abort", "finalize", "health_check", "completion", "terminate"), "state"),
    "rank_assignment": "ctx",
}


class Called:
    """Callable objects, and what has methods."""

    def __call__(self, argument: Any) -> Any:
        return argument

    def method(self, argument: Any, more: int = 0) -> Any:
        return argument

    @staticmethod
    def static(argument: Any) -> Any:
        return argument

    def two(self, first: Any, second: Any) -> Any:
        return first


def function(argument: Any) -> Any:
    return argument


RIGHT: dict[str, Callable[..., Any]] = {
    "function": function,
    "lambda": lambda argument: argument,
    "any arguments": lambda *arguments: arguments[0],
    "partial": functools.partial(Called().two, second=2),
    "bound method": Called().method,
    "static method": Called.static,
    "object": Called(),
    "built in": [].append,
    "composed": Compose(function, Called()),
    "composed of composed": Compose(Compose(function, Called().method), Compose(function)),
    "composed by a tuple": Compose(Called().two, lambda argument: (argument, 1)),
}
WRONG: dict[str, Callable[..., Any]] = {
    "no argument": lambda: None,
    "two arguments": Called().two,
    "a keyword without a default": lambda argument, *, more: argument,
    "partial with too few": functools.partial(Called().two),
    "object with two": type("Two", (), {"__call__": lambda self, first, second: first})(),
    "composed": Compose(function, Called().two),
    "composed of composed": Compose(function, Compose(function, lambda: None)),
}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("what", RIGHT)
def test_any_callable_of_one_argument_may_be_a_plug_in(name: str, what: str) -> None:
    arguments: dict[str, Any] = {name: RIGHT[what]}
    assert getattr(Wrapper(**arguments), name) is RIGHT[what]


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("what", WRONG)
def test_a_callable_of_other_arguments_is_named(name: str, what: str) -> None:
    arguments: dict[str, Any] = {name: WRONG[what]}
    with pytest.raises(TypeError) as caught:
        Wrapper(**arguments)
    text = str(caught.value)
    assert text.startswith(f"{name}={WRONG[what]!r} must be None, a ft_wrapper.")
    assert f"or a function of one argument, {ARGUMENTS[name]}: " in text


def test_a_part_that_is_a_plug_in_of_another_kind_is_named() -> None:
    abort = AbortTorchDistributed()
    with pytest.raises(TypeError, match=r"finalize=Compose.*must be .*Abort.* is none of them"):
        Wrapper(finalize=Compose(function, abort))
    Wrapper(abort=Compose(function, abort))


def test_a_function_composed_with_a_plug_in_is_given_the_state() -> None:
    class Noted(Abort):
        def __call__(self, state: FrozenState) -> FrozenState:
            return state

    seen: list[FrozenState] = []
    state = FrozenState(rank=0, world_size=1)
    with pytest.warns(UserWarning, match="did not hand its argument on"):
        Compose(seen.append, Noted())(state)
    assert seen == [state]


def test_importing_them_starts_nothing() -> None:
    script = """
import multiprocessing, signal, threading, torch
before = {s: signal.getsignal(s) for s in signal.valid_signals()}
from ft_wrapper import (compose, completion, finalize, health_check, initialize, nested_restarter,
                        rank_assignment, terminate)
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
assert not multiprocessing.active_children()
assert before == {s: signal.getsignal(s) for s in signal.valid_signals()}
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
