"""Who is silent: each node keeps a counter moving, and observes those of two others on its own clock."""

from __future__ import annotations

from ..store import StoreOperations
from . import keys
from .state import Node, State

WATCHED = 2


def neighbours(state: State, node: Node) -> list[Node]:
    """The next nodes in the record after this one, in a ring; none if it is not in the record itself."""
    ring = state.nodes
    names = [other.name for other in ring]
    if node.name not in names:
        return []
    here = names.index(node.name)
    return [*ring[here + 1 :], *ring[:here]][:WATCHED]


class NeighbourWatch:
    """Observes the counters of a node's neighbours.

    Silence counts only between two looks that the store answered: an outage of the store silences nobody.

    Args:
        store: a client of one's own.
        node: the node.
        timeout: seconds without a sign of life after which a node is silent.
    """

    def __init__(self, store: StoreOperations, node: Node, timeout: float) -> None:
        self._store = store
        self._node = node
        self._timeout = timeout
        self._seen: dict[str, tuple[int, float]] = {}

    def silent(self, state: State) -> list[Node]:
        """Looks at the neighbours in the record, and returns those that are silent.

        Raises:
            Exception: whatever the store raised; what was seen before is forgotten then.
        """
        before, self._seen = self._seen, {}
        counts = [(node, self._store.add(keys.alive(node.name), 0)) for node in neighbours(state, self._node)]
        now = self._store.now()
        silent = []
        for node, count in counts:
            last = before.get(node.name)
            self._seen[node.name] = (count, now) if last is None or last[0] != count else last
            if now - self._seen[node.name][1] >= self._timeout:
                silent.append(node)
        return silent
