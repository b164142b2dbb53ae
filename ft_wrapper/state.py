"""The state of a rank: its places in the world, its iteration."""

import dataclasses
import enum
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Protocol

from .settings import AllLimits

#: How many ranks the job began with, where WORLD_SIZE is more.
FORMATION_SIZE_ENV = "FT_WRAPPER_FORMATION_SIZE"
#: How many ranks are to be active, as ``ftrun`` was told.
ACTIVE_WORLD_SIZE_ENV = "FT_WRAPPER_ACTIVE_WORLD_SIZE"
#: The most that WORLD_SIZE may say: the ranks of a job are listed in each of its processes.
MOST_RANKS = 1 << 20
_TIMEOUT = timedelta(seconds=AllLimits.barrier_timeout)
_LAUNCH = "start the script with ftrun or torchrun, which set both"


class GlobalIterations(Protocol):
    """What a `State` asks of a store: see `ft_wrapper.protocol.by_hand`."""

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
    """Waits as hot spare."""
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
        use_global_iteration: whether ``iteration`` is unique for the whole life of the store.
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
            ValueError: only one of them is set, one is no integer, or the rank is out of range.
        """
        missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
        if len(missing) == 1:
            raise ValueError(f"variable {missing[0]} is not set, though its companion is; {_LAUNCH}")
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
        """Goes on to the next iteration number and forgets the last exception.

        With ``use_global_iteration`` the number is the one that all ranks agree on, once they have left the
        iteration. Otherwise it is one more. In a wrapped function the wrapper does this.

        Args:
            store: where the ranks agree; the client that `sync_with_global_iteration` was called with.
            world_size: number of ranks at the start of the job; ``initial_world_size`` when None.
            timeout: how long to wait for ranks that live but do not come; two minutes when None.
            is_coordinator: handed on to the store.

        Raises:
            ValueError: ``use_global_iteration`` without a store. A number counted here might be given twice.
            RestartError: the ranks went on without this one, or did not agree. The state stays as it was.
        """
        if not self.use_global_iteration:
            self.iteration += 1
        elif store is None:
            raise ValueError("use_global_iteration=True needs store=: ranks agree there on the next number")
        else:
            size = world_size or self.initial_world_size or self.world_size
            timeout = _TIMEOUT if timeout is None else timeout
            self.iteration = store.coordinate_global_iteration_advance(size, timeout, is_coordinator)
        self.fn_exception = None

    is_spare = property(_is_spare)

    def sync_with_global_iteration(self, store: "GlobalIterations", timeout: timedelta | None = None) -> None:
        """Takes the number of the iteration that all ranks are in.

        Joins the job first, if this process has not done so with this client: as a new process in its rank's
        place. Does nothing without ``use_global_iteration``. In a wrapped function the wrapper does this.

        Args:
            store: where the ranks agree.
            timeout: how long to wait for the others; two minutes when None.

        Raises:
            RestartError: the job cannot be joined. The state stays as it was.
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
        way_out: for the error: who sets it, or why there are these limits.

    Raises:
        ValueError: it is no number, or beyond the limits.
    """
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError:  # for too many digits, too
        number = least - 1
    if not least <= number <= most:
        raise ValueError(
            f"environment variable {name}={text!r} must be an integer in {least}..{most}; {way_out}"
        )
    return number


def formation_size(world_size: int) -> int:
    """The number of ranks that the job begins with: its slots are 0 to one less.

    Args:
        world_size: WORLD_SIZE. It counts unless FT_WRAPPER_FORMATION_SIZE is set, which says how many of them
            the job began with.

    Raises:
        ValueError: FT_WRAPPER_FORMATION_SIZE is no number from 1 to ``world_size``.
    """
    why = f"because WORLD_SIZE={world_size}: the number of ranks that the job began with; remove it otherwise"
    return int_from_env(FORMATION_SIZE_ENV, 1, world_size, why) or world_size


def launched_active_world_size() -> int | None:
    """How many ranks are to be active as far as ``ftrun`` knows.

    Raises:
        ValueError: the variable is no number of at least 1.
    """
    way_out = "ftrun sets it by --active-world-size and --spare-nodes; remove it otherwise"
    return int_from_env(ACTIVE_WORLD_SIZE_ENV, 1, MOST_RANKS, way_out)
