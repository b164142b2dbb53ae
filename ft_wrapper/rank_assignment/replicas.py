"""How `ReplicaGroups` assigns ranks: a pure function of the lost ranks. Rank r has shard ``r % size``."""

from collections.abc import Collection


def ranks_in_replicas(size: int, world_size: int) -> int:
    """The number of ranks in complete replicas."""
    return world_size - world_size % size


def fill_holes(size: int, world_size: int, active_world_size: int, lost: Collection[int]) -> dict[int, int]:
    """Closes the gaps so that as few active ranks as possible have to receive a shard.

    Ranks behind the complete replicas fill the holes in them; all other survivors stay. Ranks that hold the
    hole's shard come first: perhaps nobody else still holds it, and as spares they would take no part in a
    recovery. The highest ranks come next, which are spares if there are any.

    Args:
        size: number of ranks in a replica.
        world_size: world size of the iteration that ended.
        active_world_size: number of active ranks of that iteration. Ranks below it hold the shard of their
            rank; the others are spares.
        lost: the ranks that are gone.

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
