"""What is done when the process of a rank has failed, and what the ranks' store says of the job.

`RestartPolicy` only decides; `JobInStore` only reads.
"""

import dataclasses
import enum
import json
import logging
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistError

from .. import store
from ..exception import StoreError, StoreUnavailable
from ..protocol import Agreement, keys
from ..protocol.operations import read
from ..protocol.records import DONE, Fault, Member, MemberRecord, record_of

log = logging.getLogger(__name__)

T = TypeVar("T")
Call = Callable[[Callable[[], Any], float | None], Any]

# Seconds before a replacement in a crash loop. A process that lived for SETTLED was in none.
FIRST_DELAY = 0.5
LONGEST_DELAY = 30.0
SETTLED = 5.0

#: How often each rank may be started again alone within FAULT_WINDOW, by default.
RANK_RESTARTS = 10
#: Seconds for which a replacement counts: as long as, by default, a fault does for the wrapper's max_faults.
FAULT_WINDOW = 3600.0
#: For a store that an agent hosts, and which answers at once if it can.
STORE_TIMEOUT = timedelta(seconds=10)
_STRANDED = ("raised ft_wrapper.exception.RestartTimeout", "raised ft_wrapper.exception.Store")
_AGAIN = timedelta(seconds=1)  # for the next question to a store that was out of reach just now


class Policy(enum.Enum):
    """What ``--restart-policy`` may be.

    Attributes:
        AUTO: ``group`` until a wrapped job has formed, then ``rank``.
        RANK: a process that fails is replaced alone; the others go on.
        GROUP: when a process fails, all are ended and restarted.
    """

    AUTO = "auto"
    RANK = "rank"
    GROUP = "group"


class Remedy(enum.Enum):
    """What is done about a failure."""

    REPLACE = enum.auto()  # its process is started again, alone
    LEAVE_OUT = enum.auto()  # nothing: the others go on to their own end
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
        """How many there are, as at the last death."""
        return self._most - len(self._ages)

    def spend(self, lived: float, *, is_first: bool) -> float | None:
        """Takes one out.

        Args:
            lived: seconds for which the process that has died had run.
            is_first: whether it was the rank's first process, from which no crash loop can be told.

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

    def decide(self, rank: int, pid: int, lived: float, job: "JobInStore", *, is_first: bool) -> Verdict:
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
            return Verdict(Remedy.LEAVE_OUT, "not started again (--max-rank-restarts 0)")
        if job.has_given_up(rank, pid):
            return Verdict(Remedy.LEAVE_OUT, "not started again: it left the job for good")
        if job.has_formed() and not job.admits():
            return Verdict(
                Remedy.LEAVE_OUT,
                "not started again: joining a running job takes @Wrapper(rejoin=True)",
            )
        delay = self._budget(rank).spend(lived, is_first=is_first)
        if delay is None:
            return Verdict(
                Remedy.LEAVE_OUT,
                f"not started again: that was done {self._max_rank_restarts} times within "
                f"{FAULT_WINDOW / 60:g} min of running (--max-rank-restarts)",
            )
        count = self._max_rank_restarts - self._budget(rank).left
        when = f" in {delay:g} s" if delay else ""
        return Verdict(
            Remedy.REPLACE, f"it is started again{when} ({count} of {self._max_rank_restarts})", delay
        )

    def _is_alone(self, job: "JobInStore") -> bool:
        if self._policy is Policy.AUTO:
            # For good: what has formed once goes on in its ranks.
            self._has_formed = self._has_formed or job.has_formed()
            return self._has_formed
        return self._policy is Policy.RANK

    def _for_group(self) -> Verdict:
        if self.restarts >= self._max_restarts:
            return Verdict(Remedy.END_GROUP, f"all ranks end (--max-restarts {self._max_restarts})")
        self.restarts += 1
        return Verdict(
            Remedy.RESTART_GROUP, f"all ranks are restarted ({self.restarts} of {self._max_restarts})"
        )

    def _budget(self, rank: int) -> RankBudget:
        return self._budgets.setdefault(rank, RankBudget(self._max_rank_restarts))


class JobInStore:
    """What there is to know of the job that the ranks form by themselves, from their store.

    A question may take seconds; one that the store does not answer is answered no.

    Args:
        address: of the store.
        have_formed: whether the ranks are known to have formed a job: then the store is not asked.
        call: calls a function that asks the store, for so many seconds at the most, if any are given. Raises
            StoreUnavailable if that is not worth waiting for.

    Raises:
        StoreError: it does not answer.
    """

    def __init__(self, address: str, have_formed: Callable[[], bool], call: Call) -> None:
        self._call = call
        self.store = store.connect(address, STORE_TIMEOUT)
        self._agreement = Agreement(self.store)
        self._have_formed = have_formed
        self._unavailable = False

    def close(self) -> None:
        """Closes the connection."""
        self.store.close()

    def has_formed(self) -> bool:
        """Whether the ranks are, or were, a wrapped job: its first iteration was decided."""
        if self._have_formed():
            return True
        otherwise = "whether the ranks have formed a job is not known"
        return self._ask(self._agreement.iterations.read_head, otherwise, None) is not None

    def admits(self) -> bool:
        """Whether a process may join it."""

        def read_terms() -> object:
            head = self._agreement.iterations.read_head()
            text = None if head is None else read(self.store, keys.terms(head.call))
            return {} if text is None else json.loads(text)

        terms = self._ask(read_terms, "the terms of the job are not known", None)
        return not isinstance(terms, dict) or terms.get("rejoin", True) is True

    def has_given_up(self, slot: int, pid: int) -> bool:
        """Whether a slot's process has left it for good."""
        return self._record(slot, pid).gave_up

    def has_stranded(self, slot: int, pid: int) -> bool:
        """Whether a slot's process has left it because the store or the other ranks did not answer.

        True also if the store does not answer now: the process met the same.
        """

        def read_faults() -> list[Fault] | None:
            head = self._agreement.iterations.read_head()
            return [] if head is None else self._agreement.ends.faults_of(head.n)

        faults = self._ask(read_faults, f"how slot {slot} has left the job is not known", None)
        its = (f.message for f in faults or () if (f.member.slot, f.pid) == (slot, pid))
        return faults is None or any(message.startswith(_STRANDED) for message in its)

    def ended_by(self, slot: int, pid: int) -> str:
        """What ended the job, if a slot's process left it because of another rank's error."""
        return self._record(slot, pid).ended_by or ""

    def _record(self, slot: int, pid: int) -> MemberRecord:
        joining, nothing = self._agreement.joining, MemberRecord()
        otherwise = f"how slot {slot} has left the job is not known"
        record = self._ask(lambda: record_of(joining.store, joining.newest_of(slot)), otherwise, nothing)
        return record if record.pid == pid else nothing

    def finished_with(self) -> dict[int, int | None] | None:
        """Who was in the job when it ended well: by slot the process, None where that is not known.

        A spare that had died by then is left out. One that dies later was there to the end: what its process
        had to do after the call is lost. None if the job has not ended well.
        """

        def read_finished() -> dict[int, int | None] | None:
            ends, view = self._agreement.ends, self._agreement.iterations.read_current()
            if view is None or ends.outcome_of(view.n) != DONE:
                return None
            # The death of an active rank would have ended the iteration by a fault. The death of a process
            # outside of a call, as after this one, is logged without one.
            dead, entering = {fault.member for fault in ends.faults_of(view.n)}, self._agreement.entering
            gone = {one for one in dead if not entering.may_be_active(view.n, one)}
            return {member.slot: self._pid_of(member) for member in set(view.members) - gone}

        return self._ask(read_finished, "whether the job has finished is not known", None)

    def _ask(self, question: Callable[[], T], otherwise: str, default: T) -> T:
        """Asks the store, or answers with the default and a line in the log if it does not answer.

        While the store is out of reach the main thread waits long for it only once.
        """
        again = _AGAIN.total_seconds() if self._unavailable else None
        self.store.patience = again or STORE_TIMEOUT.total_seconds()
        try:
            answer: T = self._call(question, again)
            self._unavailable = False
            return answer
        except (StoreError, DistError, ValueError) as error:
            log.warning("%s: %s", otherwise, error)
            self._unavailable = isinstance(error, StoreUnavailable)
            return default

    def _pid_of(self, member: Member) -> int | None:
        record = record_of(self._agreement.store, member)
        return record.pid if record.host == socket.gethostname() else None
