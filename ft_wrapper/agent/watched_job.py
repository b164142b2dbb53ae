"""The job that the ranks have formed, as their agent sees it in the store. Reads only."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import DistError

from .. import store
from ..exception import StoreError, StoreUnavailable
from ..store import Member, StoreMixin
from ..store import keys as names

log = logging.getLogger(__name__)

_TIMEOUT = timedelta(seconds=10)  # of an agent that hosts it, and answers at once if it can
_AGAIN = timedelta(seconds=1)  # for the next question to a store that was out of reach just now


class JobInStore:
    """A job whose store is at hand.

    Args:
        address: ``host:port`` of the store.

    Raises:
        StoreError: it does not answer.
    """

    def __init__(self, address: str) -> None:
        self._store = connect(address)
        self._unavailable = False

    def close(self) -> None:
        """Closes the connection."""
        self._store.close()

    def has_formed(self) -> bool:
        """Whether the first iteration was decided."""
        head = None
        with self._asking("whether the ranks have formed a job is not known"):
            head = self._store.read_head()
        return head is not None

    def admits(self) -> bool:
        """Whether a process may join, by the terms that the ranks have agreed on."""
        terms: object = {}
        with self._asking("the terms of the job are not known"):
            head = self._store.read_head()
            text = None if head is None else self._store.try_get(names.terms(head.call))
            terms = {} if text is None else json.loads(text)
        return not isinstance(terms, dict) or terms.get("use_global_iteration", True) is True

    def has_given_up(self, slot: int, pid: int) -> bool:
        """Whether a slot's process has left the job for good: by ``RestartAbort``, or with its end."""
        return self._record(slot, pid).get("gave_up") is True

    def ended_by(self, slot: int, pid: int) -> str:
        """What has ended the job, if a slot's process has left it for the sake of another rank's error."""
        return str(self._record(slot, pid).get("ended_by", ""))

    def _record(self, slot: int, pid: int) -> dict[str, object]:
        record: dict[str, object] = {}
        with self._asking(f"how slot {slot} has left the job is not known"):
            record = self._store.record_of(self._store.newest_of(slot))
        return record if record.get("pid") == pid else {}

    def finished_with(self) -> dict[int, int | None] | None:
        """Who was in the job when it ended well: by slot the process, None where that is not known.

        Those that had died by then are left out. None if the job has not ended well.
        """
        finished: dict[int, int | None] | None = None
        with self._asking("whether the job has finished is not known"):
            current = self._store.read_current()
            if current is not None and self._store.outcome().completed:
                view, _ = current
                members = set(view.members) - self._store.deaths_of(view.n)
                finished = {member.slot: self._pid_of(member) for member in members}
        return finished

    @contextlib.contextmanager
    def _asking(self, otherwise: str) -> Iterator[None]:
        """Asks the store in the block. It is left early, with a line in the log, if there is no answer.

        While the store is out of reach the main thread waits long for it only once.
        """
        self._store.set_patience((_AGAIN if self._unavailable else _TIMEOUT).total_seconds())
        try:
            yield
            self._unavailable = False
        except (StoreError, DistError, ValueError) as error:
            log.warning("%s: %s", otherwise, error)
            self._unavailable = isinstance(error, StoreUnavailable)

    def _pid_of(self, member: Member) -> int | None:
        record = self._store.record_of(member)
        pid = record.get("pid")
        return pid if record.get("host") == socket.gethostname() and isinstance(pid, int) else None


def connect(address: str, timeout: timedelta = _TIMEOUT) -> StoreMixin:
    """A client of the store of the ranks.

    Args:
        address: ``host:port``, or ``etcd://…``.
        timeout: how long a store that does not answer is tried again.

    Raises:
        StoreError: it does not answer.
    """
    return store.connect(address, timeout)
