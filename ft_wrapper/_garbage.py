"""Freeing what an iteration left in reference cycles, before the next one makes its own.

FSDP2 models, compiled ones and those of several frameworks refer to themselves. Until the collector happens
to come they keep their memory, their process groups and those groups' sockets; on a GPU the next model does
not fit beside them.
"""

from __future__ import annotations

import gc

_frozen: set[str] = set()


def collect_garbage(when: str) -> None:
    """Collects; the first time at a point, also takes all that is left out of later collections.

    What was imported, hundreds of thousands of objects, makes a collection take tenths of a second; without
    it one takes less than a millisecond. Frozen once only at each point: what something holds by chance at
    that moment is not freed by the collector any more.

    Args:
        when: before the first ``"call"``, so that what the script has imported costs no restart time; or at a
            ``"restart"``, after which what the function has imported costs none any more; or after a spare's
            ``"warm-up"``, for the same reason.
    """
    if (when == "call" and _frozen) or (when == "warm-up" and when in _frozen):
        return
    gc.collect()
    if when not in _frozen:
        gc.freeze()
        _frozen.add(when)
