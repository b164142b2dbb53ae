"""Who is silent: each node says that it lives, and observes a few others on its own clock."""

from __future__ import annotations

import math

from ..store import CounterObserver, StoreOperations
from . import keys
from .state import RANK, SEAT, Node, State

WATCHED = 2
RECONNECTS = 20.0
"""Seconds that a client may need, once the store is back, to notice that. `TCPStore` tries for up to 16 s."""
LONGEST_HELD = 120.0
"""Seconds after which lost nodes are taken out though the store has been slow, or gone, again and again."""


def ring(state: State, node: Node) -> list[Node]:
    """The nodes that this one may have to take out, the next one first; none if it is not in the record.

    A spare under `RANK` is needed only when all that have seats are lost (`state.may_unseat`); of the other
    spares some may be lost with them, and must not be given the seats.
    """
    everybody = state.nodes
    names = [other.name for other in everybody]
    if node.name not in names:
        return []
    here = names.index(node.name)
    if state.policy == RANK and state.place_of(node) != SEAT:
        return [*everybody[:here], *everybody[here + 1 :]]
    return [*everybody[here + 1 :], *everybody[:here]]


def neighbours(state: State, node: Node) -> list[Node]:
    """The nodes that this one watches while nothing is wrong.

    Under `GROUP` the next two in a ring of all. Under `RANK`, where only who has a seat takes others out, the
    next two with seats and the spares between them; a spare watches the first two that have seats.
    """
    return _nearest(state, ring(state, node))


def _nearest(state: State, others: list[Node]) -> list[Node]:
    """The first of them, up to the second that watches others itself."""
    watching = _watching(state)
    watched: list[Node] = []
    for other in others:
        watched.append(other)
        if sum(one.name in watching for one in watched) == WATCHED:
            break
    return watched


def _watching(state: State) -> set[str]:
    """Names of the nodes that may take others out."""
    return {node.name for node in (state.participants if state.policy == RANK else state.nodes)}


class NeighbourWatch:
    """Observes whether a node's neighbours live, by the rules of `CounterObserver`.

    Nodes that were lost together, a rack, have no one left that watches them but the one in front. When its
    next one has stood still for more than half of the timeout, it observes those behind as well, all at once,
    and from then on those that do not move, wherever they come to be. While nothing is wrong it costs each
    node the same.

    After an outage of the store not all are back at the same time: one's client may have begun a long attempt
    to connect just before. So a node that could not look for a while, or has just begun, judges no one until
    the others have had time for that, too.

    Args:
        store: a client of one's own.
        node: the node.
        timeout: seconds without a sign of life after which a node is silent.
        interval: seconds between two looks, and between two signs of life.
    """

    def __init__(self, store: StoreOperations, node: Node, timeout: float, interval: float) -> None:
        self._store = store
        self._node = node
        self._timeout = timeout
        self._interval = interval
        self._observer: CounterObserver[Node] = CounterObserver(
            lambda node: store.beats(keys.alive(node.name)), store.now, timeout
        )
        self._known: set[Node] = set()
        self._doubted: set[Node] = set()
        self._looked: float | None = None
        self._held_since = 0.0
        self._judges_from = 0.0

    def silent(self, state: State) -> list[Node]:
        """Looks at the neighbours in the record, and returns those that are silent.

        Raises:
            Exception: whatever the store raised; what was seen before is forgotten then.
        """
        try:
            stillness = self._look(state)
        except Exception:
            self._known, self._doubted = set(), set()
            raise
        self._observer.forget_all_but(stillness)
        now = self._store.now()
        self._note_absence(now)
        if now < self._judges_from and now - self._held_since < LONGEST_HELD:
            return []
        return [node for node, seconds in stillness.items() if seconds >= self._timeout]

    def _look(self, state: State) -> dict[Node, float]:
        """For how long each node has stood still that has to be looked at."""
        others = ring(state, self._node)
        near = _nearest(state, others)
        watching = _watching(state)
        still: dict[Node, float] = {}

        def lives(node: Node) -> bool:
            still[node] = self._observer.stillness(node)
            return still[node] == 0.0 and node in self._known

        living = set(filter(lives, near))
        first = next((node for node in near if node.name in watching), None)
        # Two looks in a row, since of the time between two no more than half of the timeout counts. One says
        # nothing: two nodes' intervals drift past each other.
        if first is not None and still[first] > self._timeout / 2:
            for node in others[len(near) :]:
                if lives(node):
                    living.add(node)
                    if node.name in watching:
                        break  # it watches those behind it
        # Their places may have changed meanwhile. What was seen of them stays.
        living |= set(filter(lives, [node for node in others if node in self._doubted and node not in still]))
        self._known = set(still)
        self._doubted = self._known - living
        return still

    def _note_absence(self, now: float) -> None:
        """Notes how long it could not look."""
        before, self._looked = self._looked, now
        # A node that has just begun does not know whether the others have just been cut off.
        away = math.inf if before is None else now - before - self._interval
        if away > self._interval / 2:
            if now >= self._judges_from:
                self._held_since = now
            # An attempt lasts as long as all before it. The client may have looked, and beats with the next.
            until = now + min(2 * away + self._interval, RECONNECTS) + self._interval
            self._judges_from = max(self._judges_from, until)
