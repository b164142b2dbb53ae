"""Keys in etcd: the job survives the loss of any machine."""

import contextlib
import logging
import math
import os
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from ..exception import StoreError
from ..protocol import keys as names
from ..protocol.operations import Delete, Heartbeat, Reading, Step, Write, encoded, keys_of, to_text
from . import etcd_messages as messages
from .address import DEFAULT_TTL
from .base import DEFAULT_TIMEOUT, StoreMixin
from .bounded import in_background
from .etcd_client import LOOK_AGAIN, EtcdClient, StandingWatch, Watch
from .etcd_messages import Answer, EtcdCompacted, EtcdKeys, KeyValue, Operation, Range, Transaction
from .secret import seal_of

log = logging.getLogger(__name__)

T = TypeVar("T")

_TTL = timedelta(seconds=DEFAULT_TTL)

# A key takes two operations: a put and a deletion.
_KEYS_A_WRITE = messages.MOST_OPERATIONS // 2
_BYTES_A_WRITE = messages.LARGEST_REQUEST * 2 // 3

_KEYS, _LIFE = b"k/", b"life"  # after the prefix

_KEPT_WITHIN = 5.0  # seconds for a request that keeps the lease alive
_KEPT_AGAIN_AFTER = 5.0  # seconds until the next such request if no member answered
_CLOSED_WITHIN = 2.0  # seconds for the thread that keeps the lease alive, which closes the watches
_SHORTEST_BEAT = 2  # seconds; etcd grants no shorter lease by its default settings


class EtcdTimeout(DistStoreError, LookupError):
    """A key was not written in time. The message names the missing keys."""


class EtcdStore(Store, StoreMixin):
    """Keys in an etcd cluster (version 3.4 or later), under one prefix.

    All keys of a job except heartbeats have one lease. Each process that has made a store keeps the lease
    alive until it closes that store; clones depend on the store that they were cloned from. If no process
    keeps the lease alive for ``ttl``, the keys are deleted, and a client that reconnects gets `StoreError`,
    never a number that was used before. A request whose answer is lost is sent again, to another member if
    there is one. Then ``add`` may count twice, as on TCPStore.

    Args:
        endpoints: the members: ``"host:port,host:port"``, or a list of ``"host:port"``.
        prefix: prefix of all keys of the job; no other job may have the same.
        user: user to log in as; no login when None.
        password: password of the user.
        ca: path of the CA certificates that the members' certificates are checked against, PEM; turns on TLS.
        cert: path of the client's certificate, PEM.
        key: path of the certificate's key, PEM.
        timeout: how long to try to reach etcd, and to wait in operations that wait.
        ttl: how long the keys stay when no process keeps them alive; set by the client that begins the job.
        namespace: prefix of this store's keys, after ``prefix``; one job may have several.
        begins: whether to start the job if there is none. A job that died must not start over unnoticed.

    Raises:
        StoreError: etcd cannot be reached within the timeout, or refuses; the message says why.
        ValueError: an argument is malformed.
    """

    # torch's Store has had a method of this name and another meaning since 2.12.
    barrier = StoreMixin.barrier

    def __init__(
        self,
        endpoints: str | Sequence[str],
        prefix: str,
        *,
        user: str | None = None,
        password: str | None = None,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        ttl: timedelta = _TTL,
        namespace: str = "",
        begins: bool = True,
    ) -> None:
        if not prefix.strip("/"):
            raise ValueError(f"prefix={prefix!r} of the job's keys in etcd is empty; use the job's own name")
        if ttl < timedelta(seconds=1):
            raise ValueError(f"ttl={ttl!r} of the job's keys in etcd must be at least a second")
        super().__init__()
        self.patience = timeout.total_seconds()
        client = EtcdClient(
            endpoints, user=user, password=password, ca=ca, cert=cert, key=key, timeout=self.patience
        )
        self.set_timeout(timeout)
        lease_lasts = int(ttl.total_seconds()) if begins else None
        self._etcd = EtcdJob(client, prefix.rstrip("/") + "/", lease_lasts, self.patience)
        weakref.finalize(self, self._etcd.ending.put, None).atexit = False
        self._keys = EtcdKeys(self._etcd.keys, self._etcd.lease, self._etcd.nonce).within(namespace)
        self.place = f"{prefix.strip('/')}/{namespace}"
        self.seal, self.is_private = seal_of(self.place), bool(user or cert)
        self._origin: EtcdStore | None = None

    def __repr__(self) -> str:
        return f"EtcdStore({self._etcd!r})"

    def clone(self) -> "EtcdStore":
        return self.within("")

    def within(self, namespace: str) -> "EtcdStore":
        """A clone whose keys are in a namespace below that of this store."""
        other = EtcdStore.__new__(EtcdStore)
        Store.__init__(other)
        other.set_timeout(self.timeout)
        other.patience, other._etcd, other.membership = self.patience, self._etcd, self.membership
        other._keys, other.place = self._keys.within(namespace), self.place + namespace
        other.seal, other.is_private = seal_of(other.place), self.is_private
        other._origin = self._origin or self  # keeps the lease alive
        return other

    def close(self) -> None:
        """Stops keeping the job's keys alive; on a clone this does nothing."""
        if self._origin is None:
            self._etcd.close()

    def remove(self) -> bool:
        """Deletes all keys of the job, for all its processes; returns whether they still existed."""
        return self._etcd.remove(self.patience)

    def clear(self) -> None:
        """Deletes all keys of the namespace."""
        self._etcd.transact(Transaction("clear", [messages.delete(self._keys.all())]), self.patience)

    @property
    def timeout(self) -> timedelta:
        # torch's PrefixStore sets the timeout in the C++ part of this store, so it is read there.
        return super().timeout

    # torch's operations that write ----------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        """Writes several keys; all at once up to some 60 keys and a megabyte."""
        texts = [to_text(encoded(value), key, is_ours=False) for key, value in zip(keys, values, strict=True)]
        self._perform([Write({key: text}) for key, text in zip(keys, texts, strict=True)])

    def append(self, key: str, value: str | bytes) -> None:
        entry = self._keys.append(key, encoded(value))
        self._etcd.transact(Transaction(f"append to {key!r}", [entry]), self.patience)

    def add(self, key: str, amount: int) -> int:
        def decide(value: bytes | None) -> tuple[list[Operation], int]:
            try:
                after = int(value or b"0") + amount
            except ValueError:
                raise DistStoreError(f"add: key {key!r} holds {value!r}, which is not a number") from None
            is_known = value is not None and not amount
            return [] if is_known else self._keys.replace(key, str(after).encode()), after

        return self._modify(f"add to {key!r}", key, decide)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        wanted, new = encoded(expected), encoded(desired)

        def decide(value: bytes | None) -> tuple[list[Operation], bytes]:
            if (value or b"") == wanted:
                return self._keys.replace(key, new), new
            return [], wanted if value is None else value

        return self._modify(f"compare_set {key!r}", key, decide)

    def delete_key(self, key: str) -> bool:
        def decide(value: bytes | None) -> tuple[list[Operation], bool]:
            return ([], False) if value is None else ([messages.delete(self._keys.span(key))], True)

        return self._modify(f"delete_key {key!r}", key, decide)

    # torch's operations that read -----------------------------------------------------------------------

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        deadline = time.monotonic() + self.timeout.total_seconds()
        while len(present := self._look("get", keys)[1]) < len(set(keys)):
            self._await("get", keys, deadline)
        return [messages.value_of(present[key]) or b"" for key in keys]

    def check(self, keys: list[str]) -> bool:
        return len(self._look("check", keys)[1]) == len(set(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        self._await("wait", keys, time.monotonic() + seconds)

    def num_keys(self) -> int:
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        everything = messages.get(self._keys.all(), keys_only=True)
        _, (found,) = self._etcd.read("list_keys", [everything], self.patience)
        return sorted({self._keys.name(kv.key) for kv in found.keys})

    def has_extended_api(self) -> bool:
        """Tells torch that append, multi_get and multi_set exist."""
        return True

    # torch's C++ PrefixStore knows these two under its own names.
    deleteKey = delete_key
    getNumKeys = num_keys

    # The protocol's operations --------------------------------------------------------------------------

    def wait_for(self, key: str, seconds: float) -> str | None:
        deadline, name = time.monotonic() + seconds, self.wake_name(key)
        wakes = self._keys.all(names.WAKE)
        while name.startswith(names.WAKE) and (standing := self._etcd.standing_watch(wakes, self.patience)):
            remaining = deadline - time.monotonic()
            value = standing.wait_for(self._keys.span(name).key, min(remaining, LOOK_AGAIN))
            if value is None:  # the watch may not have delivered a recent write yet
                value = messages.value_of(self._held(name))
            if value is not None:
                text = to_text(value, name, self.seal is None)
                return text if self.seal is None else self.seal.check(name, text) or ""
            if time.monotonic() >= deadline:
                return None
        return super().wait_for(key, deadline - time.monotonic())

    def _perform(self, steps: Sequence[Step]) -> list[str | None]:
        """Carries out steps, in as few transactions as possible; each heartbeat is its own request."""
        given = list[str | None]()
        for group in _groups(steps):
            match group:
                case [Heartbeat(key, lasts)]:
                    self._etcd.beat(f"beat of {key!r}", self._keys.beats(key), lasts, self.patience)
                    given.append(None)
                case [Delete(keys)] if len(keys) > 1 and not _fit_together(group):
                    self._perform([Delete((key,)) for key in keys])
                    given.append(None)
                case [Write(values)] if len(values) > 1 and not _fit_together(group):
                    self._perform([Write({key: value}) for key, value in values.items()])
                    given.append(None)
                case _:
                    given += self._execute_at_once(group)
        return given

    def _execute_at_once(self, steps: Sequence[Step]) -> list[str | None]:
        operations = [self._keys.operations(step) for step in steps]
        every = [operation for some in operations for operation in some]
        what = ", ".join(
            f"{type(step).__name__.lower()} {', '.join(map(repr, keys_of(step)))}" for step in steps
        )
        answers = iter(self._etcd.transact(Transaction(what, every), self.patience).answers)
        return [
            self._keys.given(step, [next(answers) for _ in some], self.seal is None)
            for step, some in zip(steps, operations, strict=True)
        ]

    # Steps of these -------------------------------------------------------------------------------------

    def _held(self, key: str) -> Sequence[KeyValue]:
        """The value of a key, in parts, with the revisions at which they were written."""
        return self._look("get", [key])[1].get(key, ())

    def _look(self, what: str, keys: Sequence[str]) -> tuple[int, dict[str, Sequence[KeyValue]]]:
        """The revision of the read, and the values of the keys that exist."""
        reads = [messages.get(self._keys.span(key)) for key in keys]
        revision, answers = self._etcd.read(f"{what} {', '.join(map(repr, keys))}", reads, self.patience)
        return revision, {key: found.keys for key, found in zip(keys, answers, strict=True) if found.keys}

    def _await(self, what: str, keys: Sequence[str], deadline: float) -> None:
        """Waits for keys, one after another; raises `EtcdTimeout` unless each is written in time.

        Each key is watched from the first look on, so a key that was written and deleted counts as written.
        """
        missing, since = set(keys), dict[str, int]()
        while missing:
            revision, found = self._look(what, sorted(missing))
            missing -= found.keys()
            if not missing:
                break
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise EtcdTimeout(f"{self!r}: {what} timed out: the keys {sorted(missing)} were not written")
            key, since = min(missing), dict.fromkeys(missing, revision + 1) | since
            watch = Watch(self._etcd.client, self._keys.span(key), since.pop(key))
            try:
                if watch.first(min(remaining, LOOK_AGAIN)) is not None:
                    missing.discard(key)
            except EtcdCompacted:
                since.clear()

    def _modify(self, what: str, key: str, decide: Callable[[bytes | None], tuple[list[Operation], T]]) -> T:
        """Changes a key depending on its value; retries if the key was written meanwhile.

        Args:
            what: name of the change, for messages.
            key: the key.
            decide: maps the key's value to operations (none if nothing has to change) and the result.
        """
        held = self._held(key)
        while True:
            operations, result = decide(messages.value_of(held))
            if not operations:
                return result
            conditions, look = self._keys.unchanged(key, held), [messages.get(self._keys.span(key))]
            done = self._etcd.transact(Transaction(what, operations, conditions, look), self.patience)
            if done.succeeded:
                return result
            held = done.answers[0].keys


def _groups(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Groups consecutive steps that fit in one transaction; other steps are groups of one."""
    group = list[Step]()
    for step in steps:
        if group and not _fit_together([*group, step]):
            yield group
            group = []
        group.append(step)
    if group:
        yield group


def _fit_together(steps: Sequence[Step]) -> bool:
    """Whether steps fit in one transaction, which must not be too large, nor write a key twice.

    Entries of one log that are written at once would have no order. A heartbeat is not a transaction.
    """
    every = [key for step in steps for key in keys_of(step)]
    written = [key for step in steps for key in keys_of(step) if not isinstance(step, Reading)]
    if any(isinstance(step, Heartbeat) for step in steps) or len(written) > len(set(written)):
        return False
    return len(every) <= _KEYS_A_WRITE and sum(len(repr(step)) for step in steps) <= _BYTES_A_WRITE


# The job --------------------------------------------------------------------------------------------


class EtcdJob:
    """All keys of a job: they are under one prefix, and have one lease, except heartbeats.

    The key ``life`` holds a nonce, and has the lease. Keys are read and changed only while ``life`` holds
    that nonce. So a client that reconnects after the lease has expired gets an error, never an empty store.

    Args:
        client: a client of etcd.
        prefix: prefix of all keys.
        ttl: seconds for which the keys of a new job stay when no process keeps the lease alive; None if the
            job must already exist.
        timeout: seconds for which to try to reach etcd.

    Attributes:
        prefix: the prefix as bytes.
        keys: prefix of the keys of the job's stores.
        lease: the lease of all keys.
        nonce: unique to this job: an earlier job under the same prefix had a different one.
        ending: an item in it ends the thread that keeps the lease alive.

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
        self._begin_waiting()
        # Not an event: a finalizer that runs while its lock is held could not set it.
        self.ending: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._keeper = in_background("keeping the job's lease alive", self._keep)

    def __repr__(self) -> str:
        return f"{self.client!r}, {self.prefix.decode()!r}"

    def close(self) -> None:
        """Stops keeping the lease alive; ends all threads and connections."""
        self.ending.put(None)
        self._keeper.join(_CLOSED_WITHIN)

    # Keys ----------------------------------------------------------------------------------------------

    def transact(self, transaction: Transaction, timeout: float) -> Answer:
        """Carries out a transaction; after a lost answer perhaps twice, or late.

        Args:
            transaction: the transaction.
            timeout: seconds for which it is retried.

        Raises:
            StoreError: the transaction failed, or the job's keys are deleted.
        """
        while_it_lasts = transaction._replace(
            compare=[messages.compare(self._life, "value", self.nonce), *transaction.compare],
            failure=[messages.get(self._life), *transaction.failure],
        )
        done = self.client.transaction(while_it_lasts, timeout)
        if done.succeeded:
            return done
        life, *answers = done.answers
        if not life.keys or life.keys[0].value != self.nonce:
            raise StoreError(
                f"{self!r}: the job's keys are gone: no process kept their lease alive, or they were "
                "removed; this job cannot go on"
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
            StoreError: the read failed, or the job's keys are deleted.
        """
        revision, answers = 0, list[Answer]()
        for start in range(0, max(1, len(spans)), messages.MOST_OPERATIONS):
            done = self.transact(Transaction(what, spans[start : start + messages.MOST_OPERATIONS]), timeout)
            revision = revision or done.revision
            answers += done.answers
        return revision, answers

    def remove(self, timeout: float) -> bool:
        """Deletes all keys of the job, and its lease; returns whether the job still existed.

        Ending the lease is not enough, since heartbeats have their own. The deletion is one transaction,
        since another job may start as soon as ``life`` is deleted. It spares other keys below the prefix,
        which may belong to other jobs.
        """
        spans = [self._life, Range.prefix(self.keys)]
        removal = Transaction(
            "removal of the job",
            [messages.delete(span) for span in spans],
            [messages.compare(self._life, "value", self.nonce)],
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
            revision, (present,) = self.read("watch", [messages.get(span)], timeout)
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
                [messages.put(self._life.key, nonce, lease)],
                [messages.compare(self._life, "version", 0)],
                [messages.get(self._life)],
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

    def _keep(self) -> None:
        """Keeps the lease alive until the job is closed or its lease has expired."""
        ttl, pause = 1, 0.0
        while ttl:
            with contextlib.suppress(queue.Empty):
                self.ending.get(timeout=pause)
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
        expired; every other heartbeat only renews the lease. When a lease is not renewed, etcd deletes it
        with its entry. Several processes may send heartbeats for the same key, each with its own entry; a
        parent and its child share one. The last entry to expire counts.

        An existing lease is renewed even if the job's keys are deleted: readers get an error anyway.

        Args:
            what: name of the heartbeat, for messages.
            entries: the key's entries, one of which is this lease's.
            lasts: seconds for which the heartbeat lasts; at least two.
            timeout: seconds for which a request is retried.

        Raises:
            StoreError: a request failed; or the lease had expired, and the job's keys are deleted.
        """
        ttl = max(_SHORTEST_BEAT, math.ceil(lasts))
        lease = self._beats.get((entries, ttl))
        if lease is None or not self.client.keep_alive(lease, timeout):
            lease = self.client.grant(ttl, timeout)
            # The entry has the lease's name, so a repeated or late write makes no other entry.
            entry = messages.put(entries.key + b"%x" % lease, b"", lease)
            self.transact(Transaction(what, [entry]), timeout)
            self._beats[entries, ttl] = lease
