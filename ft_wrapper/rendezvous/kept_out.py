"""Nodes that have not passed their check: a register that each of them writes, and ``ftrun status`` reads."""

import dataclasses
import json
import time
from collections.abc import Callable

from .._text import IN_STORE, cut
from ..exception import StoreError
from ..protocol.operations import Move, Operations, read
from .record import Node
from .register import KEPT_OUT_KEY


@dataclasses.dataclass(frozen=True)
class KeptOut:
    """A node that is kept out.

    Args:
        node: the node, which is not in the record.
        reason: why, for people.
        since: when it first failed, in seconds since the epoch, by its own clock.
    """

    node: Node
    reason: str
    since: float


def read_all(store: Operations) -> list[KeptOut]:
    """All nodes that are kept out, in the order of their ids.

    Raises:
        StoreError: they cannot be read.
    """
    return sorted(_parse(read(store, KEPT_OUT_KEY) or "").values(), key=lambda one: one.node.id)


def note(store: Operations, node: Node, reason: str) -> None:
    """Notes why a node is kept out.

    Args:
        store: of the rendezvous.
        node: the node. Earlier agents of its id are forgotten.
        reason: why.
    """

    def change(nodes: dict[str, KeptOut]) -> None:
        before = nodes.get(node.id)
        is_same = before is not None and before.node.is_same(node)
        nodes[node.id] = KeptOut(
            node, cut(reason, IN_STORE), before.since if before and is_same else time.time()
        )

    _change(store, change)


def forget(store: Operations, node: Node) -> None:
    """A node is not kept out any more: what it, or an earlier agent of its id, has noted is taken back.

    Args:
        store: of the rendezvous.
        node: the node.
    """

    def change(nodes: dict[str, KeptOut]) -> None:
        noted = nodes.get(node.id)
        if noted is not None and noted.node.incarnation <= node.incarnation:
            del nodes[node.id]

    _change(store, change)


def _change(store: Operations, change: Callable[[dict[str, KeptOut]], None]) -> None:
    before = read(store, KEPT_OUT_KEY) or ""
    while True:
        nodes = _parse(before)
        change(nodes)
        after = json.dumps([[*vars(one.node).values(), one.reason, one.since] for one in nodes.values()])
        if nodes == _parse(before):
            return
        held = store.execute([Move(KEPT_OUT_KEY, before, after)])[0] or ""
        if held in (after, before):  # the latter: the store has lost it, which shows elsewhere
            return
        before = held


def _parse(text: str) -> dict[str, KeptOut]:
    """The nodes that are kept out, by their ids: of each the newest agent."""
    try:
        found = [KeptOut(Node(*node), reason, since) for *node, reason, since in json.loads(text or "[]")]
    except (ValueError, TypeError) as error:
        raise StoreError(f"store key {KEPT_OUT_KEY!r}: {error}") from error
    return {one.node.id: one for one in found}
