"""Events that `Ranks` handles, and actions that it answers with; see `ft_wrapper.agent.ranks`."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from .nodes import News, Round
from .outputs import Failure
from .policy import WatchedJob

# Events ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RoundBegan:
    """The nodes have met: all ranks are to be started.

    Args:
        where: the round.
        job: answers what its store knows.
    """

    where: Round
    job: WatchedJob


@dataclasses.dataclass(frozen=True)
class Forked:
    """A process that was asked for runs.

    Args:
        rank: its local rank.
        incarnation: which process in a row of it.
        pid: the process.
    """

    rank: int
    incarnation: int
    pid: int


@dataclasses.dataclass(frozen=True)
class NotStarted:
    """A process that was asked for could not be started.

    Args:
        rank: its local rank.
        failure: why, as the failure that it is.
    """

    rank: int
    failure: Failure


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process has ended.

    Args:
        rank: its local rank.
        exitcode: its exit code, or minus the number of the signal that ended it.
        failure: how it failed; None if it did not, or if a stop ended it.
    """

    rank: int
    exitcode: int
    failure: Failure | None = None


@dataclasses.dataclass(frozen=True)
class SignalArrived:
    """A signal that ends the job.

    Args:
        signum: its number.
    """

    signum: int


@dataclasses.dataclass(frozen=True)
class Place:
    """The answer to `AskPlace`.

    Args:
        is_ours: whether this node is known to have its place among the others.
        out_of_reach: why that could not be found out; empty if it could.
    """

    is_ours: bool
    out_of_reach: str = ""


@dataclasses.dataclass(frozen=True)
class Abandoned:
    """The loop is left, whatever runs."""


@dataclasses.dataclass(frozen=True)
class Tick:
    """All events so far were handled: now to what is due. Comes before each wait."""


Event: TypeAlias = RoundBegan | Forked | NotStarted | Ended | SignalArrived | News | Place | Abandoned | Tick


# Actions ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Start:
    """Starts a process, or asks the template for it: `Forked` or `NotStarted` follows.

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
    """Takes back what the template was asked for.

    Args:
        why: for people, if the template is slow; empty if it does not matter.
    """

    why: str = ""


@dataclasses.dataclass(frozen=True)
class ForkAhead:
    """Has a process forked ahead, for the next replacement."""


@dataclasses.dataclass(frozen=True)
class EndTemplate:
    """Ends the template: nothing is started any more."""


@dataclasses.dataclass(frozen=True)
class Send:
    """Sends a signal.

    Args:
        signum: its number.
        rank: to which local rank; to all that run when None.
    """

    signum: int
    rank: int | None = None


@dataclasses.dataclass(frozen=True)
class Kill:
    """Kills all that run, and waits: `Ended` follows for each, also for one that is stuck in the kernel."""


@dataclasses.dataclass(frozen=True)
class AskPlace:
    """Asks whether this node has its place among the others: `Place` follows."""


@dataclasses.dataclass(frozen=True)
class LeaveJob:
    """Tells the other nodes that this one leaves.

    Args:
        why: for people.
    """

    why: str


@dataclasses.dataclass(frozen=True)
class Tell:
    """Tells people of a failure. The last action: a line in the log is not worth waiting for.

    Args:
        failure: what has happened.
        why: what follows, and why.
    """

    failure: Failure
    why: str


Action: TypeAlias = Start | CancelStarts | ForkAhead | EndTemplate | Send | Kill | AskPlace | LeaveJob | Tell
