"""What the events of a live state say: which steps were committed, and whether one was done again."""

from __future__ import annotations

from collections.abc import Iterable


def done_again(records: Iterable[dict]) -> tuple[int, int]:
    """Returns how many steps were committed, and how many of them were done again.

    The event with which a rank ends an iteration says how many steps were committed. They are done again
    where a later iteration begins with a lower one.
    """
    begun: dict[int, int] = {}
    reached: dict[int, int] = {}
    for record in records:
        n = record.get("iteration")
        if "began" in record:
            begun[n] = min(begun.get(n, record["step"]), record["step"])
        if "committed" in record:
            reached[n] = max(reached.get(n, 0), record["committed"])
    done = again = 0
    for n in sorted(reached):
        again += max(0, min(done, reached[n]) - begun.get(n, done))
        done = max(done, reached[n])
    return done, again
