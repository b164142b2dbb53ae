"""Rank assignments: plug-ins that give each process its rank, active or spare.

They run on every rank before every iteration. Before the first iteration the state holds the ranks of the
job, and no rank is terminated. At a restart the state holds the ranks of the iteration that ended, some of
them lost. After the last plug-in the ranks are 0 … world size - 1 and the active ranks 0 … active world
size - 1, each once.
"""

import abc
import dataclasses
import json
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

from ..compose import PlugIn
from ..exception import InternalError
from ..exception import RankDiscarded as RankDiscarded
from ..settings import as_int, as_limit, as_timeout, check_callable
from ..state import Mode, State
from ..store import StoreMixin
from .places import Arrival, RankPlace, arrange, check_key, fill_holes, key_of, ranks_in_replicas
from .places import Layer as Layer
from .places import LayerFlag as LayerFlag

_logger = logging.getLogger(__name__)


@dataclasses.dataclass
class RankAssignmentCtx:
    """The input of a rank assignment, which changes and returns it.

    Args:
        state: the rank's state.
        store: a store for the iteration that is about to begin.
        terminated_ranks: the ranks of ``state``'s world that are lost.
        exchanges: number of exchanges over ``store`` so far, from which each gets its name, the same on all
            ranks.
    """

    state: State
    store: StoreMixin
    terminated_ranks: set[int]
    exchanges: int = 0


RankPlugIn: TypeAlias = Callable[[RankAssignmentCtx], RankAssignmentCtx]


@PlugIn.register
class RankAssignment(abc.ABC):
    """Base of the ``rank_assignment`` plug-ins of `Wrapper`: decides ranks, and which of them are active.

    If a plug-in leaves the ranks unchanged, gaps are closed as by `ShiftRanks`. If the state's mode stays
    ``INITIALIZED``, all ranks are active. So a plug-in that returns its context unchanged equals the default.
    If a plug-in raises, the call ends on this rank with this error.
    """

    @abc.abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Gives this rank its new rank.

        A plug-in that closes the gaps of terminated ranks also empties ``ctx.terminated_ranks``.

        Args:
            ctx: the rank's state, and the lost ranks.

        Returns:
            The context with the new state.

        Raises:
            RankDiscarded: there is no place for this rank.
        """


class RankFilter(RankAssignment):
    """Base of rank assignments that only decide which ranks are active. They run after gaps are closed."""


class ActivateAllRanks(RankFilter):
    """Makes every rank active."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Makes this rank active; see `RankFilter`."""
        return _activate_below(ctx, ctx.state.world_size)


class MaxActiveWorldSize(RankFilter):
    """Makes the first ranks active, up to a number; the others are hot spares.

    Args:
        max_active_world_size: the most active ranks; None for no limit.

    Raises:
        TypeError: it is not an int.
        ValueError: it is below 1.
    """

    def __init__(self, max_active_world_size: int | None = None) -> None:
        self.max_active_world_size = as_limit("max_active_world_size", max_active_world_size, at_least=1)

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Makes this rank active or a spare; see `RankFilter`."""
        active = _active_so_far(ctx.state)
        if self.max_active_world_size is not None:
            active = min(active, self.max_active_world_size)
        return _activate_below(ctx, active)


class ActiveWorldSizeDivisibleBy(RankFilter):
    """Makes the first ranks active, in a multiple of a number; the others are hot spares.

    With fewer ranks than this number, no rank is active. `RetryController` ends the job in that case.

    Args:
        divisor: the number.

    Raises:
        TypeError: it is not an int.
        ValueError: it is below 1.
    """

    def __init__(self, divisor: int = 1) -> None:
        self.divisor = as_int("divisor", divisor, at_least=1)

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Makes this rank active or a spare; see `RankFilter`."""
        active = _active_so_far(ctx.state)
        return _activate_below(ctx, active - active % self.divisor)


class ShiftRanks(RankAssignment):
    """Closes the gaps of terminated ranks: all higher ranks move down, in their order.

    ``0 X 2 3 X X 6 7``: 0, 2, 3, 6, 7 become 0 … 4.
    """

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Moves this rank; see `RankAssignment`."""
        rank = _surviving_rank(ctx)
        return _move(ctx, rank - sum(terminated < rank for terminated in ctx.terminated_ranks))


class FillGaps(RankAssignment):
    """Closes the gaps of terminated ranks with the highest ranks; the other ranks stay.

    ``0 X 2 3 X X 6 7`` becomes ``0 6 2 3 7``.
    """

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Moves this rank, if it is one of the highest; see `RankAssignment`."""
        rank = _surviving_rank(ctx)
        world_size = ctx.state.world_size - len(ctx.terminated_ranks)
        if rank >= world_size:
            # The number of survivors below this one that have to move, too.
            before = sum(r not in ctx.terminated_ranks for r in range(world_size, rank))
            rank = sorted(ctx.terminated_ranks)[before]
        return _move(ctx, rank)


class ReplicaGroups(RankAssignment):
    """Makes complete replicas active, each of ``size`` consecutive ranks; the others are hot spares.

    For sharded state, as with HSDP: rank r holds shard ``r % size``. Survivors in complete replicas keep
    their ranks, and so their shards. A rank behind the complete replicas fills a gap: one that held the same
    shard, else a spare, else any other. ``0 1 | X 3 | 4 X``, of size 2, becomes ``0 1 | 4 3``. With fewer
    ranks than a replica, no rank is active, as in `ActiveWorldSizeDivisibleBy`.

    To keep spares, use ``Compose(MaxActiveWorldSize(4), ReplicaGroups(2))``, with a multiple of ``size``.

    Args:
        size: the number of ranks in a replica.

    Raises:
        TypeError: it is not an int.
        ValueError: it is below 1.
    """

    def __init__(self, size: int) -> None:
        self.size = as_int("size", size, at_least=1)

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Moves this rank, if it has to, and makes it active or a spare; see `RankAssignment`."""
        rank, before = _surviving_rank(ctx), ctx.state.world_size
        places = fill_holes(self.size, before, _active_so_far(ctx.state), ctx.terminated_ranks)
        ctx = _move(ctx, places[rank])
        return _activate_below(ctx, ranks_in_replicas(self.size, ctx.state.world_size))


class FilterCountGroupedByKey(RankAssignment):
    """Marks groups of ranks as terminated, by their number of healthy ranks. Another plug-in closes the gaps.

    For example, to use nodes of 8 GPUs as a whole or not at all::

        Compose(
            ActivateAllRanks(),
            ShiftRanks(),
            FilterCountGroupedByKey(lambda state: socket.gethostname(), lambda count: count == 8),
        )

    Args:
        key_or_fn: the key; ranks with the same key form a group. A string, or a function of the rank's
            `State` that returns one.
        condition: whether a group stays, given its number of healthy ranks. One rank evaluates it for all.
        timeout: the longest wait of the ranks for each other, a ``timedelta`` or seconds.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: ``timeout`` is not positive.
    """

    def __init__(
        self,
        key_or_fn: str | Callable[[State], str],
        condition: Callable[[int], bool],
        timeout: timedelta | float = timedelta(seconds=60),
    ) -> None:
        check_key("key_or_fn", key_or_fn)
        check_callable("condition", condition, "condition=lambda count: count == 8")
        self.key_or_fn = key_or_fn
        self.condition = condition
        self.timeout = as_timeout("timeout", timeout)

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Adds the marked ranks to ``ctx.terminated_ranks``; see `RankAssignment`.

        Raises:
            RuntimeError: ``condition`` raised.
            ft_wrapper.store.BarrierTimeout: not all ranks arrived in time.
        """
        if ctx.state.rank in ctx.terminated_ranks:
            return ctx  # already marked, so it does not count

        def mark(keys: dict[int, Any]) -> dict[int, Any]:
            counts = Counter(keys.values())
            stays = {key: bool(self.condition(count)) for key, count in counts.items()}
            marked = sorted(rank for rank, key in keys.items() if not stays[key])
            return dict.fromkeys(keys, marked)

        marked = _exchange(ctx, type(self).__name__, key_of(ctx.state, self.key_or_fn), mark, self.timeout)
        ctx.terminated_ranks = ctx.terminated_ranks | set(marked)
        return ctx


class Tree(RankAssignment):
    """Assigns ranks by a tree of branches, such as racks and nodes.

    The ranks are the leaves, under one layer of branches per `Layer`. At the start they become active in
    depth-first order, up to ``max_ranks`` of all their branches; the others are the reserve. At a restart:

    1. Every branch with fewer than ``min_ranks`` healthy ranks is terminated, small branches first.
    2. A lost active rank is replaced by a reserve rank of the nearest enclosing branch that has one, if this
       branch and all branches below it have `LayerFlag.RESERVE`. The rank that became reserve last is taken
       first, and a new process last, since it is cold. A new process in the lost rank's own place counts as
       lost, and becomes reserve.
    3. Remaining gaps in branches with `LayerFlag.BACKFILL` are filled by the highest active ranks of the
       largest such enclosing branch.
    4. Gaps that still remain are closed: higher active ranks move down.
    5. ``world_size_filter`` decides how many ranks stay active.

    Do not combine it with other rank assignments.

    For example 256 of the healthy ranks, on whole nodes of 8::

        Tree([
            Layer(256, 256, flag=LayerFlag.RESERVE),
            Layer(8, 8, key_or_fn=lambda state: socket.gethostname(), flag=LayerFlag.RESERVE),
        ])

    Args:
        layers: the layers, from the first, whose key all ranks share, down to the smallest branches.
        world_size_filter: how many active ranks to keep, given their number. One rank evaluates it for all.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: there are no layers.
    """

    def __init__(
        self, layers: Sequence[Layer], world_size_filter: Callable[[int], int] | None = None
    ) -> None:
        if not isinstance(layers, Sequence) or not all(isinstance(one, Layer) for one in layers):
            raise TypeError(f"layers={layers!r} must be a list of Layer, such as [Layer(max_ranks=8)]")
        if not layers:
            raise ValueError(f"layers={layers!r} must not be empty; pass [Layer(max_ranks=8)]")
        if world_size_filter is not None:
            check_callable("world_size_filter", world_size_filter, "world_size_filter=lambda n: n - n % 8")
        self.layers = list(layers)
        self.world_size_filter = world_size_filter
        self._keys: list[str] | None = None
        self._table: str | None = None

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Gives this rank its place; see `RankAssignment`. All ranks wait up to the store's timeout.

        Raises:
            RankDiscarded: this rank's branch has too few healthy ranks left.
            RuntimeError: ranks have different keys in the first layer, or ``world_size_filter`` raised or
                returned no number from 0 to its argument.
            ft_wrapper.store.BarrierTimeout: not all ranks arrived in time.
        """
        _surviving_rank(ctx)
        state = ctx.state
        if self._keys is None:
            self._keys = [key_of(state, layer.key_or_fn) for layer in self.layers]
        if state.initial_rank is None:
            raise InternalError(f"rank {state.rank} has no initial rank, by which Tree knows it")

        def arrange_all(arrivals: dict[int, Any]) -> dict[int, Any]:
            came = {rank: Arrival(**arrival) for rank, arrival in arrivals.items()}
            places = arrange(self.layers, self.world_size_filter, came)
            return {rank: dataclasses.asdict(place) for rank, place in places.items()}

        arrival = Arrival(state.initial_rank, self._keys, self._table)
        brings, timeout = dataclasses.asdict(arrival), ctx.store.timeout
        place = RankPlace(**_exchange(ctx, type(self).__name__, brings, arrange_all, timeout))
        self._table = place.table
        if place.came_as is not None:
            warnings.warn(
                f"rank {place.came_as} of the job is elsewhere in the order of the tree, since ranks of a "
                "branch are not neighbours; give neighbouring ranks to one node to keep them as they are",
                stacklevel=2,
            )
        if place.rank is None:
            raise RankDiscarded(f"rank {state.rank} (initial rank {state.initial_rank}): {place.why}")
        ctx.state = dataclasses.replace(
            state,
            rank=place.rank,
            world_size=place.world_size,
            active_rank=place.active_rank,
            active_world_size=place.active_world_size,
            mode=Mode.INACTIVE if place.active_rank is None else Mode.ACTIVE,
        )
        ctx.terminated_ranks = set()
        return ctx


def activate_if_unsaid(ctx: object, rank: int | None, world_size: int) -> State:
    """Completes a rank assignment that did not close the gaps, or did not decide which ranks are active.

    Args:
        ctx: the assignment's result.
        rank: the rank before the assignment.
        world_size: the world size before the assignment.

    Raises:
        InternalError: the result is not a `RankAssignmentCtx`.
    """
    if not isinstance(ctx, RankAssignmentCtx):
        raise InternalError(f"rank_assignment must return the RankAssignmentCtx that it got; it gave {ctx!r}")
    if ctx.terminated_ranks and (ctx.state.rank, ctx.state.world_size) == (rank, world_size):
        ctx = ShiftRanks()(ctx)
    if ctx.state.mode is Mode.INITIALIZED:
        ctx = ActivateAllRanks()(ctx)
    return ctx.state


def _rank(state: State) -> int:
    if state.rank is None:
        raise InternalError(f"a rank assignment was called on a rank that has left the job: {state}")
    return state.rank


def _surviving_rank(ctx: RankAssignmentCtx) -> int:
    rank = _rank(ctx.state)
    if rank in ctx.terminated_ranks:
        raise RankDiscarded(f"rank {rank} is among the terminated ranks {sorted(ctx.terminated_ranks)}")
    return rank


def _move(ctx: RankAssignmentCtx, rank: int) -> RankAssignmentCtx:
    world_size = ctx.state.world_size - len(ctx.terminated_ranks)
    ctx.state = dataclasses.replace(ctx.state, rank=rank, world_size=world_size)
    ctx.terminated_ranks = set()
    return ctx


def _active_so_far(state: State) -> int:
    """The number of ranks that earlier filters left active; without such filters, of all ranks."""
    if state.active_world_size is None:
        return state.world_size
    return min(state.active_world_size, state.world_size)


def _activate_below(ctx: RankAssignmentCtx, active_world_size: int) -> RankAssignmentCtx:
    rank = _rank(ctx.state)
    active = rank < active_world_size
    ctx.state = dataclasses.replace(
        ctx.state,
        mode=Mode.ACTIVE if active else Mode.INACTIVE,
        active_rank=rank if active else None,
        active_world_size=active_world_size,
    )
    return ctx


def _exchange(
    ctx: RankAssignmentCtx,
    name: str,
    contribution: object,
    compute: Callable[[dict[int, Any]], dict[int, Any]],
    timeout: timedelta,
) -> Any:
    """Collects a contribution of every rank that is not terminated, and computes a result for each, as JSON.

    One rank computes for all.

    Raises:
        RuntimeError: ``compute`` raised; on all ranks, since all wait for its results.
    """

    def compute_or_say_why(contributions: dict[int, str]) -> dict[int, str]:
        try:
            results = compute({rank: json.loads(text) for rank, text in contributions.items()})
        except Exception as ex:
            _logger.exception("%s failed, for all ranks", name)
            return dict.fromkeys(contributions, json.dumps({"error": f"{type(ex).__name__}: {ex}"}))
        return {rank: json.dumps({"result": result}) for rank, result in results.items()}

    ctx.exchanges += 1
    what, count = f"{name}/{ctx.exchanges}", ctx.state.world_size - len(ctx.terminated_ranks)
    brings = (_rank(ctx.state), json.dumps(contribution))
    reply = json.loads(ctx.store.compute_once(what, *brings, count, compute_or_say_why, timeout))
    if "error" in reply:
        raise RuntimeError(f"{name}: {reply['error']}")
    return reply["result"]
