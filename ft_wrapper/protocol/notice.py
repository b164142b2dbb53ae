"""A notice: how a job hears that a machine, or its whole allocation, is about to be taken away. Pure."""

import math
from dataclasses import dataclass, replace

from .records import Record

#: For ranks: how many seconds there are from SIGTERM to SIGKILL, if that is known.
GRACE_ENV = "FT_WRAPPER_NOTICE_GRACE"
#: Seconds in which notices of the same kind are one: a scheduler signals every process.
SAME_WITHIN = 5.0


@dataclass(frozen=True)
class Notice(Record):
    """Somebody asks for a checkpoint, since there may not be much time left.

    Args:
        who: where it comes from, such as ``node 3``.
        why: what happened there, such as ``SIGTERM``.
        seconds: how long there is; None if that is not known.
        id: unique name of the notice. A later notice has another one.
        ends: whether the job ends: its ranks leave when the next step begins.
        leaving: names of the nodes that are about to end, while it is not known whether the job ends.
    """

    who: str
    why: str
    seconds: float | None = None
    id: str = ""
    ends: bool = False
    leaving: tuple[str, ...] = ()

    def after(self, seconds: float) -> "Notice":
        """The same notice, when so many seconds have passed."""
        return self if self.seconds is None else replace(self, seconds=max(0.0, self.seconds - seconds))

    def __str__(self) -> str:
        within = "" if self.seconds is None else f", {self.seconds:.0f} s left"
        return f"{self.who}: {self.why}{within}{'; the job ends' * self.ends}"


_AHEAD = 0.5  # seconds that a rank's host may be ahead of other ranks, with work that its device still does
_LEAST = 2  # steps, since a rank may be a step ahead


def step_to_see(step: int, length: float) -> int:
    """The step at which all ranks can see a notice: none of them has begun it yet.

    Args:
        step: the highest that a rank has begun, as far as is known.
        length: of a step, in seconds.
    """
    return step + max(_LEAST, math.ceil(_AHEAD / max(length, 1e-6)))
