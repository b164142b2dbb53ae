"""Drains: which ranks they affect, and whether enough would be left."""

from collections.abc import Collection

from .._text import plural
from ..protocol import Agreement
from ..protocol.operations import Operations
from .moves import add_drain
from .record import Drain, Node, RendezvousRecord, RoundPolicy, Seat


class Refused(ValueError):
    """A request to a running job is refused: too few would be left, or the job is over; says why."""


def find(record: RendezvousRecord, target: str, within: float, why: str = "") -> Drain:
    """The drain of a node or slot.

    Args:
        record: the record of the nodes.
        target: a node's id, or else a slot's number; ``node:ID`` and ``slot:N`` are unambiguous.
        within: seconds after which ranks that have not left are ended.
        why: the reason, for people.

    Raises:
        ValueError: there is no such node or slot, or no rank on it; lists nodes and slots.
    """
    kind, _, rest = target.partition(":")
    name = rest if kind in ("node", "slot") else target
    node = None if kind == "slot" else record.find(name)
    if node is not None and record.seat_of(node) is None:
        raise ValueError(f"node {node} has no ranks: it waits for a seat; SIGTERM to its ftrun ends it")
    if node is not None:
        return Drain(node.name, (), within, why)
    if kind != "node" and name.isdecimal():
        slot = int(name)
        seat = next((seat for seat in record.seats if slot in slots_of(seat)), None)
        if seat is not None and seat.occupant is not None and record.complete:
            return Drain(seat.occupant.name, (slot,), within, why)
    raise ValueError(f"there is no node or slot {target!r}; {_there_are(record)}")


def request(
    record: RendezvousRecord, asked: Drain, slots: Collection[int], min_world_size: int
) -> RendezvousRecord:
    """The record with another drain.

    Args:
        record: the record of the nodes.
        asked: the drain.
        slots: slots of all living ranks; empty if no wrapped job has formed.
        min_world_size: fewest ranks with which the job goes on.

    Raises:
        Refused: too few would be left, or the job is over.
    """
    if record.closed:
        raise Refused("the job is over")
    drains = (*record.drains, asked)
    if record.notice is not None:
        drains += tuple(Drain(name, (), 0.0) for name in record.notice.leaving)
    if record.policy is RoundPolicy.GROUP or not slots:
        if asked.slots:
            raise Refused("no wrapped job has formed yet: only whole nodes can be drained")
        what, least, name = "node", record.min_nodes, "--nnodes"
        left = sum(node.name not in {drain.node for drain in drains} for node in record.participants)
    else:
        what, least, name = "rank", max(1, min_world_size), "min_world_size"
        left = len(set(slots) - {slot for drain in drains for slot in drained_slots(record, drain)})
        leaving = [drain.node for drain in drains if not drain.slots]
        left += sum(node.nproc for node in _replacements(record, leaving))
    if left < least:
        raise Refused(f"{left} {plural(left, what)} would be left, fewer than {name}={least}")
    return add_drain(record, asked)


def living_slots(store: Operations) -> tuple[set[int], int]:
    """The slots of all living ranks, and the job's ``min_world_size``; none and 0 before it has formed.

    Args:
        store: a client of the ranks' store.

    Raises:
        StoreError: the store cannot be read.
    """
    agreement = Agreement(store)
    view = agreement.iterations.read_current()
    if view is None:
        return set(), 0
    dead = agreement.ends.deaths_of(view.n)
    return {member.slot for member in view.members if member not in dead}, view.decision.min_world_size


def drained_slots(record: RendezvousRecord, asked: Drain) -> Collection[int]:
    """The slots of a drain; none if its node is gone."""
    seat = next((one for one in record.seats if one.occupant and one.occupant.name == asked.node), None)
    return () if seat is None else asked.slots or slots_of(seat)


def slots_of(seat: Seat) -> range:
    """The slots of a seat."""
    return range(seat.base_slot, seat.base_slot + seat.nproc)


def _replacements(record: RendezvousRecord, leaving: Collection[str]) -> list[Node]:
    """The spare nodes that will take the seats of leaving nodes."""
    found: list[Node] = []
    for seat in record.seats:
        if seat.occupant is None or seat.occupant.name not in leaving:
            continue
        like = (seat.nproc, seat.role)
        fits = [node for node in record.spares if (node.nproc, node.role) == like and node not in found]
        found += fits[:1]
    return found


def _there_are(record: RendezvousRecord) -> str:
    nodes = ", ".join(node.id for node in record.nodes[:8]) + (", …" if len(record.nodes) > 8 else "")
    slots = f"; slots: 0 to {record.next_slot - 1}" if record.complete and record.next_slot else ""
    return f"nodes: {nodes}{slots}"
