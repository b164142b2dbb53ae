"""A step that fails on each try: counted from one restart's report to the next."""

import dataclasses
from collections.abc import Sequence

from ..attribution import Interruption, by_blame
from ..protocol.records import Fault, Record

_RAISED = (Interruption.EXCEPTION, Interruption.OUT_OF_MEMORY)
_REMEMBERED = 4  # ranks


@dataclasses.dataclass(frozen=True)
class FailedStep(Record):
    """A step in which the function has raised, in one iteration or in several in a row.

    Args:
        step: its number, as the function told it.
        times: how many iterations in a row.
        ranks: that raised in it, each in the iteration that it ended: the last four, the oldest one first.
    """

    step: int
    times: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        """Says how often it has failed, and where."""
        same = len(set(self.ranks)) == 1
        where = f"rank {self.ranks[0]}" if same else f"ranks {', '.join(map(str, self.ranks))}"
        lastly = "lastly " if self.times > len(self.ranks) else ""
        often = f"{self.times} times in a row" if self.times > 1 else "once"
        return f"step {self.step} has failed {often}, {lastly}on {where}"


def in_which(faults: Sequence[Fault]) -> FailedStep | None:
    """The step that an iteration failed in; None if something else than an exception ended it.

    Args:
        faults: what was published in it, in that order.
    """
    worst = next(iter(by_blame(fault.record for fault in faults)), None)
    if worst is None or worst.interruption not in _RAISED:
        return None
    # The first one: the others' collectives fail in its wake, and in the same step.
    cause = next(fault for fault in faults if fault.interruption is worst.interruption)
    if cause.step is None or cause.rank is None:
        return None
    return FailedStep(cause.step, 1, (cause.rank,))


def counted_on(before: FailedStep | None, now: FailedStep) -> FailedStep:
    """Counts a step on if the iteration before has failed in it, too.

    Args:
        before: in which that one has failed.
        now: in which this one has.
    """
    if before is None or before.step != now.step:
        return now
    return FailedStep(now.step, before.times + 1, (*before.ranks, *now.ranks)[-_REMEMBERED:])
