"""A job in etcd: its keys under one lease, and its heartbeats."""

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
from .etcd_messages import MOST_OPERATIONS, Answer, Operation, Range, Transaction, compare, delete, get, put
from .etcd_watch import StandingWatch

log = logging.getLogger(__name__)

_KEYS, _LIFE = b"k/", b"life"  # after the prefix

_KEPT_WITHIN = 5.0  # seconds for a request that keeps the lease alive
_KEPT_AGAIN_AFTER = 5.0  # seconds until the next such request if no member answered
_CLOSED_WITHIN = 2.0  # seconds for the thread that keeps the lease alive, which closes the watches
_SHORTEST_BEAT = 2  # seconds; etcd grants no shorter lease by its default settings


class EtcdJob:
    """All keys of a job: they are under one prefix, and have one lease, except heartbeats.

    The key ``life`` holds a nonce, and has the lease. Keys are read and changed only while ``life`` holds
    that nonce. So a client that comes back after the lease has expired gets an error, never an empty store.

    Args:
        client: a client of etcd.
        prefix: prefix of all keys.
        ttl: seconds for which the keys of a new job stay when no process keeps the lease alive; None if the
            job has to exist already.
        timeout: seconds for which to try to reach etcd.

    Attributes:
        prefix: the prefix as bytes.
        keys: prefix of the keys of the job's stores.
        lease: the lease of all keys.
        nonce: unique to this job: an earlier job under the same prefix had another one.

    Raises:
        StoreError: etcd cannot be reached, or refuses; the message says why.
    """

    def __init__(self, client: EtcdClient, prefix: str, ttl: int | None, timeout: float) -> None:
        self.client = client
        self.prefix = prefix.encode()
        self.keys = self.prefix + _KEYS
        self._life = Range(self.prefix + _LIFE)
        self.lease, self.nonce = self._find_or_begin(ttl, timeout)
        self._beats: dict[tuple[Range, int], int] = {}  # leases of heartbeats, by their entries and ttl
        client.prefer_leader()
        self._begin_waiting()

    def __repr__(self) -> str:
        return f"{self.client!r}, {self.prefix.decode()!r}"

    # Keys ----------------------------------------------------------------------------------------------

    def transact(self, transaction: Transaction, timeout: float) -> Answer:
        """Carries out a transaction; after a lost answer perhaps twice, or late.

        Args:
            transaction: the transaction.
            timeout: seconds for which it is retried.

        Raises:
            StoreError: the transaction failed, or the job's keys are gone.
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
        """Reads any number of spans.

        Args:
            what: name of the read, for messages.
            spans: the spans, each made by `get`.
            timeout: seconds for which the read is retried.

        Returns:
            The revision at which the first `MOST_OPERATIONS` spans were read, and an answer for each span.

        Raises:
            StoreError: the read failed, or the job's keys are gone.
        """
        revision, answers = 0, list[Answer]()
        for start in range(0, max(1, len(spans)), MOST_OPERATIONS):
            done = self.transact(Transaction(what, spans[start : start + MOST_OPERATIONS]), timeout)
            revision = revision or done.revision
            answers += done.answers
        return revision, answers

    def remove(self, timeout: float) -> bool:
        """Deletes all keys of the job, and its lease; returns whether the job still existed.

        To end the lease is not enough, since heartbeats have their own. The deletion is one transaction,
        since another job may begin as soon as ``life`` is gone. It spares other keys below the prefix, which
        may be those of other jobs.
        """
        spans = [self._life, Range.prefix(self.keys)]
        removal = Transaction(
            "removal of the job", [delete(span) for span in spans], [compare(self._life, "value", self.nonce)]
        )
        done = self.client.transaction(removal, timeout)
        return self.client.revoke(self.lease, timeout) or done.succeeded

    # Waiting -------------------------------------------------------------------------------------------

    def _begin_waiting(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # new after a fork: another thread may have held the old lock
        self._standing: dict[Range, StandingWatch] = {}
        self._is_kept = True

    def standing_watch(self, span: Range, timeout: float) -> StandingWatch | None:
        """A watch of a span that stays open while this process keeps the job alive; None after that.

        Args:
            span: the keys to watch.
            timeout: seconds for which to try to reach etcd.
        """
        if self._pid != os.getpid():  # after a fork; the threads of the watches have stayed in the parent
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
        """Keeps the lease alive, in a thread of this process, until an object is collected.

        Args:
            owner: the object.

        Returns:
            A function that ends this earlier, with all threads and connections.
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

    # Heartbeats ----------------------------------------------------------------------------------------

    def beat(self, what: str, entries: Range, lasts: float, timeout: float) -> None:
        """Sends a heartbeat: renews a lease, which writes no key.

        The first heartbeat makes a lease and an entry with it, and so does the next one after the lease has
        expired; each other heartbeat only renews the lease. When nobody renews a lease, etcd deletes it with
        its entry. Several processes may send heartbeats for the same key, each by an entry of its own; a
        parent and its child share one. The last of the entries to expire counts.

        An existing lease is renewed even if the job's keys are gone: readers get an error anyway.

        Args:
            what: name of the heartbeat, for messages.
            entries: the key's entries, one of which is this lease's.
            lasts: seconds for which the heartbeat lasts; at least two.
            timeout: seconds for which a request is retried.

        Raises:
            StoreError: a request failed; or the lease had expired, and the job's keys are gone.
        """
        ttl = max(_SHORTEST_BEAT, math.ceil(lasts))
        lease = self._beats.get((entries, ttl))
        if lease is None or not self.client.keep_alive(lease, timeout):
            lease = self.client.grant(ttl, timeout)
            # The entry has the lease's name, so a repeated or late write makes no other entry.
            entry = put(entries.key + b"%x" % lease, b"", lease)
            self.transact(Transaction(what, [entry]), timeout)
            self._beats[entries, ttl] = lease
