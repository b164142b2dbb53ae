"""Who did what: the steps of a run, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Step:
    """One step of a task, or something that happened to one.

    Args:
        time: virtual seconds since the start.
        task: name of the task; empty for an event.
        what: the store operation, or what happened.
        args: the operation's arguments.

    Attributes:
        result: what the operation returned; `UNKNOWN` until it has.
    """

    __slots__ = ("args", "result", "task", "time", "what")

    def __init__(self, time: float, task: str, what: str, args: Sequence[Any]) -> None:
        self.time = time
        self.task = task
        self.what = what
        self.args = args
        self.result: Any = UNKNOWN


UNKNOWN = object()


def show(steps: Sequence[Step]) -> str:
    """The steps, one a line."""
    return "\n".join(f"{s.time:10.3f}  {s.task:<12} {s.what} {_list(s.args)}{_result(s)}" for s in steps)


def _result(step: Step) -> str:
    if step.result is UNKNOWN or step.result is None:
        return ""
    return f" -> {_short(step.result)}"


def _list(args: Sequence[Any]) -> str:
    return ", ".join(_short(arg) for arg in args)


def _short(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    return value.replace("\n", "⏎") if isinstance(value, str) else repr(value)
