"""Checks of what users pass to plug-ins: errors name the argument, its value and what to pass instead."""

from __future__ import annotations

import math
import operator
from datetime import timedelta
from typing import Any


def as_int(name: str, value: Any, at_least: int) -> int:
    """Returns a whole number, checked.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is less than ``at_least``.
    """
    if isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be an int, not a bool; pass a number, at least {at_least}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name}={value!r} must be an int, not {type(value).__name__}; pass a number, at least {at_least}"
        ) from None
    if number < at_least:
        raise ValueError(f"{name}={number} is too small; pass a number, at least {at_least}")
    return number


def as_limit(name: str, value: Any, at_least: int) -> int | None:
    """The same, where None means no limit."""
    return None if value is None else as_int(name, value, at_least)


def as_timeout(name: str, value: Any) -> timedelta:
    """Returns a duration, given as ``timedelta`` or in seconds.

    Raises:
        TypeError: it is no duration.
        ValueError: it is not positive, or not finite.
    """
    if isinstance(value, timedelta):
        duration = value
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ValueError(f"{name}={value!r} must be finite; pass a timedelta or a number of seconds")
        duration = timedelta(seconds=value)
    else:
        raise TypeError(
            f"{name}={value!r} must be a datetime.timedelta or a number of seconds, "
            f"not {type(value).__name__}; pass timedelta(seconds=...)"
        )
    if duration <= timedelta(0):
        raise ValueError(f"{name}={duration} must be longer than nothing; pass timedelta(seconds=...)")
    return duration


def check_callable(name: str, value: Any, example: str) -> None:
    """Raises TypeError unless the argument can be called; ``example`` shows a right one."""
    if not callable(value):
        raise TypeError(
            f"{name}={value!r} must be callable, not {type(value).__name__}; pass a function: {example}"
        )
