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


RIGHT: list[Callable[..., Any]] = [
    function,
    lambda argument: argument,
    lambda *arguments: arguments[0],
    functools.partial(Called().two, second=2),
    Called().method,
    Called.static,
    Called(),
    [].append,
    Compose(function, Called()),
    Compose(Compose(function, Called().method), Compose(function)),
    Compose(Called().two, lambda argument: (argument, 1)),  # a tuple is two arguments
]
WRONG: list[Callable[..., Any]] = [
    lambda: None,
    Called().two,
    lambda argument, *, more: argument,
    functools.partial(Called().two),
    type("Two", (), {"__call__": lambda self, first, second: first})(),
    Compose(function, Called().two),
    Compose(function, Compose(function, lambda: None)),
]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_any_callable_of_one_argument_may_be_a_plug_in_and_others_are_named(name: str) -> None:
    for right in RIGHT:
        arguments: dict[str, Any] = {name: right}
        assert getattr(Wrapper(**arguments), name) is right
    for wrong in WRONG:
        arguments = {name: wrong}
        with pytest.raises(TypeError) as caught:
            Wrapper(**arguments)
        text = str(caught.value)
        assert text.startswith(f"{name}={wrong!r} must be None, a ft_wrapper.")
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


IMPORTS = """
import multiprocessing, os, signal, sys, threading, torch
handlers = {s: signal.getsignal(s) for s in signal.valid_signals()}
environment = dict(os.environ)
from ft_wrapper import (compose, completion, finalize, health_check, initialize, nested_restarter,
                        rank_assignment, terminate)
from ft_wrapper.torch_groups.warm_up import import_lazy_modules
import_lazy_modules()
assert "torch._dynamo" in sys.modules
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
assert not multiprocessing.active_children()
assert handlers == {s: signal.getsignal(s) for s in signal.valid_signals()}
assert environment == dict(os.environ), environment.items() ^ os.environ.items()
assert not torch.cuda.is_initialized()
"""


@pytest.mark.nightly("a process that imports torch anew; all tests with jobs would see a thread")
def test_imports_start_nothing_and_leave_the_environment_alone() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
