"""A notice: how a job hears that a machine, or its whole allocation, is about to be taken away. Pure."""

import dataclasses

from .records import Record

#: For ranks: how many seconds there are from SIGTERM to SIGKILL, if that is known.
GRACE_ENV = "FT_WRAPPER_NOTICE_GRACE"


@dataclasses.dataclass(frozen=True)
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

    def __str__(self) -> str:
        within = "" if self.seconds is None else f", {self.seconds:.0f} s left"
        return f"{self.who}: {self.why}{within}{'; the job ends' * self.ends}"
