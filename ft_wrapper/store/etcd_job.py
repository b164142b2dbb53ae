"""What a job has in etcd: keys under one lease, signs of life."""

import contextlib
import logging
import math
import os
import queue
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence

from ..exception import StoreError
from .bounded import in_background
from .etcd_client import EtcdClient
from .etcd_messages import MOST_OPERATIONS, Answer, Operation, Span, Transaction, compare, delete, get, put
from .etcd_watch import StandingWatch

log = logging.getLogger(__name__)

_KEYS, _LIFE = b"k/", b"life"  # behind the prefix

_KEPT_WITHIN = 5.0  # seconds for a request that keeps the lease alive
_KEPT_AGAIN_AFTER = 5.0  # seconds, when no member answered
_CLOSED_WITHIN = 2.0  # seconds for the thread that keeps the lease alive, which closes the watches
_SHORTEST_BEAT = 2  # seconds; etcd grants no lease for less than it can keep, with its own settings


class EtcdJob:
    """All keys of a job: they lie under one prefix, and go with one lease, signs of life apart.

    ``life`` holds a nonce, written with the lease. Everything is read and changed only while it holds that
    nonce: a client that comes back after the lease ran out gets an error, never an empty store.

    Args:
        client: of etcd.
        prefix: in front of all keys.
        ttl: seconds for which the keys of a new job stay when no process keeps the lease alive; None if there
            is to be a job already.
        timeout: seconds for which to try to reach etcd.

    Attributes:
        prefix: as bytes.
        keys: what the keys of stores begin with.
        lease: that all keys go with.
        nonce: of this job, and of none before it under the same prefix.

    Raises:
        StoreError: etcd cannot be reached, or refuses; the message says why.
    """

    def __init__(self, client: EtcdClient, prefix: str, ttl: int | None, timeout: float) -> None:
        self.client = client
        self.prefix = prefix.encode()
        self.keys = self.prefix + _KEYS
        self._life = Span(self.prefix + _LIFE)
        self.lease, self.nonce = self._find_or_begin(ttl, timeout)
        self._beats: dict[tuple[Span, int], int] = {}  # leases, by the entries and the time that each has
        client.prefer_leader()
        self._begin_waiting()

    def __repr__(self) -> str:
        return f"{self.client!r}, {self.prefix.decode()!r}"

    # Keys ----------------------------------------------------------------------------------------------

    def transact(self, transaction: Transaction, timeout: float) -> Answer:
        """Carries out a transaction; after a lost answer perhaps twice, or late.

        Args:
            transaction: what to do.
            timeout: seconds for which it is tried again.

        Raises:
            StoreError: it failed, or the job's keys are gone.
        """
        while_it_lasts = transaction._replace(
            compare=[compare(self._life, "value", self.nonce), *transaction.compare],
            failure=[get(self._life), *transaction.failure],
        )
        done = self.client.transaction(while_it_lasts, timeout)
        if done.succeeded:
            return done
        life, *answers = done.answers
        if not life.keys or life.keys[0].value != self.nonce:
            raise StoreError(
                f"{self!r}: the job's keys are gone: no one kept their lease alive for its time, or somebody "
                "removed them; this job cannot go on"
            )
        return done._replace(answers=answers)

    def read(self, what: str, spans: Sequence[Operation], timeout: float) -> tuple[int, list[Answer]]:
        """Reads any number of spans, each by `get`.

        Returns:
            The revision as of which the first of them was read, or all if they are few; and what was read.

        Raises:
            StoreError: it failed, or the job's keys are gone.
        """
        revision, answers = 0, list[Answer]()
        for start in range(0, max(1, len(spans)), MOST_OPERATIONS):
            done = self.transact(Transaction(what, spans[start : start + MOST_OPERATIONS]), timeout)
            revision = revision or done.revision
            answers += done.answers
        return revision, answers

    def remove(self, timeout: float) -> bool:
        """Deletes all keys of the job, with its lease; tells whether it was there still.

        Not by the lease alone: signs of life have leases of their own. At once, since another job may begin
        as soon as ``life`` is gone. And not all below the prefix: other jobs may have theirs there.
        """
        spans = [self._life, Span.prefix(self.keys)]
        removal = Transaction(
            "removal of the job", [delete(span) for span in spans], [compare(self._life, "value", self.nonce)]
        )
        done = self.client.transaction(removal, timeout)
        return self.client.revoke(self.lease, timeout) or done.succeeded

    # Waiting -------------------------------------------------------------------------------------------

    def _begin_waiting(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # another thread may have held it when this process was forked
        self._standing: dict[Span, StandingWatch] = {}
        self._is_kept = True

    def standing_watch(self, span: Span, timeout: float) -> StandingWatch | None:
        """A watch of a span that stays open as long as this process keeps the job alive; None after that.

        Args:
            span: what is watched.
            timeout: seconds for which to try to reach etcd.
        """
        if self._pid != os.getpid():  # the threads of the watches have stayed in the process we come from
            self._begin_waiting()
        with self._lock:
            found = self._standing.get(span)
            if not self._is_kept or (found is not None and not found.ended):
                return found
            revision, (present,) = self.read("watch", [get(span)], timeout)
            self._standing[span] = StandingWatch(self.client, span, present.keys, revision)
            return self._standing[span]

    # The lease -----------------------------------------------------------------------------------------

    def _find_or_begin(self, ttl: int | None, timeout: float) -> tuple[int, bytes]:
        """The lease and the nonce of the job."""
        found, lease = self.client.read(self._life, timeout=timeout), 0
        if not found:
            if ttl is None:
                raise StoreError(f"{self!r}: there is no job of this name: it has ended, or never began")
            lease, nonce = self.client.grant(ttl, timeout), secrets.token_hex(8).encode()
            beginning = Transaction(
                "beginning of the job",
                [put(self._life.key, nonce, lease)],
                [compare(self._life, "version", 0)],
                [get(self._life)],
            )
            begun = self.client.transaction(beginning, timeout)
            if begun.succeeded:
                return lease, nonce
            found = begun.answers[0].keys
        (life,) = found
        if lease and lease != life.lease:
            self.client.revoke(lease, timeout)  # another process came first
        if not life.lease:
            raise StoreError(f"{self!r}: {life.key.decode()!r} has no lease: another program has this prefix")
        return life.lease, life.value

    def keep_alive(self, owner: object) -> Callable[[], None]:
        """Keeps the lease alive, from a thread of this process, until an object is collected.

        Args:
            owner: that object.

        Returns:
            Ends it before that, with all threads and connections.
        """
        stop: queue.SimpleQueue[None] = queue.SimpleQueue()
        thread = in_background("keeping the job's lease alive", lambda: self._keep(stop))
        ending = weakref.finalize(owner, stop.put, None)
        ending.atexit = False

        def end() -> None:
            ending()
            thread.join(_CLOSED_WITHIN)

        return end

    def _keep(self, stop: queue.SimpleQueue[None]) -> None:
        ttl, pause = 1, 0.0
        while ttl:
            with contextlib.suppress(queue.Empty):
                stop.get(timeout=pause)
                break
            try:
                ttl = self.client.keep_alive(self.lease, _KEPT_WITHIN)
                pause = ttl / 3
            except StoreError as error:
                log.warning("the lease of the job could not be kept alive, trying again: %s", error)
                pause = _KEPT_AGAIN_AFTER
        else:
            log.warning("%r: the job's lease has expired and its keys are gone: it cannot go on", self)
        with self._lock:
            self._is_kept = False
            standing, self._standing = list(self._standing.values()), {}
        for watch in standing:
            watch.close()
        self.client.close()

    # Signs of life -------------------------------------------------------------------------------------

    def beat(self, what: str, entries: Span, lasts: float, timeout: float) -> None:
        """Gives a sign of life: by a lease, since what is only kept alive is not written.

        Lease and entry are made at the first sign of life, and again when the lease has run out; each further
        one keeps the lease alive and writes nothing. etcd takes away leases that no process keeps alive, with
        their entries. Several processes may give signs of life for the same key, each by an entry of its own,
        or a parent and its child by the same: the last of them counts.

        A lease that is there is kept alive even if the job's keys are gone: a reader is told.

        Args:
            what: what to call it in messages.
            entries: where its entry is to be.
            lasts: seconds for which it holds; two at least.
            timeout: seconds for which a request is tried again.

        Raises:
            StoreError: it failed; or the lease had run out, and the job's keys are gone.
        """
        ttl = max(_SHORTEST_BEAT, math.ceil(lasts))
        lease = self._beats.get((entries, ttl))
        if lease is None or not self.client.keep_alive(lease, timeout):
            lease = self.client.grant(ttl, timeout)
            # The name is the lease's: after a lost answer, or late, it is written once more and no other.
            entry = put(entries.key + b"%x" % lease, b"", lease)
            self.transact(Transaction(what, [entry]), timeout)
            self._beats[entries, ttl] = lease
