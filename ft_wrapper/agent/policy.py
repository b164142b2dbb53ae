"""What is done when the process of a rank has failed. Decides only, and does nothing."""

from __future__ import annotations

import dataclasses
import enum
from typing import Protocol

from .budget import RankBudget


class Policy(enum.Enum):
    """What ``--restart-policy`` may be."""

    AUTO = "auto"
    """``group`` until a wrapped job has formed, then ``rank``."""
    RANK = "rank"
    """A process that fails is replaced alone; the others go on."""
    GROUP = "group"
    """When a process fails, all are ended and restarted."""


class Action(enum.Enum):
    """What is done."""

    REPLACE = enum.auto()
    """Its process is started again, alone."""
    LEAVE_OUT = enum.auto()
    """Nothing: the others go on to their own end."""
    RESTART_GROUP = enum.auto()
    """All others are ended, then all are restarted."""
    END_GROUP = enum.auto()
    """All others are ended, and that is the end."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What is to be done.

    Args:
        action: what.
        why: for people.
        delay: seconds before it is done.
    """

    action: Action
    why: str
    delay: float = 0.0


class WatchedJob(Protocol):
    """What there is to know of the job that the ranks form by themselves."""

    def has_formed(self) -> bool:
        """Whether the ranks are, or were, a wrapped job: its first iteration was decided."""

    def admits(self) -> bool:
        """Whether a process may join it."""

    def has_given_up(self, slot: int, pid: int) -> bool:
        """Whether a slot's process has left it for good."""


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

    def note_formed(self) -> None:
        """The ranks are known to have formed a wrapped job: their store need not be asked."""
        self._has_formed = True

    def replaces(self, rank: int) -> bool:
        """Whether a rank's process, in a job that has formed, is replaced if it dies, as far as is known."""
        return self._policy is not Policy.GROUP and self._budget(rank).left > 0

    def decide(self, rank: int, pid: int, lived: float, job: WatchedJob, *, is_first: bool) -> Verdict:
        """Decides what a failure leads to, and takes it from the budget.

        Args:
            rank: whose process failed: its rank, and slot, among those of all nodes.
            pid: the process.
            lived: for how many seconds it had run.
            job: what the ranks have formed.
            is_first: whether it was the rank's first process.
        """
        if not self._is_alone(job):
            return self._for_group()
        if self._max_rank_restarts == 0:
            return Verdict(Action.LEAVE_OUT, "not started again (--max-rank-restarts 0)")
        if job.has_given_up(rank, pid):
            return Verdict(Action.LEAVE_OUT, "not started again: it left the job for good")
        if job.has_formed() and not job.admits():
            return Verdict(
                Action.LEAVE_OUT,
                "not started again: joining a running job takes @Wrapper(use_global_iteration=True)",
            )
        delay = self._budget(rank).spend(lived, is_first=is_first)
        if delay is None:
            return Verdict(
                Action.LEAVE_OUT,
                f"not started again: that was done {self._max_rank_restarts} times (--max-rank-restarts)",
            )
        count = self._max_rank_restarts - self._budget(rank).left
        when = f" in {delay:g} s" if delay else ""
        return Verdict(
            Action.REPLACE, f"it is started again{when} ({count} of {self._max_rank_restarts})", delay
        )

    def _is_alone(self, job: WatchedJob) -> bool:
        if self._policy is Policy.AUTO:
            # For good: what has formed once goes on in its ranks.
            self._has_formed = self._has_formed or job.has_formed()
            return self._has_formed
        return self._policy is Policy.RANK

    def _for_group(self) -> Verdict:
        if self.restarts >= self._max_restarts:
            return Verdict(Action.END_GROUP, f"all ranks end (--max-restarts {self._max_restarts})")
        self.restarts += 1
        return Verdict(
            Action.RESTART_GROUP, f"all ranks are restarted ({self.restarts} of {self._max_restarts})"
        )

    def _budget(self, rank: int) -> RankBudget:
        return self._budgets.setdefault(rank, RankBudget(self._max_rank_restarts))
