"""The kinds of interruption, in the order of blame."""

import dataclasses
import enum
import operator
from collections.abc import Iterable


class Interruption(enum.Enum):
    """What ended an iteration on one rank; the likeliest cause comes first.

    A rank that died makes its peers' collectives raise, not the other way round.
    """

    #: No progress for ``hard_timeout``: the process was ended.
    HARD_TIMEOUT = enum.auto()
    #: The process died.
    TERMINATED = enum.auto()
    #: The wrapped function, or ``initialize``, raised ``torch.OutOfMemoryError``, or an error from it.
    OUT_OF_MEMORY = enum.auto()
    #: No progress for ``soft_timeout``.
    SOFT_TIMEOUT = enum.auto()
    #: The rank's monitor failed, so that its faults would go unnoticed.
    MONITOR_PROCESS_EXCEPTION = enum.auto()
    #: No heartbeat for ``heartbeat_timeout``: its host or network is lost.
    UNRESPONSIVE = enum.auto()
    #: The rank left the job on request: ``ftrun drain``.
    DRAINED = enum.auto()
    #: Nothing failed: ``ftrun restart`` ended the iteration on all ranks.
    REQUESTED = enum.auto()
    #: A ``BaseException`` left the wrapped function, or the rank left the job in order.
    BASE_EXCEPTION = enum.auto()
    #: The wrapped function, or ``initialize``, raised another ``Exception``.
    EXCEPTION = enum.auto()


@dataclasses.dataclass(frozen=True)
class InterruptionRecord:
    """One rank's part in the end of an iteration.

    Args:
        rank: the rank in the iteration that ended.
        interruption: what happened to it.
    """

    rank: int
    interruption: Interruption


def out_of_memory(error: BaseException | None) -> BaseException | None:
    """Torch's ``OutOfMemoryError``, if an exception is one or was raised from one; else None.

    It is found by name, since this module does not import torch.

    Args:
        error: the exception that was raised.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if "OutOfMemoryError" in map(operator.attrgetter("__name__"), type(error).__mro__):
            return error
        seen.add(id(error))
        error = error.__cause__
    return None


def by_blame(records: Iterable[InterruptionRecord]) -> list[InterruptionRecord]:
    """Sorts records so that the likeliest cause comes first; equal ones keep their order."""
    return sorted(records, key=lambda record: list(Interruption).index(record.interruption))
