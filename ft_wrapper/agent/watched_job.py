"""The job that the ranks have formed, as their agent sees it in the store. Reads only."""

from __future__ import annotations

import json
import logging
import socket
from datetime import timedelta

from torch.distributed import DistError

from .. import store
from ..exception import StoreError
from ..store import Member, StoreMixin
from ..store import keys as names

log = logging.getLogger(__name__)

_TIMEOUT = timedelta(seconds=10)  # of an agent that hosts it, and answers at once if it can


class JobInStore:
    """A job whose store is at hand.

    Args:
        address: ``host:port`` of the store.

    Raises:
        StoreError: it does not answer.
    """

    def __init__(self, address: str) -> None:
        self._store = connect(address)

    def close(self) -> None:
        """Closes the connection."""
        self._store.close()

    def has_formed(self) -> bool:
        """Whether the first iteration was decided."""
        try:
            return self._store.read_head() is not None
        except (StoreError, DistError) as error:
            log.warning("whether the ranks have formed a job is not known: %s", error)
            return False

    def admits(self) -> bool:
        """Whether a process may join, by the terms that the ranks have agreed on."""
        try:
            head = self._store.read_head()
            text = None if head is None else self._store.try_get(names.terms(head.call))
            terms = {} if text is None else json.loads(text)
        except (StoreError, DistError, ValueError) as error:
            log.warning("the terms of the job are not known: %s", error)
            return True
        return not isinstance(terms, dict) or terms.get("use_global_iteration", True) is True

    def has_given_up(self, slot: int, pid: int) -> bool:
        """Whether a slot's process has left the job by ``RestartAbort``."""
        try:
            record = self._store.record_of(self._store.newest_of(slot))
        except (StoreError, DistError) as error:
            log.warning("how slot %d has left the job is not known: %s", slot, error)
            return False
        return record.get("gave_up") is True and record.get("pid") == pid

    def finished_with(self) -> dict[int, int | None] | None:
        """Who was in the job when it ended well: by slot the process, None where that is not known.

        Those that had died by then are left out. None if the job has not ended well.
        """
        try:
            current = self._store.read_current()
            if current is None or not self._store.outcome().completed:
                return None
            view, _ = current
            members = set(view.members) - self._store.deaths_of(view.n)
            return {member.slot: self._pid_of(member) for member in members}
        except (StoreError, DistError) as error:
            log.warning("whether the job has finished is not known: %s", error)
            return None

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
