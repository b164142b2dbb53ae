"""The wrapper's numbers and switches: each is written here once, with its check, unit and documentation.

A setting that is added to `Limits` is an argument of the wrapper, checked, documented, known to the monitor,
and compared between the ranks if it says so. Plug-ins and the store are in `ft_wrapper.restart.arguments`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import field
from datetime import timedelta
from typing import Any

SECONDS = "s"
"""The unit of durations, which users may give as ``timedelta``."""
FORMATION_SIZE_ENV = "FT_WRAPPER_FORMATION_SIZE"
"""How many ranks the job began with, where WORLD_SIZE is more."""
REPLACED_ENV = "FT_WRAPPER_REPLACED"
"""Whether an agent starts the process again if it dies."""
ACTIVE_WORLD_SIZE_ENV = "FT_WRAPPER_ACTIVE_WORLD_SIZE"
"""How many ranks are to be active, as ``ftrun`` was told."""


class OnJoin(str, enum.Enum):
    """What a process causes that joins a running job."""

    NEXT = "next"
    """It waits for the next restart."""
    DEGRADED = "degraded"
    """It ends the iteration if fewer ranks are active than there were."""
    NOW = "now"
    """It ends the iteration."""


@dataclasses.dataclass(frozen=True)
class About:
    """What is known of a setting beside its default.

    Args:
        check: given the name and what a user passed; returns what is kept, or raises.
        doc: what it means.
        unit: `SECONDS`, or nothing.
        is_shared: whether it must be the same on all ranks.
        shorter_than: settings that it has to be shorter than.
    """

    check: Callable[[str, Any], Any]
    doc: str
    unit: str = ""
    is_shared: bool = False
    shorter_than: tuple[str, ...] = ()


def said(about: About) -> dict[str, About]:
    """The metadata of a setting's field."""
    return {"about": about}


def about(settings: type) -> dict[str, About]:
    """What a user may set, by name."""
    found = {one.name: one.metadata.get("about") for one in dataclasses.fields(settings)}
    return {name: known for name, known in found.items() if known is not None}


def checked(settings: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Checks what a user passed.

    Returns:
        What is kept of it: durations in seconds.

    Raises:
        TypeError: an argument has the wrong type, or there is none of that name.
        ValueError: a value is out of range, or durations contradict each other.
    """
    known = about(settings)
    for name in given:
        if name not in known:
            raise TypeError(f"Wrapper() got an unexpected keyword argument {name!r}")
    kept = {name: known[name].check(name, value) for name, value in given.items()}
    values = {name: kept.get(name, getattr(settings, name)) for name in known}
    for name in known:
        for longer in known[name].shorter_than:
            if not values[name] < values[longer]:
                durations = timedelta(seconds=values[name]), timedelta(seconds=values[longer])
                raise ValueError(f"{name}={durations[0]} must be shorter than {longer}={durations[1]}")
    return kept


# Checks --------------------------------------------------------------------------------------------------


def check_duration(name: str, value: object, *, from_zero: bool = False) -> float:
    """Returns the seconds."""
    if isinstance(value, bool) or not isinstance(value, (timedelta, int, float)):
        raise TypeError(f"{name}={value!r} must be a datetime.timedelta or a number of seconds")
    if isinstance(value, (int, float)) and not abs(value) < timedelta.max.total_seconds():
        raise ValueError(f"{name}={value!r} must be a finite number of seconds")
    duration = value if isinstance(value, timedelta) else timedelta(seconds=value)
    if duration < timedelta(0) or (duration == timedelta(0) and not from_zero):
        raise ValueError(f"{name}={value!r} must be {'at least' if from_zero else 'more than'} 0 seconds")
    return duration.total_seconds()


def check_count(name: str, value: object, *, or_none: bool = False) -> int | None:
    """Returns a number of at least 1."""
    if value is None and or_none:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be an integer")
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")
    return value


def check_switch(name: str, value: object) -> bool:
    """Returns True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False")
    return value


def check_on_join(name: str, value: object) -> OnJoin:
    """Returns the enum's member."""
    known = ", ".join(repr(member.value) for member in OnJoin)
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be a string, one of {known}")
    try:
        return OnJoin(value)
    except ValueError:
        raise ValueError(f"{name}={value!r} must be one of {known}") from None


def _seconds(doc: str, *shorter_than: str, shared: bool = False, from_zero: bool = False) -> dict[str, About]:
    check = functools.partial(check_duration, from_zero=from_zero)
    return said(About(check, doc, SECONDS, shared, shorter_than))


def _shared(check: Callable[[str, Any], Any], doc: str) -> dict[str, About]:
    return said(About(check, doc, is_shared=True))


_count_or_none = functools.partial(check_count, or_none=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What the wrapper, the monitor and the protocol have to know. Durations are in seconds.

    Plain data that goes through JSON. A user's arguments are checked by `checked`, before.
    """

    monitor_thread_interval: float = field(
        default=1.0,
        metadata=_seconds("how late the monitor thread notices a missed event at the most.", "soft_timeout"),
    )
    monitor_process_interval: float = field(
        default=1.0,
        metadata=_seconds(
            "how late the monitor does, in whatever process.", "heartbeat_timeout", "soft_timeout"
        ),
    )
    heartbeat_interval: float = field(
        default=1.0,
        metadata=_seconds(
            "between two requests of a heart, which beats and looks at others in turn.", "heartbeat_timeout"
        ),
    )
    progress_watchdog_interval: float = field(
        default=1.0, metadata=_seconds("between two automatic time stamps of progress.", "soft_timeout")
    )
    soft_timeout: float = field(
        default=60.0, metadata=_seconds("no progress for so long restarts all ranks.", "hard_timeout")
    )
    hard_timeout: float = field(
        default=90.0, metadata=_seconds("no progress for so long ends the process.", "barrier_timeout")
    )
    heartbeat_timeout: float = field(
        default=30.0,
        metadata=_seconds(
            "no heartbeat for so long, and a rank counts as lost.", "barrier_timeout", shared=True
        ),
    )
    barrier_timeout: float = field(
        default=120.0,
        metadata=_seconds(
            "how long a restart waits for ranks that live but do not come. Between two wrapped calls they "
            "are waited for as long as they live; the log says so this often.",
            shared=True,
        ),
    )
    completion_timeout: float = field(
        default=120.0,
        metadata=_seconds(
            "how long a rank that has finished waits for the others before it restarts them; once in a call.",
            shared=True,
        ),
    )
    last_call_wait: float = field(
        default=0.0,
        metadata=_seconds("how long to gather further faults before aborting.", from_zero=True),
    )
    termination_grace_time: float = field(default=5.0, metadata=_seconds("from SIGTERM to SIGKILL."))
    use_global_iteration: bool = field(
        default=False,
        metadata=_shared(check_switch, "iteration numbers are unique for the whole life of the store."),
    )
    active_world_size: int | None = field(
        default=None,
        metadata=_shared(
            _count_or_none,
            "so many ranks are active, the rest are hot spares; short for a rank assignment. When None, and "
            "without a ``rank_assignment``: what ``ftrun --active-world-size`` or ``--spare-nodes`` says, or "
            "fewer while there are not so many ranks.",
        ),
    )
    min_world_size: int = field(
        default=1,
        metadata=_shared(check_count, "with fewer ranks than this the call fails rather than going on."),
    )
    on_join: OnJoin = field(
        default=OnJoin.DEGRADED,
        metadata=_shared(
            check_on_join,
            "what a process causes that joins the running job (which needs ``use_global_iteration``): it "
            "waits for the ``next`` restart; or it ends the iteration if fewer ranks are active than there "
            "were (``degraded``), or in any case (``now``).",
        ),
    )
    join_window: float = field(
        default=1.0,
        metadata=_seconds(
            "how long joins are gathered before that; longer in a crash loop.", shared=True, from_zero=True
        ),
    )
    rejoin_wait: float = field(
        default=2.0,
        metadata=_seconds(
            "how long a restart waits for an announced replacement.", shared=True, from_zero=True
        ),
    )
    max_same_faults: int | None = field(
        default=5,
        metadata=_shared(
            _count_or_none,
            "the same fault so many times in a row ends the job with that error: what raises the same type "
            "at the same line of your code, and without progress before, which is a ``ping()``, or a minute "
            "in the function. From the second time on the ranks wait before they enter it again: 0.5 s, and "
            "twice as long each time, at most 10 s. None: it is never ended, nor slowed down.",
        ),
    )
    replaced: bool = False
    """Whether an agent starts another process in place of this one. No argument: the agent says so."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Limits:
        """Reads what ``dataclasses.asdict`` made, and JSON has carried.

        Raises:
            TypeError: fields are missing, or are not known.
            ValueError: one has a value that it cannot have.
        """
        known = {one.name for one in dataclasses.fields(cls)}
        if fields.keys() != known:
            raise TypeError(f"this version has other settings: {sorted(fields.keys() ^ known)}")
        return cls(**{**fields, "on_join": OnJoin(fields["on_join"])})

    @property
    def limits(self) -> Limits:
        """These alone, of an object that has more."""
        return Limits(**{one.name: getattr(self, one.name) for one in dataclasses.fields(Limits)})

    @property
    def shared(self) -> dict[str, object]:
        """What must be the same on all ranks, as JSON has it."""
        values = {name: getattr(self, name) for name, known in about(type(self)).items() if known.is_shared}
        return {name: value.value if isinstance(value, OnJoin) else value for name, value in values.items()}


def formation_size(world_size: int) -> int:
    """The number of ranks that the job begins with: its slots are 0 to one less.

    Args:
        world_size: WORLD_SIZE. It counts unless FT_WRAPPER_FORMATION_SIZE is set, which says how many of them
            the job began with.

    Raises:
        ValueError: FT_WRAPPER_FORMATION_SIZE is no number from 1 to ``world_size``.
    """
    text = os.environ.get(FORMATION_SIZE_ENV)
    if text is None:
        return world_size
    if not text.isdecimal() or not 1 <= int(text) <= world_size:
        raise ValueError(
            f"environment variable {FORMATION_SIZE_ENV}={text!r} must be an integer in 1..{world_size}, "
            f"because WORLD_SIZE={world_size}: the number of ranks that the job began with; remove it "
            "otherwise"
        )
    return int(text)


def is_replaced() -> bool:
    """Whether an agent has said, in the environment, that it starts this process again if it dies."""
    return os.environ.get(REPLACED_ENV) == "1"
