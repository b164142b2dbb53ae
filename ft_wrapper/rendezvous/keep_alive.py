"""Who is silent: each node says that it lives, and observes a few others on its own clock."""

from __future__ import annotations

from ..store import CounterObserver, StoreOperations
from . import keys
from .state import RANK, SEAT, Node, State

WATCHED = 2


def neighbours(state: State, node: Node) -> list[Node]:
    """The nodes that this one watches; none if it is not in the record itself.

    Under `GROUP` the next two in a ring of all. Under `RANK`, where whoever has a seat takes the others out
    (`state.may_unseat`), the next two with seats and the spares between them; a spare watches all that have
    seats, since it is needed only when they are all lost.
    """
    ring = state.nodes
    names = [other.name for other in ring]
    if node.name not in names:
        return []
    here = names.index(node.name)
    others = [*ring[here + 1 :], *ring[:here]]
    if state.policy != RANK:
        return others[:WATCHED]
    if state.place_of(node) != SEAT:
        return list(state.participants)
    seated = {other.name for other in state.participants}
    watched: list[Node] = []
    for other in others:
        watched.append(other)
        if sum(one.name in seated for one in watched) == WATCHED:
            break
    return watched


class NeighbourWatch:
    """Observes whether a node's neighbours live, by the rules of `CounterObserver`.

    Args:
        store: a client of one's own.
        node: the node.
        timeout: seconds without a sign of life after which a node is silent.
    """

    def __init__(self, store: StoreOperations, node: Node, timeout: float) -> None:
        self._node = node
        self._observer: CounterObserver[Node] = CounterObserver(
            lambda node: store.beats(keys.alive(node.name)), store.now, timeout
        )

    def silent(self, state: State) -> list[Node]:
        """Looks at the neighbours in the record, and returns those that are silent.

        Raises:
            Exception: whatever the store raised; what was seen before is forgotten then.
        """
        watched = neighbours(state, self._node)
        silent = self._observer.silent(watched)
        self._observer.forget_all_but(watched)
        return [node for node in watched if node in silent]
