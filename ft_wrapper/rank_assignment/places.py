"""The places that ranks take: pure functions of the ranks that arrive, or are lost.

In a `Tree` ranks are leaves. Each `Layer` groups them into branches, the first layer into a single branch. A
leaf is named by its slot (the initial rank). A branch is named by its path: the numbers of the branches from
below the first layer down to it. Numbers grow in the order in which branches appear, so that leaves sorted
by path are in depth-first order.

A lost rank sends nothing, but its former place decides which rank takes over. So every rank keeps the
*table*, with one row per leaf, sends it, and gets a new one back. The computing rank finds everything it
needs in the ranks' messages, whichever rank is lost and whichever one computed before. Columns of mostly
regular numbers compress well: a few hundred bytes for thousands of ranks.
"""

import base64
import bisect
import dataclasses
import enum
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter

from ..settings import as_int, as_limit
from ..state import State

_NOT_ACTIVE = -1


class LayerFlag(enum.Flag):
    """What the branches of a `Layer` offer when an active rank is lost."""

    RESERVE = enum.auto()
    """A reserve rank of the branch may take the lost rank's place."""
    BACKFILL = enum.auto()
    """The branch's highest active ranks may take the places of lost ranks, if there is no reserve."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer of branches of a `Tree`.

    Args:
        min_ranks: the fewest healthy ranks; a branch with fewer is terminated as a whole.
        max_ranks: the most active ranks of a branch at the start; the others are its reserve. None for no
            limit.
        key_or_fn: the key; ranks with the same key (and the same branch above) form a branch. A string, or a
            function of the rank's `State` that returns one.
        flag: how ranks of the branch replace its lost ranks; None if they don't.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: ``min_ranks`` is negative or above ``max_ranks``, or ``max_ranks`` is below 1.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    key_or_fn: str | Callable[[State], str] = ""
    flag: LayerFlag | None = None

    def __post_init__(self) -> None:
        as_int("min_ranks", self.min_ranks, at_least=0)
        as_limit("max_ranks", self.max_ranks, at_least=1)
        if self.max_ranks is not None and self.min_ranks > self.max_ranks:
            raise ValueError(f"min_ranks={self.min_ranks} must not exceed max_ranks={self.max_ranks}")
        check_key("key_or_fn", self.key_or_fn)
        if self.flag is not None and not isinstance(self.flag, LayerFlag):
            raise TypeError(f"flag={self.flag!r} must be LayerFlag.RESERVE, .BACKFILL, both with |, or None")

    def has(self, flag: LayerFlag) -> bool:
        """Whether the layer has a flag."""
        return self.flag is not None and flag in self.flag


def check_key(name: str, key_or_fn: object) -> None:
    """Raises TypeError unless the argument is a key or a function."""
    if not isinstance(key_or_fn, str) and not callable(key_or_fn):
        raise TypeError(f"{name}={key_or_fn!r} must be a string, or a function of the state that gives one")


def key_of(state: State, key_or_fn: str | Callable[[State], str]) -> str:
    """The rank's key.

    Raises:
        TypeError: the function returned neither a string nor a number.
    """
    key: object = key_or_fn(state) if callable(key_or_fn) else key_or_fn
    if isinstance(key, (str, int)):
        return str(key)
    raise TypeError(f"key_or_fn returned {key!r} on rank {state.rank}; let it return a string")


@dataclasses.dataclass(frozen=True)
class Arrival:
    """What a rank sends.

    Args:
        slot: the rank's slot (initial rank).
        keys: the rank's key in each layer.
        table: the table that the rank last got; None if the rank is new.
    """

    slot: int
    keys: list[str]
    table: str | None


@dataclasses.dataclass(frozen=True)
class RankPlace:
    """What a rank gets back.

    Args:
        rank: the new rank; None if the rank is discarded.
        active_rank: the new active rank; None for the reserve.
        world_size: number of ranks.
        active_world_size: number of active ranks.
        table: the new table, to send next time.
        why: why the rank is discarded; empty if it is not.
        came_as: the rank's former number, if this is the first table and the tree's order differs; or None.
    """

    rank: int | None
    active_rank: int | None
    world_size: int
    active_world_size: int
    table: str
    why: str = ""
    came_as: int | None = None


@dataclasses.dataclass(eq=False)
class _Leaf:
    """A rank in the tree.

    Args:
        slot: the rank's slot (initial rank).
        path: numbers of its branches below the first layer.
        active_rank: its active rank; None for the reserve.
        reserve_order: order of joining the reserve: the higher, the later.
        rank: its rank before the assignment.
        came: whether it has arrived.
        warm: whether its process existed before; a new process, in an old or a new leaf, is cold.
        why: why it is terminated, though it has arrived; empty if it is not.
    """

    slot: int
    path: tuple[int, ...]
    active_rank: int | None
    reserve_order: int
    rank: int
    came: bool
    warm: bool = False
    why: str = ""

    @property
    def healthy(self) -> bool:
        return self.came and not self.why

    @property
    def active(self) -> bool:
        return self.healthy and self.active_rank is not None


def arrange(
    layers: Sequence[Layer], world_size_filter: Callable[[int], int] | None, arrivals: dict[int, Arrival]
) -> dict[int, RankPlace]:
    """Assigns a place to every rank that has arrived.

    Args:
        layers: the layers, from the single branch of all ranks down to the smallest branches.
        world_size_filter: how many active ranks to keep, given their number; None to keep all.
        arrivals: each rank's message, by its former rank.

    Raises:
        ValueError: the ranks do not share the first layer's key, or ``world_size_filter`` returned no number
            from 0 to its argument.
    """
    roots = sorted({arrival.keys[0] for arrival in arrivals.values()})
    if len(roots) > 1:
        raise ValueError(f"Tree: all ranks must have the same key in the first layer, but there are {roots}")
    generation, leaves = _newest_table(arrivals, len(layers))
    newcomers = _admit(leaves, arrivals, len(layers))
    # A stable sort: old leaves keep their order, new ones follow in theirs.
    leaves.sort(key=attrgetter("path"))
    tree = _Tree(layers, leaves)
    order = {id(leaf): position for position, leaf in enumerate(leaves)}

    tree.activate([leaf for leaf in leaves if leaf in newcomers])
    tree.terminate_small_branches()
    # A leaf with a new process counts as lost if a warm rank may take its place; otherwise it keeps it.
    stays = {leaf for leaf in leaves if leaf.healthy and (leaf.warm or leaf in newcomers)}
    lost = [leaf for leaf in leaves if leaf not in stays and leaf.active_rank is not None]
    lost.sort(key=attrgetter("healthy", "rank"))
    left = tree.replace_from_reserve(lost, warm=True)
    tree.close(tree.replace_from_reserve([leaf for leaf in left if not leaf.healthy], warm=False))
    survivors = [leaf for leaf in leaves if leaf.healthy]
    if world_size_filter is not None and survivors:
        tree.limit(_filtered(world_size_filter, tree.active_world_size))

    table = f"{generation + 1}:{_encode(survivors)}"
    position = {id(leaf): rank for rank, leaf in enumerate(survivors)}
    return {
        leaf.rank: RankPlace(
            rank=position.get(id(leaf)),
            active_rank=leaf.active_rank if leaf.healthy else None,
            world_size=len(survivors),
            active_world_size=tree.active_world_size,
            table=table,
            why=leaf.why,
            came_as=leaf.rank if generation == 0 and order[id(leaf)] != leaf.rank else None,
        )
        for leaf in leaves
        if leaf.came
    }


def _newest_table(arrivals: dict[int, Arrival], depth: int) -> tuple[int, list[_Leaf]]:
    tables = {arrival.table for arrival in arrivals.values() if arrival.table is not None}
    if not tables:
        return 0, []
    number, _, columns = max((table.partition(":") for table in tables), key=lambda parts: int(parts[0]))
    return int(number), _decode(columns, depth)


def _admit(leaves: list[_Leaf], arrivals: dict[int, Arrival], depth: int) -> set[_Leaf]:
    """Finds the leaves of the ranks that have arrived. Adds new leaves, and returns these."""
    known = {leaf.slot: leaf for leaf in leaves}
    numbers: dict[tuple[str, ...], int] = {}
    for arrival in arrivals.values():
        if arrival.table is not None and arrival.slot in known:
            path = known[arrival.slot].path
            numbers.update((tuple(arrival.keys[1 : k + 2]), path[k]) for k in range(depth - 1))
    fresh = [itertools.count(1 + max((one.path[k] for one in leaves), default=-1)) for k in range(depth - 1)]

    newcomers = set()
    for rank, arrival in sorted(arrivals.items()):
        for k in range(depth - 1):
            branch = tuple(arrival.keys[1 : k + 2])
            if branch not in numbers:
                numbers[branch] = next(fresh[k])
        path = tuple(numbers[tuple(arrival.keys[1 : k + 2])] for k in range(depth - 1))
        leaf = known.get(arrival.slot)
        # A process that replaces another one in its slot and branch also takes its place in the tree.
        if leaf is None or leaf.path != path:
            leaf = _Leaf(arrival.slot, path, active_rank=None, reserve_order=0, rank=rank, came=True)
            leaves.append(leaf)
            newcomers.add(leaf)
        leaf.rank, leaf.came, leaf.warm = rank, True, arrival.table is not None
    return newcomers


def _filtered(world_size_filter: Callable[[int], int], most: int) -> int:
    wanted = world_size_filter(most)
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 0 <= wanted <= most:
        raise ValueError(f"world_size_filter({most}) returned {wanted!r}, not an int from 0 to {most}")
    return wanted


class _Tree:
    """The leaves, and their branches."""

    def __init__(self, layers: Sequence[Layer], leaves: list[_Leaf]) -> None:
        self.layers = layers
        self.leaves = leaves
        # By depth, then by path: the leaves of each branch, in depth-first order.
        self.branches: list[dict[tuple[int, ...], list[_Leaf]]] = [{} for _ in layers]
        for leaf in leaves:
            for depth, branches in enumerate(self.branches):
                branches.setdefault(leaf.path[:depth], []).append(leaf)
        self.active_world_size = sum(leaf.active_rank is not None for leaf in leaves)
        self.last_order = max((leaf.reserve_order for leaf in leaves), default=0)

    def to_reserve(self, leaf: _Leaf) -> None:
        """Makes a leaf the youngest of the reserve."""
        self.last_order += 1
        leaf.active_rank, leaf.reserve_order = None, self.last_order

    def activate(self, newcomers: Iterable[_Leaf]) -> None:
        """Gives new leaves the next active ranks, while all their branches have room."""
        taken = Counter[tuple[int, ...]]()  # number of active ranks by branch
        for leaf in self.leaves:
            if leaf.active_rank is not None:
                taken.update(leaf.path[:depth] for depth in range(len(self.layers)))
        for leaf in newcomers:
            branches = [leaf.path[:depth] for depth in range(len(self.layers))]
            limits = zip(self.layers, branches, strict=True)
            if all(layer.max_ranks is None or taken[path] < layer.max_ranks for layer, path in limits):
                leaf.active_rank = self.active_world_size
                self.active_world_size += 1
                taken.update(branches)
            else:
                self.to_reserve(leaf)

    def terminate_small_branches(self) -> None:
        """Terminates the ranks of branches with too few healthy ones, from the smallest branches up."""
        for layer, branches in reversed(list(zip(self.layers, self.branches, strict=True))):
            for leaves in branches.values():
                healthy = [leaf for leaf in leaves if leaf.healthy]
                if len(healthy) < layer.min_ranks:
                    slots = [leaf.slot for leaf in healthy]
                    for leaf in healthy:
                        leaf.why = (
                            f"{len(healthy)} healthy ranks are left in its branch "
                            f"(initial ranks {slots}), fewer than min_ranks={layer.min_ranks}"
                        )

    def replace_from_reserve(self, lost: Iterable[_Leaf], *, warm: bool) -> list[_Leaf]:
        """Puts reserve ranks into the places of lost ranks, the youngest of the nearest branch first.

        Args:
            lost: lost ranks, and ranks whose process is new and cold, which become reserve.
            warm: whether to take warm reserve ranks, or cold ones.

        Returns:
            The lost ranks without a replacement.
        """
        reserves: dict[tuple[int, ...], list[_Leaf]] = {}

        def youngest(path: tuple[int, ...]) -> _Leaf | None:
            if path not in reserves:
                branch = self.branches[len(path)][path]
                reserves[path] = sorted(
                    (one for one in branch if one.healthy and one.warm == warm and one.active_rank is None),
                    key=attrgetter("reserve_order"),
                )
            reserve = reserves[path]
            while reserve:
                leaf = reserve.pop()
                # If it is active, another branch, smaller or larger, has taken it.
                if leaf.active_rank is None:
                    return leaf
            return None

        unreplaced = []
        for leaf in lost:
            replacement = None
            for depth in reversed(range(len(self.layers))):
                if replacement is not None or not self.layers[depth].has(LayerFlag.RESERVE):
                    break
                replacement = youngest(leaf.path[:depth])
            if replacement is None:
                unreplaced.append(leaf)
            else:
                replacement.active_rank = leaf.active_rank
                if leaf.healthy:
                    self.to_reserve(leaf)
        return unreplaced

    def close(self, gaps: list[_Leaf]) -> None:
        """Closes the gaps of lost ranks: by backfilling, then by moving higher ranks down."""
        vacated: list[int] = []
        depth = self._backfill_depth()
        domains: dict[tuple[int, ...] | None, list[_Leaf]] = {}
        for gap in gaps:
            domains.setdefault(None if depth is None else gap.path[:depth], []).append(gap)
        for path, of_domain in domains.items():
            fillers: list[_Leaf] = []
            if path is not None:
                active = [leaf for leaf in self.branches[len(path)][path] if leaf.active]
                active.sort(key=attrgetter("active_rank"))
                fillers = active[-len(of_domain) :]
            for gap, filler in itertools.zip_longest(of_domain, fillers):
                freed = gap.active_rank if filler is None else filler.active_rank
                if freed is not None:
                    vacated.append(freed)
                if filler is not None:
                    filler.active_rank = gap.active_rank
        vacated.sort()
        self.active_world_size -= len(gaps)
        for leaf in self.leaves:
            if leaf.active_rank is not None and leaf.healthy:
                leaf.active_rank -= bisect.bisect_left(vacated, leaf.active_rank)

    def _backfill_depth(self) -> int | None:
        """Depth of the largest branches that backfill, as do all branches below them; None without any."""
        upwards = reversed(range(len(self.layers)))
        unbroken = itertools.takewhile(lambda depth: self.layers[depth].has(LayerFlag.BACKFILL), upwards)
        return min(unbroken, default=None)

    def limit(self, active_world_size: int) -> None:
        """Moves the highest active ranks to the reserve."""
        self.active_world_size = active_world_size
        for leaf in self.leaves:
            if leaf.healthy and leaf.active_rank is not None and leaf.active_rank >= active_world_size:
                self.to_reserve(leaf)


def _encode(leaves: Sequence[_Leaf]) -> str:
    rows = []
    for leaf in leaves:
        active_rank = _NOT_ACTIVE if leaf.active_rank is None else leaf.active_rank
        rows.append((leaf.slot, active_rank, leaf.reserve_order, *leaf.path))
    # The differences between rows compress better, since neighbours mostly differ in the same way.
    columns = [
        [value - before for before, value in itertools.pairwise((0, *column))]
        for column in zip(*rows, strict=True)
    ]
    return base64.b64encode(zlib.compress(json.dumps(columns).encode())).decode()


def _decode(text: str, depth: int) -> list[_Leaf]:
    columns = json.loads(zlib.decompress(base64.b64decode(text)))
    slots, active_ranks, orders, *path = (list(itertools.accumulate(column)) for column in columns)
    paths = zip(*path, strict=True) if depth > 1 else itertools.repeat(())
    leaves: list[_Leaf] = []
    for slot, active_rank, order, branch in zip(slots, active_ranks, orders, paths, strict=False):
        active = None if active_rank == _NOT_ACTIVE else active_rank
        leaves.append(_Leaf(slot, branch, active, order, rank=len(leaves), came=False))
    return leaves


# ReplicaGroups: rank r has shard ``r % size`` -------------------------------------------------------------


def ranks_in_replicas(size: int, world_size: int) -> int:
    """The number of ranks in complete replicas."""
    return world_size - world_size % size


def fill_holes(size: int, world_size: int, active_world_size: int, lost: Collection[int]) -> dict[int, int]:
    """Closes the gaps so that as few active ranks as possible have to receive a shard.

    Ranks behind the complete replicas fill the holes in them; all other survivors stay. Ranks that hold the
    hole's shard come first: perhaps no other rank still holds it, and as spares they would take no part in a
    recovery. The highest ranks come next, which are spares if there are any.

    Args:
        size: number of ranks in a replica.
        world_size: world size of the iteration that ended.
        active_world_size: number of active ranks of that iteration. Ranks below it hold the shard of their
            rank; the others are spares.
        lost: the lost ranks.

    Returns:
        The survivors' new ranks, by their old ones.
    """
    survivors = [rank for rank in range(world_size) if rank not in lost]
    end = ranks_in_replicas(size, len(survivors))
    places = {rank: rank for rank in survivors if rank < end}
    behind = survivors[len(places) :]
    holders = [rank for rank in behind if rank < active_world_size]
    holes = []
    for place in (place for place in range(end) if place not in places):
        holder = next((rank for rank in reversed(holders) if rank % size == place % size), None)
        if holder is None:
            holes.append(place)
        else:
            holders.remove(holder)
            behind.remove(holder)
            places[holder] = place
    places.update((behind.pop(), place) for place in holes)
    # The rest are spares, and keep their ranks if they can.
    places.update((rank, rank) for rank in behind if rank < len(survivors))
    free = sorted(set(range(len(survivors))) - set(places.values()))
    places.update(zip((rank for rank in behind if rank not in places), free, strict=True))
    return places
