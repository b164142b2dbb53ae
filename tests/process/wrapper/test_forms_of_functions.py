"""What may be wrapped, and what may make a store: every form of a function."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from rank_harness import SETTINGS, Job, Rank

from ft_wrapper import CallWrapper, Wrapper
from ft_wrapper.restart.settings import name_of
from ft_wrapper.store import TCPStore, plan


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def add(one: int, two: int, call_wrapper: CallWrapper | None = None) -> list[Any]:
    return [one + two, call_wrapper is not None]


class Adder:
    def __call__(self, one: int, two: int, call_wrapper: CallWrapper | None = None) -> list[Any]:
        return add(one, two, call_wrapper)

    def method(self, one: int, two: int, call_wrapper: CallWrapper | None = None) -> list[Any]:
        return add(one, two, call_wrapper)

    @classmethod
    def of_class(cls, one: int, two: int, call_wrapper: CallWrapper | None = None) -> list[Any]:
        return add(one, two, call_wrapper)

    @staticmethod
    def static(one: int, two: int, call_wrapper: CallWrapper | None = None) -> list[Any]:
        return add(one, two, call_wrapper)


class OddPartial(functools.partial[Any]):
    """It has an attribute, so a partial of it is not flattened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.is_odd = True


BASES: dict[str, Callable[..., Any]] = {
    "function": add,
    "lambda": lambda one, two, call_wrapper=None: add(one, two, call_wrapper),
    "object": Adder(),
    "bound method": Adder().method,
    "class method": Adder.of_class,
    "static method": Adder.static,
}
AROUND: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "nothing": lambda function: function,
    "decorator": decorated,
    "partial": functools.partial,
    "partial of a decorated": lambda function: functools.partial(decorated(function)),
    "partial of a partial": lambda function: functools.partial(OddPartial(function)),
}


def made(base: str, around: str) -> Callable[..., Any]:
    return AROUND[around](BASES[base])


def first(call_wrapper: CallWrapper, one: int | None, two: int = 5) -> list[Any]:
    return [isinstance(call_wrapper, CallWrapper), one, two]


def test_the_call_wrapper_may_be_the_first_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    wrapped: Any = Wrapper(enabled=False)(first)
    assert wrapped(1) == [True, 1, 5]
    assert wrapped(None) == wrapped(one=None) == [True, None, 5]
    assert wrapped(None, 2) == wrapped(None, two=2) == wrapped(None, None, 2) == [True, None, 2]
    assert wrapped(None, 1, 2) == wrapped(call_wrapper=None, one=1, two=2) == [True, 1, 2]
    for wrong in ((), (1, 2, 3)):
        with pytest.raises(TypeError):
            wrapped(*wrong)


@pytest.mark.parametrize("around", AROUND)
def test_a_form_has_a_name_without_its_address_and_is_called_with_its_call_wrapper(around: str) -> None:
    for base in BASES:
        name = name_of(made(base, around))
        assert name.startswith(f"{__name__}.") and " at 0x" not in name and "Partial" not in name
        assert Wrapper(enabled=False)(made(base, around))(1, two=2) == [3, True]


async def trains() -> None:
    await asyncio.sleep(0)


def wraps_what_only_begins(rank: Rank) -> Any:
    try:
        Wrapper(**SETTINGS)(decorated(trains))()
    except TypeError as error:
        return str(error)


def test_a_decorated_coroutine_function_that_runs_nothing_is_an_error(job: Job) -> None:
    job.start(2, wraps_what_only_begins)
    assert all(
        "is a coroutine or generator function: calling it runs nothing yet" in text for text in job.wait()
    )


STORE = {"host_name": "127.0.0.1", "port": 29999}


@pytest.mark.parametrize(
    ("factory", "kwargs", "is_hosted"),
    [
        (functools.partial(TCPStore), STORE, True),
        (functools.partial(TCPStore, timeout=timedelta(seconds=5)), STORE, True),
        (functools.partial(TCPStore, **STORE), None, True),
        (functools.partial(OddPartial(TCPStore), **STORE), {}, True),
        (functools.partial(TCPStore, "127.0.0.1"), {"port": 29999}, False),
        (OddPartial(TCPStore, "127.0.0.1"), {"port": 29999}, False),
        (lambda **kwargs: TCPStore(**kwargs), STORE, False),
    ],
)
def test_a_partial_may_make_the_store(
    factory: Any, kwargs: Any, is_hosted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With keywords alone it is taken for the class, and a rank hosts the store."""
    monkeypatch.delenv(plan.ANNOUNCED, raising=False)
    Wrapper(store_factory=factory, store_kwargs=kwargs)
    planned = plan.plan_store(factory, kwargs, timedelta(seconds=9))
    assert " at 0x" not in planned.description
    assert planned.port == (29999 if is_hosted else None)


def test_partials_with_different_arguments_make_different_stores() -> None:
    def described(port: int) -> str:
        made = functools.partial(TCPStore, host_name="127.0.0.1", port=port)
        return plan.plan_store(made, None, timedelta(seconds=9)).description

    assert described(1) != described(2)
