"""Quarantine: the nodes that have not passed their check. Each writes itself; ``ftrun status`` reads them."""

import dataclasses
import json
import time
from collections.abc import Callable

from .._text import IN_STORE, cut
from ..exception import StoreError
from ..protocol.operations import Move, Operations, read
from .keys import QUARANTINE_KEY
from .record import Node


@dataclasses.dataclass(frozen=True)
class QuarantinedNode:
    """A node in quarantine.

    Args:
        node: the node, which is not in the record.
        reason: why, for people.
        since: when its check first failed, in seconds since the epoch, by its own clock.
    """

    node: Node
    reason: str
    since: float


class Quarantine:
    """The quarantine of a job: one register, which every node changes by compare-and-set.

    Args:
        store: of the rendezvous.
    """

    def __init__(self, store: Operations) -> None:
        self._store = store

    def nodes(self) -> list[QuarantinedNode]:
        """All nodes in quarantine, in the order of their ids.

        Raises:
            StoreError: they cannot be read.
        """
        found = _parse(read(self._store, QUARANTINE_KEY) or "")
        return sorted(found.values(), key=lambda one: one.node.id)

    def add(self, node: Node, reason: str) -> None:
        """Adds a node, in place of any earlier agent of its id; or changes its reason."""

        def with_node(nodes: dict[str, QuarantinedNode]) -> None:
            before = nodes.get(node.id)
            since = before.since if before and before.node.is_same(node) else time.time()
            nodes[node.id] = QuarantinedNode(node, cut(reason, IN_STORE), since)

        self._change(with_node)

    def remove(self, node: Node) -> None:
        """Removes a node, or an earlier agent of its id; a later one stays."""

        def without_node(nodes: dict[str, QuarantinedNode]) -> None:
            before = nodes.get(node.id)
            if before is not None and before.node.incarnation <= node.incarnation:
                del nodes[node.id]

        self._change(without_node)

    def _change(self, change: Callable[[dict[str, QuarantinedNode]], None]) -> None:
        before = read(self._store, QUARANTINE_KEY) or ""
        while True:
            nodes = _parse(before)
            change(nodes)
            if nodes == _parse(before):
                return
            after = json.dumps([[*vars(one.node).values(), one.reason, one.since] for one in nodes.values()])
            held = self._store.execute([Move(QUARANTINE_KEY, before, after)])[0] or ""
            if held in (after, before):  # the latter: the store has lost it, which shows elsewhere
                return
            before = held


def _parse(text: str) -> dict[str, QuarantinedNode]:
    """The nodes in quarantine, by their ids: of each the newest agent."""
    try:
        rows = json.loads(text or "[]")
        found = [QuarantinedNode(Node(*node), reason, since) for *node, reason, since in rows]
    except (ValueError, TypeError) as error:
        raise StoreError(f"store key {QUARANTINE_KEY!r}: {error}") from error
    return {one.node.id: one for one in found}
