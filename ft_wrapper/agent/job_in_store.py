"""What the ranks' store says about the job that they form on their own."""

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
from ..protocol.records import DONE, Member, MemberRecord, record_of
from .policy import JobFacts, JobOutcome

log = logging.getLogger(__name__)

T = TypeVar("T")
Call = Callable[[Callable[[], Any], float | None], Any]

#: For a store that an agent hosts: it answers at once if it can.
STORE_TIMEOUT = timedelta(seconds=10)
_RAISED = "raised "
_STRANDED = (f"{_RAISED}ft_wrapper.exception.RestartTimeout", f"{_RAISED}ft_wrapper.exception.Store")
_AGAIN = timedelta(seconds=1)  # for the next question to a store that was out of reach just now


class JobInStore:
    """Asks the store. A question may take seconds; if the store does not answer, the answer is no.

    Args:
        address: of the store.
        have_formed: whether the ranks are known to have formed a job.
        call: runs a query of the store, with a timeout in seconds or None. Raises StoreUnavailable on a
            timeout or a signal.

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

    def facts_of(self, slot: int, pid: int) -> JobFacts:
        """What is known of the job, and of how a slot's process has left it.

        If the store does not answer now, it did not answer the process either: that was stranded.
        """
        agreement = self._agreement

        def ask() -> JobFacts:
            head = agreement.iterations.read_head()
            record = record_of(self.store, agreement.joining.newest_of(slot))
            own = record if record.pid == pid else MemberRecord()
            terms, faults = None, []
            if head is not None:
                terms, faults = read(self.store, keys.terms(head.call)), agreement.ends.faults_of(head.n)
            agreed = {} if terms is None else json.loads(terms)
            its = [fault.message for fault in faults if (fault.member.slot, fault.pid) == (slot, pid)]
            return JobFacts(
                formed=head is not None or self._have_formed(),
                admits=not isinstance(agreed, dict) or agreed.get("rejoin", True) is True,
                gave_up=own.gave_up,
                stranded=any(message.startswith(_STRANDED) for message in its),
                ended_by=own.ended_by or "",
                error=next((text.removeprefix(_RAISED) for text in its if text.startswith(_RAISED)), ""),
            )

        unknown = JobFacts(formed=self._have_formed(), stranded=True)
        return self._ask(ask, f"how slot {slot} has left the job is not known", unknown)

    def outcome(self) -> JobOutcome:
        """How the job has ended, if it has."""
        agreement = self._agreement

        def ask() -> JobOutcome:
            ends, view = agreement.ends, agreement.iterations.read_current()
            if view is None or ends.outcome_of(view.n) != DONE:
                return JobOutcome(None, view is not None or self._have_formed())
            # The death of an active rank would have ended the iteration by a fault. The death of a process
            # outside a call, as after this one, is logged without a fault.
            dead, entering = {fault.member for fault in ends.faults_of(view.n)}, agreement.entering
            gone = {one for one in dead if not entering.may_be_active(view.n, one)}
            return JobOutcome({m.slot: self._pid_of(m) for m in set(view.members) - gone}, True)

        unknown = JobOutcome(None, self._have_formed())
        return self._ask(ask, "whether the job has finished is not known", unknown)

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
