"""The state of a rank: its place among the other ranks, its iteration."""

import dataclasses
import enum
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Protocol

from .settings import AllLimits

#: How many ranks the job began with, if WORLD_SIZE is more.
FORMATION_SIZE_ENV = "FT_WRAPPER_FORMATION_SIZE"
#: How many ranks should be active, from the options of ``ftrun``.
ACTIVE_WORLD_SIZE_ENV = "FT_WRAPPER_ACTIVE_WORLD_SIZE"
#: The largest WORLD_SIZE: each process of a job lists all of its ranks.
MOST_RANKS = 1 << 20
_TIMEOUT = timedelta(seconds=AllLimits.barrier_timeout)
_LAUNCH = "start the script with ftrun or torchrun, which set both"


class GlobalIterations(Protocol):
    """What a `State` needs from a store: see `ft_wrapper.protocol.by_hand`."""

    def handle_rank_restart(self, world_size: int, timeout: timedelta, *, rank: int | None = None) -> int:
        """Joins the job; returns the number of the iteration that this process is in."""

    def coordinate_global_iteration_advance(
        self, world_size: int, timeout: timedelta, is_coordinator: bool = False
    ) -> int:
        """Leaves the iteration; returns the number of the next one."""


class Mode(enum.Enum):
    """What a rank does in an iteration."""

    INITIALIZED = enum.auto()
    """No rank assigned yet."""
    ACTIVE = enum.auto()
    """Calls the wrapped function."""
    INACTIVE = enum.auto()
    """Waits as a hot spare."""
    TERMINATED = enum.auto()
    """Has left the job."""


def _is_spare(state: "State | FrozenState") -> bool:
    """Whether the rank waits as a hot spare, and does not call the function."""
    return state.mode is Mode.INACTIVE


@dataclasses.dataclass
class State:
    """A rank's state. Rank assignments change it; other plug-ins get the frozen copy.

    Args:
        rank: index among all ranks of the iteration, spares included; None once terminated.
        world_size: number of all ranks of the iteration, spares included.
        active_rank: index among the ranks that call the function; None for spares.
        active_world_size: number of ranks that call the function.
        initial_rank: the rank at the start of the job: its slot. Never changes.
        initial_world_size: number of ranks at the start of the job.
        iteration: number of the restart iteration, as the user sees it.
        mode: what the rank does in the iteration.
        fn_exception: what the function raised on this rank in the iteration that ended, or None.
        use_global_iteration: whether ``iteration`` is unique over the store's lifetime.
    """

    rank: int | None
    world_size: int
    active_rank: int | None = None
    active_world_size: int | None = None
    initial_rank: int | None = None
    initial_world_size: int | None = None
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: Exception | None = None
    use_global_iteration: bool = False

    def __post_init__(self) -> None:
        if self.initial_rank is None:
            self.initial_rank = self.rank
        if self.initial_world_size is None:
            self.initial_world_size = self.world_size

    @classmethod
    def from_env(cls) -> "State":
        """Reads ``RANK`` and ``WORLD_SIZE``; 0 and 1 where neither is set.

        Raises:
            ValueError: only one of them is set, one is not an integer, or the rank is out of range.
        """
        missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
        if len(missing) == 1:
            raise ValueError(f"variable {missing[0]} is not set, but its counterpart is; {_LAUNCH}")
        world_size = int_from_env("WORLD_SIZE", 1, MOST_RANKS, _LAUNCH) or 1
        why = f"because WORLD_SIZE={world_size}; {_LAUNCH}"
        return cls(rank=int_from_env("RANK", 0, world_size - 1, why) or 0, world_size=world_size)

    def set_distributed_vars(self) -> None:
        """Sets ``RANK`` and ``WORLD_SIZE`` for ``torch.distributed``: active rank and active world size."""
        os.environ["RANK"] = str(self.active_rank)
        os.environ["WORLD_SIZE"] = str(self.active_world_size)

    def advance(
        self,
        store: "GlobalIterations | None" = None,
        world_size: int | None = None,
        timeout: timedelta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Advances to the next iteration number and clears the last exception.

        With ``use_global_iteration`` all ranks agree on the number, once they have left the iteration.
        Otherwise it is one more. In a wrapped function the wrapper does this.

        Args:
            store: where the ranks agree; the client that `sync_with_global_iteration` was called with.
            world_size: number of ranks at the start of the job; ``initial_world_size`` when None.
            timeout: how long to wait for ranks that are alive but do not arrive; two minutes when None.
            is_coordinator: passed on to the store.

        Raises:
            ValueError: ``use_global_iteration`` without a store. A number counted here might not be unique.
            RestartError: the ranks went on without this one, or did not agree. The state is unchanged.
        """
        if not self.use_global_iteration:
            self.iteration += 1
        elif store is None:
            raise ValueError("use_global_iteration=True needs store=, where ranks agree on the next number")
        else:
            size = world_size or self.initial_world_size or self.world_size
            timeout = _TIMEOUT if timeout is None else timeout
            self.iteration = store.coordinate_global_iteration_advance(size, timeout, is_coordinator)
        self.fn_exception = None

    is_spare = property(_is_spare)

    def sync_with_global_iteration(self, store: "GlobalIterations", timeout: timedelta | None = None) -> None:
        """Takes the number of the iteration that all ranks are in.

        If this process has not joined the job with this client, it first does so, as the new process of its
        rank. Does nothing without ``use_global_iteration``. In a wrapped function the wrapper does this.

        Args:
            store: where the ranks agree.
            timeout: how long to wait for the other ranks; two minutes when None.

        Raises:
            RestartError: the job cannot be joined. The state is unchanged.
        """
        if self.use_global_iteration:
            size = self.initial_world_size or self.world_size
            timeout = _TIMEOUT if timeout is None else timeout
            self.iteration = store.handle_rank_restart(size, timeout, rank=self.initial_rank)

    def freeze(self) -> "FrozenState":
        """Returns a read-only copy."""
        return FrozenState(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

    def copy_from(self, other: "State | FrozenState", fields: Iterable[str] | None = None) -> None:
        """Copies fields of another state into this one.

        Args:
            other: where the values come from.
            fields: names of the fields to copy; all when None.
        """
        names = [f.name for f in dataclasses.fields(self)] if fields is None else fields
        for name in names:
            setattr(self, name, getattr(other, name))


@dataclasses.dataclass(frozen=True)
class FrozenState:
    """The same fields as `State`, read-only."""

    rank: int | None
    world_size: int
    active_rank: int | None = None
    active_world_size: int | None = None
    initial_rank: int | None = None
    initial_world_size: int | None = None
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: Exception | None = None
    use_global_iteration: bool = False

    is_spare = property(_is_spare)


# What the environment says of the job's size ------------------------------------------------------------


def int_from_env(name: str, least: int, most: int, way_out: str) -> int | None:
    """Reads a whole number from the environment; None if the variable is not set.

    Args:
        name: of the variable.
        least: the least that it may be.
        most: the most.
        way_out: for the error: what sets it, or why it has these limits.

    Raises:
        ValueError: it is not a number, or is out of range.
    """
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError:  # also for too many digits
        number = least - 1
    if not least <= number <= most:
        raise ValueError(
            f"environment variable {name}={text!r} must be an integer in {least}..{most}; {way_out}"
        )
    return number


def formation_size(world_size: int) -> int:
    """The number of ranks that the job begins with. Its slots count from 0.

    Args:
        world_size: WORLD_SIZE. FT_WRAPPER_FORMATION_SIZE takes precedence if set: the number of these ranks
            that the job began with.

    Raises:
        ValueError: FT_WRAPPER_FORMATION_SIZE is not a number from 1 to ``world_size``.
    """
    why = f"because WORLD_SIZE={world_size}: the number of ranks that the job began with; remove it otherwise"
    return int_from_env(FORMATION_SIZE_ENV, 1, world_size, why) or world_size


def launched_active_world_size() -> int | None:
    """How many ranks should be active according to ``ftrun``; None if it does not say.

    Raises:
        ValueError: the variable is not a number of at least 1.
    """
    way_out = "ftrun sets it by --active-world-size and --spare-nodes; remove it otherwise"
    return int_from_env(ACTIVE_WORLD_SIZE_ENV, 1, MOST_RANKS, way_out)
