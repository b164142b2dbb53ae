"""How the ranks of each node have ended: keys in the store that the agents of a round share."""

from collections.abc import Iterable

from torch._C._distributed_c10d import Store

from .record import Node, Seat


def done_key(node: Node) -> str:
    """The key that marks a node as done."""
    return f"done/{node.name}"


def publish_end(agents: Store, node: Node, how: str) -> None:
    """Publishes how a node's ranks have ended; empty if that is not known."""
    agents.set(f"end/{node.id}", how)
    agents.set(done_key(node), "")


def published_ends(agents: Store, seats: Iterable[Seat]) -> dict[Seat, str]:
    """How the ranks of each seat's last node have ended; empty if that is not published or not known."""
    keys = {seat: f"end/{seat.last}" for seat in seats}
    return {seat: agents.get(key).decode() if agents.check([key]) else "" for seat, key in keys.items()}
