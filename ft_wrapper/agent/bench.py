"""The benchmark of nodes: which are measured together, which fail or are slow. Pure."""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from .._text import duration, table

#: What a verdict is, or begins with.
GOOD, SLOW, FAILS, NOT_COMPARED = "good", "slow: ", "fails: ", "not compared: "


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a node has measured.

    Args:
        why: why it has failed; empty if it has not.
        product: seconds that its matrix product took.
        gathers: its partners, each with the seconds of the all-gather with it; infinity: it failed.
    """

    why: str = ""
    product: float = 0.0
    gathers: Sequence[tuple[int, float]] = ()


def rounds(size: int) -> list[list[tuple[int, int]]]:
    """The pairs of nodes that are measured at the same time, round after round.

    The nodes are a ring, and each is measured with its two neighbours: if it is slow with both, it is the
    cause. An odd ring takes a third round, for its last pair.

    Args:
        size: number of nodes.
    """
    ring = [(node, node + 1) for node in range(size - 1)] + ([(0, size - 1)] if size > 2 else [])
    even = size - size % 2
    return [pairs for pairs in (ring[0:even:2], ring[1:even:2], ring[even:]) if pairs]


def verdict_on(found: Sequence[Figures], node: int, factor: float) -> str:
    """The verdict on a node: compares its product with the other nodes', its pairs with those without it.

    It is to blame for its pairs only if both are slow, or fail, and neither of its partners has failed.

    Args:
        found: the figures of all nodes.
        node: which one.
        factor: how many times the median of the other nodes is slow.
    """
    own, well = found[node], [other for other, each in enumerate(found) if not each.why]
    if own.why:
        return f"{FAILS}{own.why}"
    products = [found[other].product for other in well if other != node]
    ends = [(other, *end) for other in well for end in found[other].gathers]
    pairs = [seconds for *pair, seconds in ends if node not in pair and seconds < math.inf]
    mine = [seconds for partner, seconds in own.gathers if partner in well]
    best = min(mine) if len(mine) > 1 else 0.0
    if best == math.inf:
        return f"{FAILS}both of its all-gathers failed" if pairs else f"{NOT_COMPARED}no all-gather works"
    if len(well) < 3:
        return f"{NOT_COMPARED}fewer than 3 nodes"
    slow = [
        f"{what} {duration(seconds)}, {seconds / statistics.median(theirs):.1f} times the median"
        for what, seconds, theirs in (("product", own.product, products), ("all-gathers", best, pairs))
        if theirs and seconds > factor * statistics.median(theirs)
    ]
    return SLOW + "; ".join(slow) if slow else GOOD


def node_table(found: Sequence[Figures], verdicts: Sequence[str], names: Sequence[tuple[str, str]]) -> str:
    """The table of all nodes.

    Args:
        found: the figures of all nodes.
        verdicts: on all nodes.
        names: of all nodes: id and host.
    """
    rows: list[Sequence[object]] = [("node", "host", "product", "all-gather", "all-gather", "verdict")]
    for name, own, verdict in zip(names, found, verdicts, strict=True):
        ends = [(duration(s) if s < math.inf else "failed", names[other][0]) for other, s in own.gathers]
        product = duration(own.product) if own.product else ""
        rows.append((*name, product, *([*map(" with ".join, ends), "", ""][:2]), verdict))
    return "\n".join(table(rows))
