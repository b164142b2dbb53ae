"""The nodes of a job as people want to see them, read from the record. Writes nothing."""

from __future__ import annotations

import dataclasses

from ..exception import StoreError
from ..store import StoreOperations, is_etcd
from ..store.etcd_address import EtcdAddress
from . import keys
from .etcd_backend import RENDEZVOUS, workers
from .state import SEAT, SPARE, WAITING, State

LOST = "lost"


@dataclasses.dataclass(frozen=True)
class NodeStatus:
    """A node.

    Args:
        id: which one.
        place: ``seat``, ``waiting`` for the next round, ``spare``; ``lost`` for one whose seat is empty.
        group_rank: its number; None if it has no seat, or its round is not complete.
        slots: those of its ranks, the first and the last one; None without a seat in a complete round.
        incarnation: how many agents had this id before; None for a lost one.
        address: how the others reach it; empty if that is not known.
    """

    id: str
    place: str
    group_rank: int | None
    slots: tuple[int, int] | None
    incarnation: int | None
    address: str


@dataclasses.dataclass(frozen=True)
class Overview:
    """All nodes.

    Args:
        round: the round that forms, or is complete.
        complete: whether it is.
        closed: whether all is over.
        nodes: by group rank; then those that wait, then the spares.
        workers: ``host:port`` of the store of the round's workers; empty if that is not known.
    """

    round: int
    complete: bool
    closed: bool
    nodes: tuple[NodeStatus, ...]
    workers: str


def read_overview(store: StoreOperations) -> Overview | None:
    """Reads the record; None if there is none in this store.

    Args:
        store: of the rendezvous, perhaps.

    Raises:
        StoreError: it cannot be read.
    """
    text = store.try_get(keys.STATE)
    if text is None:
        return None
    try:
        state = State.from_text(text)
    except ValueError as error:
        raise StoreError(f"store key {keys.STATE!r}: {error}") from error
    workers = store.try_get(keys.endpoint(state.round)) or ""
    return Overview(state.round, state.complete, state.closed, _nodes(state), workers)


def rendezvous_address(endpoint: str) -> str:
    """Where the record is, by what a user calls the job: on etcd the job's prefix is enough."""
    if not is_etcd(endpoint) or EtcdAddress.parse(endpoint).namespace:
        return endpoint
    return str(EtcdAddress.parse(endpoint).within(RENDEZVOUS))


def workers_address(endpoint: str, overview: Overview) -> str:
    """Address of the store in which wrapped ranks agree; empty if there is none yet.

    Args:
        endpoint: what a user calls the job.
        overview: what was read there.
    """
    if not is_etcd(endpoint):
        return overview.workers
    return str(EtcdAddress.parse(endpoint).within(workers(overview.round))) if overview.complete else ""


def _nodes(state: State) -> tuple[NodeStatus, ...]:
    found = []
    for seat in state.seats:
        rank = seat.group_rank if state.complete else None
        slots = (seat.base_slot, seat.base_slot + seat.nproc - 1) if state.complete else None
        node = seat.occupant
        if node is None:
            found.append(NodeStatus(seat.last, LOST, rank, slots, None, ""))
        else:
            found.append(NodeStatus(node.id, SEAT, rank, slots, node.incarnation, node.address))
    waiting = ((one.node, WAITING) for one in state.waiting)
    for node, place in [*waiting, *((node, SPARE) for node in state.spares)]:
        found.append(NodeStatus(node.id, place, None, None, node.incarnation, node.address))
    return tuple(found)
