"""What is done when the process of a rank has failed. Pure."""

import dataclasses
import enum
from collections.abc import Mapping

# Seconds before a replacement in a crash loop. A process that lived for SETTLED was in none.
FIRST_DELAY = 0.5
LONGEST_DELAY = 30.0
SETTLED = 5.0

#: How often each rank may be started again alone within FAULT_WINDOW, by default.
RANK_RESTARTS = 10
#: Seconds for which a replacement counts: as long as, by default, a fault does for the wrapper's max_faults.
FAULT_WINDOW = 3600.0


class Policy(enum.Enum):
    """What ``--restart-policy`` may be.

    Attributes:
        AUTO: ``group`` until a wrapped job has formed, then ``rank``.
        RANK: a process that fails is replaced alone; the other ranks go on.
        GROUP: when a process fails, all are ended and restarted.
    """

    AUTO = "auto"
    RANK = "rank"
    GROUP = "group"


class Remedy(enum.Enum):
    """What is done about a failure."""

    REPLACE = enum.auto()  # its process is started again, alone
    LEAVE_OUT = enum.auto()  # nothing: the other ranks go on to their own end
    RESTART_GROUP = enum.auto()  # all others are ended, then all are restarted
    END_GROUP = enum.auto()  # all others are ended, and that is the end


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What is to be done.

    Args:
        remedy: what.
        why: for people.
        delay: seconds before it is done.
    """

    remedy: Remedy
    why: str
    delay: float = 0.0


@dataclasses.dataclass(frozen=True)
class JobFacts:
    """What the ranks' store says of the job when the process of a rank has failed.

    Args:
        formed: whether the ranks are, or were, a wrapped job: its first iteration was decided.
        admits: whether a process may join it.
        gave_up: whether the process left it for good.
        stranded: whether the process left it because the store or the other ranks did not answer.
        ended_by: the error of another rank for which the process left it; empty if there is none.
        error: the exception by which the process left it, in a line; empty if it is not known.
    """

    formed: bool = False
    admits: bool = True
    gave_up: bool = False
    stranded: bool = False
    ended_by: str = ""
    error: str = ""


@dataclasses.dataclass(frozen=True)
class JobOutcome:
    """How the job has ended, as the ranks' store says.

    Args:
        finished: by slot the process that was in the job when it ended well, None where that is not known;
            None if the job has not ended well. A spare that had died by then is left out. One that dies later
            was there to the end: what its process had to do after the call is lost.
        formed: whether the ranks have formed a wrapped job.
    """

    finished: Mapping[int, int | None] | None = None
    formed: bool = False


class RankBudget:
    """The replacements that a rank still has.

    The first one comes at once. While replacements die soon after they started, each further one waits twice
    as long as the one before. Each counts until the rank has run for FAULT_WINDOW since.

    Args:
        replacements: how many there are.
    """

    def __init__(self, replacements: int) -> None:
        self._most = replacements
        self._ages: list[float] = []  # of those that count: seconds that the rank has run since
        self._quick = 0  # deaths in a row, each soon after the start

    @property
    def left(self) -> int:
        """How many are left, as of the last death."""
        return self._most - len(self._ages)

    def spend(self, lived: float, *, is_first: bool) -> float | None:
        """Takes one out.

        Args:
            lived: seconds for which the process that has died had run.
            is_first: whether it was the rank's first process, which shows no crash loop yet.

        Returns:
            Seconds to wait before the replacement is started; None if there is none left.
        """
        self._ages = [age + lived for age in self._ages if age + lived < FAULT_WINDOW]
        if self.left == 0:
            return None
        self._ages.append(0.0)
        self._quick = 0 if is_first or lived >= SETTLED else self._quick + 1
        return 0.0 if self._quick == 0 else min(FIRST_DELAY * 2.0 ** (self._quick - 1), LONGEST_DELAY)


class RestartPolicy:
    """Decides for all ranks of a node.

    Args:
        policy: what was asked for.
        max_restarts: how often the whole group may be restarted.
        max_rank_restarts: how often each rank may be replaced.
    """

    def __init__(self, policy: Policy, max_restarts: int, max_rank_restarts: int) -> None:
        self.restarts = 0
        self._policy = policy
        self._max_restarts = max_restarts
        self._max_rank_restarts = max_rank_restarts
        self._budgets: dict[int, RankBudget] = {}
        self._has_formed = False

    def begin_round(self, restarts: int | None, *, formed: bool) -> None:
        """All ranks are about to be started.

        Args:
            restarts: how often that was done because some failed, if all nodes count together.
            formed: whether the job that they are to join has formed already.
        """
        self._has_formed = formed
        if restarts is not None:
            self.restarts = restarts

    def replaces(self, rank: int) -> bool:
        """Whether a rank's process, in a job that has formed, is replaced if it dies, as far as is known."""
        return self._policy is not Policy.GROUP and self._budget(rank).left > 0

    def decide(self, rank: int, lived: float, facts: JobFacts, *, is_first: bool) -> Verdict:
        """Decides what a failure leads to, and takes it from the budget.

        Args:
            rank: whose process failed: its rank, and slot, among those of all nodes.
            lived: for how many seconds it had run.
            facts: of the job, and of the process.
            is_first: whether it was the rank's first process.
        """
        # For good: a job that has formed goes on in its ranks.
        self._has_formed = self._has_formed or facts.formed
        if self._policy is Policy.GROUP or (self._policy is Policy.AUTO and not self._has_formed):
            return self._for_group()
        most, budget = self._max_rank_restarts, self._budget(rank)
        if facts.gave_up:
            why = "it left the job for good"
        elif facts.formed and not facts.admits:
            why = "joining a running job takes @Wrapper(rejoin=True)"
        elif (delay := budget.spend(lived, is_first=is_first)) is None:
            why = f"--max-rank-restarts {most} within {FAULT_WINDOW / 60:g} min of running"
        else:
            when = f" in {delay:g} s" if delay else ""
            why = f"it is started again{when} ({most - budget.left} of {most})"
            return Verdict(Remedy.REPLACE, why, delay)
        return Verdict(Remedy.LEAVE_OUT, f"not started again: {why}")

    def _for_group(self) -> Verdict:
        if self.restarts >= self._max_restarts:
            return Verdict(Remedy.END_GROUP, f"all ranks end (--max-restarts {self._max_restarts})")
        self.restarts += 1
        return Verdict(
            Remedy.RESTART_GROUP, f"all ranks are restarted ({self.restarts} of {self._max_restarts})"
        )

    def _budget(self, rank: int) -> RankBudget:
        return self._budgets.setdefault(rank, RankBudget(self._max_rank_restarts))
