"""Arguments that users pass: their checks, and the wrapper's numbers and switches.

A field of `MainLimits` is an argument of `Wrapper`, and a field of `RareLimits` is one of `Limits`. Each is
checked, sent to the monitor, and compared between the ranks if it is marked as shared.

Plug-ins and the store are in `ft_wrapper.restart.settings`.
"""

import contextlib
import dataclasses
import enum
import functools
import operator
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, dataclass_transform

#: A timeout that is learned from the job, and that evidence of a hang shortens.
AUTO: Literal["auto"] = "auto"
_GROWS = 10  # a learned timeout may come to this many times what it was at first
_SOFT, _HARD = 60.0, 90.0  # seconds without progress, where neither evidence nor a number says more

#: Most seconds that a wait may last: Python's and the kernel's waits raise an error for much more.
LONGEST = 2**31 - 1


class OnJoin(enum.StrEnum):
    """What happens when a process joins a running job."""

    NEXT = "next"
    """It waits for the next restart."""
    DEGRADED = "degraded"
    """It ends the iteration if fewer ranks are active than before."""
    NOW = "now"
    """It ends the iteration."""


# Checks: errors name the argument, its value and what to pass instead ---------------------------------------


def check_kind(name: str, value: Any, kind: Any, words: str, *, but: Any = ()) -> Any:
    """Returns an argument, checked.

    Args:
        name: the argument.
        value: what was passed.
        kind: what ``isinstance`` takes.
        words: what it must be, for the error.
        but: types that it must not have.

    Raises:
        TypeError: it has another type.
    """
    if not isinstance(value, kind) or isinstance(value, but):
        raise TypeError(f"{name}={value!r} must be {words}, not {type(value).__name__}")
    return value


def as_int(name: str, value: Any, at_least: int) -> int:
    """Returns a whole number, checked.

    Raises:
        TypeError: it is not a whole number.
        ValueError: it is less than ``at_least``.
    """
    with contextlib.suppress(TypeError):  # a tensor may have no index, though its class has the method
        value = value if isinstance(value, bool) else operator.index(value)
    number: int = check_kind(name, value, int, "an int", but=bool)
    if number < at_least:
        raise ValueError(f"{name}={number} is too small; it must be at least {at_least}")
    return number


def as_limit(name: str, value: Any, at_least: int) -> int | None:
    """The same, where None means no limit."""
    return None if value is None else as_int(name, value, at_least)


def as_seconds(name: str, value: Any, *, from_zero: bool = False) -> float:
    """Returns a duration, given as ``timedelta`` or in seconds, in seconds.

    Raises:
        TypeError: it is not a duration.
        ValueError: it is infinite, negative, or 0 where that is not allowed.
    """
    words = "a timedelta or a number of seconds"
    check_kind(name, value, timedelta | int | float, words, but=bool)
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not (0 < seconds <= LONGEST or (from_zero and seconds == 0)):
        least = "at least" if from_zero else "more than"
        raise ValueError(f"{name}={value!r} must be {least} 0 seconds, and at most {LONGEST}")
    return float(seconds)


def _as_auto(name: str, value: Any) -> float | str:
    if isinstance(value, str):
        if value != AUTO:
            raise ValueError(f"{name}={value!r} must be {AUTO!r}, a timedelta or a number of seconds")
        return value
    return as_seconds(name, value)


def as_timeout(name: str, value: Any) -> timedelta:
    """The same, as ``timedelta``; more than 0."""
    return timedelta(seconds=as_seconds(name, value))


def check_callable(name: str, value: Any, example: str) -> None:
    """Raises TypeError unless the argument can be called; ``example`` shows a valid one."""
    check_kind(name, value, Callable, f"callable, such as {example}")


def as_switch(name: str, value: object) -> bool:
    """Returns True or False, checked."""
    return bool(check_kind(name, value, bool, "True or False"))


def as_choice(name: str, value: object) -> bool | None:
    """The same, where None leaves it to the wrapper."""
    return None if value is None else as_switch(name, value)


def _as_on_join(name: str, value: object) -> OnJoin:
    words = f"one of {', '.join(map(repr, map(str, OnJoin)))}"
    try:
        return OnJoin(check_kind(name, value, str, words))
    except ValueError:
        raise ValueError(f"{name}={value!r} must be {words}") from None


# Settings ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Setting:
    """Describes a dataclass field that a user may set.

    Args:
        check: takes the field's name and the user's value; returns the value to keep, or raises.
        is_shared: whether it must be the same on all ranks.
        is_duration: whether it is kept in seconds; users may also pass a ``timedelta``.
        shorter_than: durations that it must be shorter than.
    """

    check: Callable[[str, Any], Any]
    is_shared: bool = False
    is_duration: bool = False
    shorter_than: tuple[str, ...] = ()


Given = TypeVar("Given")
Held = TypeVar("Held")

if TYPE_CHECKING:

    class _Takes(Generic[Given, Held]):
        """How type checkers see a field whose stored type differs from the type that users pass."""

        def __get__(self, instance: object, owner: object = None) -> Held: ...
        def __set__(self, instance: object, value: Given) -> None: ...

    Seconds = _Takes[timedelta | float, float]
    Auto = _Takes[timedelta | float | Literal["auto"], float | str]
    Join = _Takes[str, OnJoin]
else:
    Seconds, Auto, Join = float, float | str, OnJoin


@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field,))
def settings(fields: type[Held]) -> type[Held]:
    """Makes a frozen dataclass. For type checkers it isn't, or they would show the passed type on reading."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(fields)


def argument(default: Any, check: Callable[[str, Any], Any], **known: Any) -> Any:
    """A field of settings, with its default; ``known``: see `Setting`."""
    return dataclasses.field(default=default, metadata={Setting: Setting(check, **known)})


def _duration(default: float, *shorter_than: str, is_shared: bool = False, from_zero: bool = False) -> Any:
    """The same for a duration."""
    check = functools.partial(as_seconds, from_zero=from_zero)
    return argument(default, check, is_shared=is_shared, is_duration=True, shorter_than=shorter_than)


def _auto(shorter_than: str) -> Any:
    """The same for a timeout that may be learned."""
    return argument(AUTO, _as_auto, is_duration=True, shorter_than=(shorter_than,))


def about(settings: type) -> dict[str, Setting]:
    """What a user may set, by name."""
    fields = dataclasses.fields(settings)
    return {one.name: one.metadata[Setting] for one in fields if Setting in one.metadata}


_count = functools.partial(as_int, at_least=1)
_count_or_none = functools.partial(as_limit, at_least=1)


class Checked:
    """Settings that check their fields when they are made."""

    def __post_init__(self) -> None:
        for name, known in about(type(self)).items():
            object.__setattr__(self, name, known.check(name, getattr(self, name)))


@settings
class MainLimits(Checked):
    """The plain data among the arguments of `Wrapper`, which documents them."""

    monitor_thread_interval: Seconds = _duration(1.0, "soft_timeout")
    monitor_process_interval: Seconds = _duration(1.0, "heartbeat_timeout", "soft_timeout")
    heartbeat_interval: Seconds = _duration(1.0, "heartbeat_timeout")
    progress_watchdog_interval: Seconds = _duration(1.0, "soft_timeout")
    soft_timeout: Auto = _auto("hard_timeout")
    hard_timeout: Auto = _auto("barrier_timeout")
    heartbeat_timeout: Seconds = _duration(30.0, "barrier_timeout", is_shared=True)
    barrier_timeout: Seconds = _duration(120.0, is_shared=True)
    completion_timeout: Seconds = _duration(120.0, is_shared=True)
    last_call_wait: Seconds = _duration(0.0, from_zero=True)
    termination_grace_time: Seconds = _duration(5.0)
    rejoin: bool | None = argument(None, as_choice, is_shared=True)
    active_world_size: int | None = argument(None, _count_or_none, is_shared=True)
    min_world_size: int = argument(1, _count, is_shared=True)

    @property
    def soft(self) -> float:
        """``soft_timeout`` in seconds; if it is learned, its value before anything is."""
        if not isinstance(self.soft_timeout, str):
            return self.soft_timeout
        return min(_SOFT, self.hard * 2 / 3)

    @property
    def hard(self) -> float:
        """The same for ``hard_timeout``."""
        if not isinstance(self.hard_timeout, str):
            return self.hard_timeout
        soft = 0.0 if isinstance(self.soft_timeout, str) else self.soft_timeout
        return min(max(_HARD, soft * 3 / 2), self.barrier_timeout * 3 / 4)

    @property
    def longest_stretch(self) -> float:
        """Seconds that a rank may take for a stretch, whatever ``hard_timeout`` becomes."""
        return self.hard * (_GROWS if self.hard_timeout == AUTO else 1)

    def seconds(self, name: str) -> float:
        """A duration, by its name."""
        seconds: float = {"soft_timeout": self.soft, "hard_timeout": self.hard}.get(name) or getattr(
            self, name
        )
        return seconds


@settings
class RareLimits(Checked):
    """The plain data among the arguments of `Limits`, which documents them."""

    cleanup_timeout: Seconds = _duration(0.5, "hard_timeout")
    on_join: Join = argument(OnJoin.DEGRADED, _as_on_join, is_shared=True)
    join_window: Seconds = _duration(1.0, is_shared=True, from_zero=True)
    rejoin_wait: Seconds = _duration(2.0, is_shared=True, from_zero=True)
    max_same_faults: int | None = argument(5, _count_or_none, is_shared=True)
    max_faults: int | None = argument(None, _count_or_none, is_shared=True)
    fault_window: Seconds = _duration(3600.0, is_shared=True)
    collect_garbage: bool = argument(True, as_switch)
    keep_groups: bool = argument(False, as_switch, is_shared=True)
    hang_evidence: bool = argument(True, as_switch)


@settings
class AllLimits(MainLimits, RareLimits):
    """What the monitor and the protocol need to know about one call. Plain data, sent as JSON.

    Args:
        replaced: whether an agent replaces this process if it dies. The agent sets this.
        replaces_slow: whether a spare takes over from a rank that is slow.
    """

    replaced: bool = False
    replaces_slow: bool = False

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "AllLimits":
        """Reads the output of ``dataclasses.asdict`` back from JSON.

        Raises:
            TypeError: fields are missing or unknown.
            ValueError: a field has an invalid value.
        """
        known = {one.name for one in dataclasses.fields(cls)}
        if fields.keys() != known:
            raise TypeError(f"this version has other settings: {sorted(fields.keys() ^ known)}")
        return cls(**fields)

    @property
    def looks_for_evidence(self) -> bool:
        """Whether a rank that is stuck is found by evidence, and ``soft_timeout`` is learned."""
        return self.soft_timeout == AUTO and self.hang_evidence

    @property
    def shared(self) -> dict[str, object]:
        """The settings that must be the same on all ranks, as JSON values."""
        values = {name: getattr(self, name) for name, known in about(AllLimits).items() if known.is_shared}
        return {name: value.value if isinstance(value, OnJoin) else value for name, value in values.items()}
