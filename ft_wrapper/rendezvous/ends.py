"""What the nodes of a round tell each other of its end, in the store that their agents share."""

from collections.abc import Iterable

from torch._C._distributed_c10d import Store

from .record import Node, Seat


def done(node: Node) -> str:
    """The key that marks a node as done."""
    return f"done/{node.name}"


def say(agents: Store, node: Node, how: str) -> None:
    """Says how a node's ranks have ended, in a text that is not empty if it knows."""
    agents.set(f"said/{node.id}", how)
    agents.set(done(node), "")


def said(agents: Store, seats: Iterable[Seat]) -> dict[Seat, str]:
    """What the last node of each seat has said; empty if it has said nothing, or does not know."""
    keys = {seat: f"said/{seat.last}" for seat in seats}
    return {seat: agents.get(key).decode() if agents.check([key]) else "" for seat, key in keys.items()}
