"""What the events of a live state say: which steps were committed, and whether one was done again."""

from __future__ import annotations

from collections.abc import Iterable


def done_again(records: Iterable[dict]) -> tuple[int, int]:
    """Returns how many steps were committed, and how often one of them was done again.

    A step that is rolled forward is applied by ranks that had its gradients already: it is not done again.
    """
    done: dict[int, set[int]] = {}
    for record in records:
        if record["event"] == "committed":
            iterations = done.setdefault(record["step"], set())
            if not record["rolled"]:
                iterations.add(record["iteration"])
    return len(done), sum(max(0, len(iterations) - 1) for iterations in done.values())
