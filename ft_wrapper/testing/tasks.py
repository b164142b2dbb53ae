"""What runs on a `Scheduler`: tasks, their steps, and events that may come between them."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Callable, Sequence
from typing import Any

from .clock import Waiter

UNKNOWN = object()
"""The result of a step that has none, or not yet."""

_ROOT = "ft_wrapper/1/"
_LONGEST = 100


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

    @property
    def happens(self) -> bool:
        """Whether it is no step of the task, but something that happens to it."""
        return not self.args and self.what.startswith(("crashes", "is paused"))


class Killed(BaseException):
    """Ends a crashed task. Never raised where anything it does could still be seen by others."""


@dataclasses.dataclass(eq=False)
class Task:
    """One simulated process. Made by `Scheduler.spawn`.

    Args:
        name: shown in the trace.
        daemon: whether a run ends without waiting for it.
        number: how many were spawned before it.
        steps: steps taken so far: store operations and sleeps.
        upcoming: operation and arguments of the step that it is about to take, if it has come to one.
        ready: whether it can run.
        done: whether it has returned, failed or crashed.
        crashed: whether it was killed.
        result: what its function returned.
        delay: virtual seconds that each of its steps takes.
    """

    name: str
    daemon: bool
    number: int
    steps: int = 0
    upcoming: tuple[str, Sequence[Any]] | None = None
    ready: bool = True
    done: bool = False
    crashed: bool = False
    result: Any = None
    delay: float = 0.0
    _greenlet: Any = None
    _waiter: Waiter | None = None
    _deadline: float = math.inf
    _paused_until: float = 0.0
    _plan: dict[int, list[Callable[[], None]]] = dataclasses.field(default_factory=dict)
    _step: Step | None = None

    def wakes_at(self, now: float) -> float:
        """The time from which it can run, as things stand."""
        ready = now if self._waiter is None or self._waiter.woken else self._deadline
        return max(ready, self._paused_until)

    def is_paused(self, now: float) -> bool:
        """Whether it stands still at a time, or has not gone on since."""
        return self._paused_until > now


@dataclasses.dataclass(eq=False)
class Event:
    """Something that may happen between any two steps, once. Made by `Scheduler.add_event`.

    Args:
        name: shown in the trace.
        action: what happens.
        allowed: whether it may happen now.
        task: whom it is about.
    """

    name: str
    action: Callable[[], None]
    allowed: Callable[[], bool]
    task: Task | None = None


# For people ------------------------------------------------------------------------------------------------


def show(steps: Sequence[Step]) -> str:
    """The steps, one a line: when, who, what, and what came of it."""
    return "\n".join(
        f"{step.time:10.3f}  {step.task:<12} {describe(step.what, step.args)}{_result(step)}".rstrip()
        for step in steps
    )


def describe(what: str, args: Sequence[Any]) -> str:
    """An operation with its arguments, without the common part of all keys."""
    if what == "compare_set" and len(args) == 3 and args[1] == args[2]:
        return f"read {_short(args[0])}"  # how a TCPStore reads in one step
    return " ".join([what, *map(_short, args)]).rstrip()


def _result(step: Step) -> str:
    if step.result is UNKNOWN or step.result is None:
        return ""
    if step.what == "compare_set" and step.args[1] == step.args[2]:
        # Of an absent key it returns what was expected; of a log, a set of entries.
        nothing = (_short(step.args[1]), _short({step.args[1]}))
        result = _short(step.result)
        return " -> nothing" if result in nothing else f" -> {result}"
    return f" -> {_short(step.result)}"


def _short(value: Any) -> str:
    text = _text(value).strip().replace("\n", "; ").replace(_ROOT, "") or "''"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, datetime.timedelta):
        return f"{value.total_seconds():g} s"
    if isinstance(value, frozenset | set):
        return "{" + ", ".join(sorted(filter(None, map(_text, value)))) + "}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return repr(value)
