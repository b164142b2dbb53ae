"""What the record of our rendezvous means for a node and its ranks. Pure."""

from ..rendezvous.operations import nodes_waiting
from ..rendezvous.record import Node, Record, RoundPolicy, Seat
from .nodes import Round
from .signals import News, What


def round_of(state: Record, node: Node, address: str, agreed_in: str = "") -> Round:
    """A node's place in a round.

    Args:
        state: the record in which it has its seat.
        node: the node.
        address: of the store of the ranks.
        agreed_in: address of the store in which wrapped ranks agree, if that is another one.
    """
    seat = state.seat_of(node)
    assert seat is not None and seat.group_rank is not None
    same = [other for other in state.seats if other.role == node.role]
    before = [other for other in same if other.base_slot < seat.base_slot]
    return Round(
        address,
        world_size=state.next_slot,
        base_rank=seat.base_slot,
        group_rank=seat.group_rank,
        group_world_size=len(state.seats),
        role_rank=sum(other.nproc for other in before),
        role_world_size=sum(other.nproc for other in same),
        formation_size=state.formation_size,
        restarts=state.restarts,
        formed=state.policy is RoundPolicy.RANK,
        node=node.id,
        agreed_in=agreed_in,
    )


def is_empty(state: Record, seat: Seat) -> bool:
    """Whether a seat is empty, in a newer record than the one in which it was found."""
    return any(other.base_slot == seat.base_slot and other.occupant is None for other in state.seats)


def what_follows(state: Record, node: Node, round_number: int) -> News | None:
    """What a record means for a node whose ranks run; None: nothing.

    Args:
        state: the record.
        node: the node.
        round_number: the round that its ranks were started in.
    """
    if state.closed:
        return News(What.OVER, f"the job was ended: {state.reason}") if state.reason else News(What.CLOSED)
    if nodes_waiting(state, node, round_number) > 0:
        if state.place_of(node) is None:
            return News(What.COME, f"this node ({node}) was taken out of the rendezvous")
        return News(What.COME, "the nodes meet again")
    empty = [seat.last for seat in state.seats if seat.occupant is None]
    if state.policy is RoundPolicy.GROUP and empty:
        return News(What.GONE, f"node {', '.join(empty)} is lost")
    return None


def asked_of(state: Record, node: Node) -> list[News]:
    """What a record asks of a node.

    Args:
        state: the record.
        node: the node.
    """
    mine = (asked for asked in state.drains if asked.node == node.name)
    return [News(What.DRAIN, asked.why, asked.slots, asked.within) for asked in mine]
