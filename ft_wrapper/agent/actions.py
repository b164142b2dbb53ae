"""What `Ranks` answers to what happens: data, carried out by `ft_wrapper.agent.loop`."""

import dataclasses
from typing import TypeAlias

from .outputs import Failure


@dataclasses.dataclass(frozen=True)
class Start:
    """Starts a process, or asks the template for it: `Ranks.forked` or `not_started` follows.

    Args:
        rank: its local rank.
        incarnation: which process in a row of it.
        restarts: how often all ranks have been restarted.
        is_replaced: whether another one is started if it dies.
    """

    rank: int
    incarnation: int
    restarts: int
    is_replaced: bool


@dataclasses.dataclass(frozen=True)
class CancelStarts:
    """Takes back what the template was asked for; says why if the template is slow, unless it is empty."""

    why: str = ""


@dataclasses.dataclass(frozen=True)
class ForkAhead:
    """Has a process forked ahead, for the next replacement."""


@dataclasses.dataclass(frozen=True)
class EndTemplate:
    """Ends the template: nothing is started any more."""


@dataclasses.dataclass(frozen=True)
class Send:
    """Sends a signal to a local rank; to all that run when None."""

    signum: int
    rank: int | None = None


@dataclasses.dataclass(frozen=True)
class Kill:
    """Kills all that run, and waits: `Ranks.ended` follows for each, also if stuck in the kernel."""


@dataclasses.dataclass(frozen=True)
class AskPlace:
    """Asks whether this node has its place among the others: `Ranks.place` follows."""


@dataclasses.dataclass(frozen=True)
class LeaveJob:
    """Tells the other nodes that this one leaves."""

    why: str


@dataclasses.dataclass(frozen=True)
class Tell:
    """Tells people of a failure, and what follows. The last action: a log line is not worth waiting for."""

    failure: Failure
    why: str


@dataclasses.dataclass(frozen=True)
class AskToLeave:
    """Asks a local rank to leave the job at its next step; `Ranks.does_not_leave` follows if it will not."""

    rank: int


@dataclasses.dataclass(frozen=True)
class AskDrain:
    """Asks the other nodes that this one may leave, in order: `Ranks.stays` follows if it may not.

    Args:
        within: seconds until ranks are ended that have not left.
        why: for people.
        signum: the signal that stands for it, if it is one.
    """

    within: float
    why: str
    signum: int | None = None


Action: TypeAlias = (
    Start
    | CancelStarts
    | ForkAhead
    | EndTemplate
    | Send
    | Kill
    | AskPlace
    | LeaveJob
    | Tell
    | AskToLeave
    | AskDrain
)
