"""Calls whose tracer raises, kept apart from the tests that follow in the same process."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def apart(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function in a generator, which ends with what a tracer has left handled.

    A tracer that raises just before an ``except`` clause is left goes past what restores the exception that
    was handled before. From then on the whole thread handles that of the clause.
    """
    [result] = (fn(*args, **kwargs) for _ in "1")
    return result
