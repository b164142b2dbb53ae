"""The jobs that are explored, and what a state is in them."""

from __future__ import annotations

import dataclasses
from typing import Any

Gradient = tuple[Any, ...]
"""Its parts. A whole one of a step is `whole`; with another's parts in it, it has other bits."""


def whole(iteration: int, step: int) -> Gradient:
    """The gradient of a step as a run without faults has it, marked with the iteration that computed it."""
    return ((iteration, step, "first"), (iteration, step, "second"))


@dataclasses.dataclass(frozen=True)
class Value:
    """The bits of a state: equal values are equal bits.

    Args:
        base: what it was before the first step.
        gradients: those that made it, as (iteration, step).
        buffers: the step after which they are like this; anything else is what a forward pass has left.
    """

    base: Any
    gradients: tuple[tuple[int, int], ...]
    buffers: Any


class State:
    """What a process has in memory: model, optimizer and gradients.

    Attributes:
        shard: which shard it is.
        base, gradients, buffers: its value; ``gradients`` is None while it is half written.
        gradient: what backward passes have added up.
    """

    __slots__ = ("base", "buffers", "gradient", "gradients", "shard")

    def __init__(self, shard: str, base: Any) -> None:
        self.shard = shard
        self.base = base
        self.gradients: tuple[tuple[int, int], ...] | None = ()
        self.buffers: Any = 0
        self.gradient: Gradient = ()

    def value(self) -> Value:
        """Its bits; only of a state that is whole."""
        assert self.gradients is not None
        return Value(self.base, self.gradients, self.buffers)

    def key(self) -> tuple[Any, ...]:
        """Everything about it, for messages."""
        return self.shard, self.base, self.gradients, self.buffers, self.gradient


@dataclasses.dataclass(frozen=True)
class Job:
    """A job.

    Args:
        shards: the shard of each active place.
        spares: processes beside those.
        steps: how many there are to do.
        faults: how many happen at most: exceptions, kills, failing updates.
        demotions: how many times at most an active process is made a spare.
        permutes: whether a restart may give the survivors other places.
        save_every: a checkpoint after so many steps; 0: never.
        copy_every: buddies' copies after so many steps; 0: never.
        calls: how many wrapped calls follow each other in the same processes.
        late_writes: whether the register may be written late, by a rank that was left out.
        compares: whether the write is a ``compare_set`` on what rank 0 has read: then it does no harm.
    """

    shards: tuple[str, ...]
    spares: int = 0
    steps: int = 3
    faults: int = 3
    demotions: int = 2
    permutes: bool = True
    save_every: int = 0
    copy_every: int = 0
    calls: int = 1
    late_writes: bool = False
    compares: bool = False


JOBS = {
    "ddp": Job(("A", "A", "A")),
    "ddp-spare": Job(("A", "A"), spares=2, steps=2, faults=6, demotions=4),
    "hsdp": Job(("A", "B", "A", "B"), spares=1, steps=2, faults=4, demotions=3),
    "fsdp": Job(("A", "B"), spares=1, faults=5, save_every=2),
    "buddies": Job(("A", "B"), spares=1, steps=5, faults=5, copy_every=2),
    "calls": Job(("A", "A"), spares=1, steps=1, calls=2),
}
"""By name."""
