"""What is known of a round: a node's place in it, what the other nodes do, how it ends. Pure."""

import dataclasses
import enum
import json
from collections.abc import Iterable, Sequence

from .._text import IN_LINE, cut
from ..protocol.notice import Notice

# What there is to do: nothing; fix the program, as the same would happen again; fix the command line; try
# again here, as a machine, a network or a process was lost (EX_TEMPFAIL of sysexits.h); try on another node.
DONE, PROGRAM, COMMAND_LINE, INFRASTRUCTURE, BAD_NODE = 0, 1, 2, 75, 76
_NAMES = {0: "done", 1: "program", 2: "command line", 75: "infrastructure", 76: "bad node"}


@dataclasses.dataclass(frozen=True)
class JobResult:
    """How a job has ended; or a node's part in it, if that ended before the job.

    Args:
        exit_code: for the program that started it; see docs/launching.md.
        why: in a line, for people; empty if there is nothing to say.
        culprit: the rank that caused it; empty if none did.
        verdict: the exit code in a word; derived from the code if empty.
    """

    exit_code: int
    why: str = ""
    culprit: str = ""
    verdict: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "verdict", self.verdict or _NAMES.get(self.exit_code, "signal"))

    def __str__(self) -> str:
        whose = f"{self.culprit}: " if self.culprit else ""
        return f"exit code {self.exit_code} ({self.verdict}): {whose}{self.why}"

    def to_text(self) -> str:
        """The result as a JSON object, of one line; a long reason is cut, as all nodes read it."""
        return json.dumps(vars(self) | {"why": cut(self.why, IN_LINE)})

    @classmethod
    def from_text(cls, text: str) -> "JobResult | None":
        """Reads a result; None if the text is not one."""
        return cls(**json.loads(text)) if text.startswith("{") else None


def worst(results: Iterable[JobResult | None]) -> JobResult | None:
    """The combined result: one that rules out another try counts first; of equal ones, the first.

    Args:
        results: what each node has said; None if one has said nothing.

    Returns:
        None if no node has said anything.
    """
    said = [result for result in results if result is not None]
    return min(said, key=lambda result: (result.exit_code == DONE, result.exit_code), default=None)


# A round --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Round:
    """One formation of the job, as one node sees it: from one start of all ranks to the next.

    Args:
        address: ``host:port`` of the store that the ranks of all nodes use.
        world_size: ranks of all nodes.
        base_rank: the first rank of this node, and its slot; those of the others follow.
        group_rank: this node's number.
        group_world_size: number of nodes.
        role_rank: number of the first rank of this node among those of the same role.
        role_world_size: ranks of this role on all nodes.
        formation_size: ranks that the job began with; more may have come later.
        restarts: how often all ranks were restarted, if that is known for all nodes; None if each agent
            counts for itself.
        formed: whether the ranks have formed a wrapped job already, which those of this node are to join.
        node: what to call this node in messages; empty if there is no other.
        agreed_in: address of the store in which wrapped ranks agree, if that is another one; it outlives all
            nodes then.
    """

    address: str
    world_size: int
    base_rank: int
    group_rank: int
    group_world_size: int
    role_rank: int
    role_world_size: int
    formation_size: int
    restarts: int | None = None
    formed: bool = False
    node: str = ""
    agreed_in: str = ""

    @property
    def store(self) -> str:
        """Address of the store in which wrapped ranks agree."""
        return self.agreed_in or self.address

    def rank(self, local_rank: int) -> int:
        """The rank, and slot, of one of this node's ranks."""
        return self.base_rank + local_rank


def alone(address: str, nproc: int) -> Round:
    """The round of a job on one node: its ranks are all there are."""
    return Round(address, nproc, 0, 0, 1, 0, nproc, nproc)


class What(enum.Enum):
    """What news from the other nodes is about.

    Attributes:
        COME: all nodes meet again: this one ends its ranks, and takes part in the next round.
        GONE: a node is lost, or has left. The same, unless the ranks of this node are done.
        OVER: the job has failed: this node ends its ranks.
        LOST: the rendezvous is lost. The same, unless the ranks of this node are done.
        CLOSED: the job has ended: the nodes have stopped waiting for each other.
        DRAIN: ranks of this node are to leave the job, and are not started again.
        LEAVE: this node is asked to leave the job; the other nodes have to agree.
        CHECKPOINT: this node is asked for a notice to all ranks of the job.
        NOTICE: all ranks get a notice.
    """

    COME = enum.auto()
    GONE = enum.auto()
    OVER = enum.auto()
    LOST = enum.auto()
    CLOSED = enum.auto()
    DRAIN = enum.auto()
    LEAVE = enum.auto()
    CHECKPOINT = enum.auto()
    NOTICE = enum.auto()

    @property
    def ends(self) -> bool:
        """Whether it ends the ranks of this node for good."""
        return self in (What.OVER, What.LOST)


@dataclasses.dataclass(frozen=True)
class News:
    """Something that the other nodes have done.

    Args:
        what: what follows.
        why: for people; empty if there is nothing to say.
        slots: of a drain: of which ranks; empty for all of this node.
        within: of a request or a drain: seconds after which ranks that have not left are ended.
        result: of an end: how the job has ended, if that is known.
        notice: the notice.
    """

    what: What
    why: str = ""
    slots: tuple[int, ...] = ()
    within: float = 0.0
    result: JobResult | None = None
    notice: Notice | None = None


@dataclasses.dataclass(frozen=True)
class Failure:
    """The end of a rank's process that did not exit with 0, or did so in its wrapped call.

    Args:
        rank: the rank, among those of all nodes.
        pid: its process; 0 if none could be started.
        exitcode: its exit code, or minus the number of the signal that ended it.
        when: seconds since the epoch: of the exception, if it was recorded, else of the end.
        error: the first line of what was recorded; empty if nothing was.
        file: where to read on: a log file or the error file; empty if there is none.
        incarnation: number of this process of the rank, from 0.
        error_file: where its exception was recorded; empty if it was not.
        ended_by: the error of another rank that ended the job, and this process with it; empty if none did.
        gave_up: whether it left the job for good, because going on is useless.
        was_stranded: whether it left the job because the store or the other ranks did not answer.
        came_before: whether a process ended with this exit code in the round before, and no job has formed.
        how: how the process ended, in words.
    """

    rank: int
    pid: int
    exitcode: int
    when: float
    error: str
    file: str
    incarnation: int = 0
    error_file: str = ""
    ended_by: str = ""
    gave_up: bool = False
    was_stranded: bool = False
    came_before: bool = False
    how: str = ""


def in_order(failures: Iterable[Failure]) -> list[Failure]:
    """Sorts failures by time, the earliest first; those of the same second keep their order."""
    return sorted(failures, key=lambda failure: int(failure.when))


@dataclasses.dataclass(frozen=True)
class End:
    """How the ranks of this node ended, for a round or for good.

    Args:
        failures: those that count, in the order of happening.
        signum: the signal that ended the job, or None.
        signal: its name.
        forgiven: those that the job finished without.
        again: whether all are to be restarted, in the next round.
        failed: why the job cannot go on, on any node; empty if it can, or has finished.
        ended_by: why another node has ended the job; empty if none has.
        lost: whether no rank of this node is left in a job that goes on elsewhere.
        closed: whether the other nodes have stopped waiting for each other.
        drained: whether all ranks of this node were asked to leave, and have.
        preempted: why the job was to leave, which is to go on elsewhere or later; empty if it was not.
        node: what this node is called; empty if there is no other.
        elsewhere: how the job has ended, as the other ranks or nodes say.
        left: how this node's part has ended, if that was before the job's end.
    """

    failures: list[Failure] = dataclasses.field(default_factory=list)
    signum: int | None = None
    signal: str = ""
    forgiven: list[Failure] = dataclasses.field(default_factory=list)
    again: bool = False
    failed: str = ""
    ended_by: str = ""
    lost: bool = False
    closed: bool = False
    drained: bool = False
    preempted: str = ""
    node: str = ""
    elsewhere: JobResult | None = None
    left: JobResult | None = None

    def result(self) -> JobResult:
        """What this end means: for the job, or for this node's part if that ended before."""
        if self.signum is not None:
            return JobResult(128 + self.signum, f"it was ended by {self.signal}")
        if self.ended_by:
            return self.elsewhere or JobResult(INFRASTRUCTURE, self.ended_by)
        own = result_of_failures(self.failures, self.node) if self.failures else None
        gone = JobResult(INFRASTRUCTURE, self.preempted, verdict="preempted") if self.preempted else None
        return self.left or worst((own, gone, self.elsewhere)) or JobResult(DONE)


def result_of_failures(failures: Sequence[Failure], node: str) -> JobResult:
    """What the failures of a node's ranks mean for the job.

    A process that gave up, or exited on its own, would do so again. One that was killed counts as a loss,
    unless one was killed by the same signal in the round before, and no job has formed.

    Args:
        failures: those that count, the first one first; at least one.
        node: what the node is called; empty if there is no other.
    """
    first = next((one for one in failures if one.gave_up), failures[0])
    is_lost = (first.exitcode < 0 and not first.came_before) or first.was_stranded
    code = INFRASTRUCTURE if is_lost and not first.gave_up else PROGRAM
    culprit = f"rank {first.rank} (pid {first.pid}{node and f', node {node}'})"
    return JobResult(code, f"{first.how}{first.error and f': {first.error}'}", culprit)
