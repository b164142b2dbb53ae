"""Keys in etcd: the job survives the loss of any machine."""

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from ..protocol import keys as names
from ..protocol.operations import Delete, Heartbeat, Reading, Step, Write, encoded, keys_of, to_text
from . import etcd_messages as messages
from .address import DEFAULT_TTL
from .base import DEFAULT_TIMEOUT, StoreMixin
from .etcd_client import EtcdClient
from .etcd_job import EtcdJob
from .etcd_messages import EtcdCompacted, EtcdKeys, KeyValue, Operation, Transaction
from .etcd_watch import LOOK_AGAIN, Watch
from .secret import seal_of

T = TypeVar("T")

_TTL = timedelta(seconds=DEFAULT_TTL)

# A key takes two operations: a put and a deletion.
_KEYS_A_WRITE = messages.MOST_OPERATIONS // 2
_BYTES_A_WRITE = messages.LARGEST_REQUEST * 2 // 3


class EtcdTimeout(DistStoreError, LookupError):
    """Nobody wrote a key in time. The message names the missing keys."""


class EtcdStore(Store, StoreMixin):
    """Keys in an etcd cluster (version 3.4 or later), under one prefix.

    All keys of a job except heartbeats have one lease. Each process that has made a store keeps the lease
    alive until it closes that store; clones depend on the store that they were made of. If no process keeps
    the lease alive for ``ttl``, the keys are gone, and a client that comes back gets `StoreError`, never a
    number that was used before. A request whose answer is lost is sent again, to another member if there is
    one. Then ``add`` may count twice, as on TCPStore.

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
        begins: whether to begin the job if there is none. A job that died must not begin again unnoticed.

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
            raise ValueError(f"prefix={prefix!r} of the job's keys in etcd is no name; take the job's own")
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
        self._keys = EtcdKeys(self._etcd.keys, self._etcd.lease, self._etcd.nonce).within(namespace)
        self.place = f"{prefix.strip('/')}/{namespace}"
        self.seal, self.is_private = seal_of(self.place), bool(user or cert)
        self._origin: EtcdStore | None = None
        self._stop_keeping = self._etcd.keep_alive(self)

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
            self._stop_keeping()

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
        """Writes several keys; all at once if they are no more than some 60 keys and a megabyte."""
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
                raise DistStoreError(f"add: key {key!r} holds {value!r}, which is no number") from None
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
        """Carries out steps, in as few transactions as possible; each heartbeat is a request of its own."""
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
        """Waits for keys, one after the other; raises `EtcdTimeout` unless each is written in time.

        Each key is watched from the first look on, so a key that is written and deleted counts as written.
        """
        missing, since = set(keys), dict[str, int]()
        while missing:
            revision, found = self._look(what, sorted(missing))
            missing -= found.keys()
            if not missing:
                break
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise EtcdTimeout(f"{self!r}: {what} timed out: no one wrote the keys {sorted(missing)}")
            key, since = min(missing), dict.fromkeys(missing, revision + 1) | since
            watch = Watch(self._etcd.client, self._keys.span(key), since.pop(key))
            try:
                if watch.first(min(remaining, LOOK_AGAIN)) is not None:
                    missing.discard(key)
            except EtcdCompacted:
                since.clear()

    def _modify(self, what: str, key: str, decide: Callable[[bytes | None], tuple[list[Operation], T]]) -> T:
        """Changes a key depending on its value; tries again if the key was written meanwhile.

        Args:
            what: name of the change, for messages.
            key: the key.
            decide: maps the key's value to the operations, none if nothing has to change, and the result.
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

    Entries of one log that are written at once would have no order. A heartbeat is no transaction.
    """
    every = [key for step in steps for key in keys_of(step)]
    written = [key for step in steps for key in keys_of(step) if not isinstance(step, Reading)]
    if any(isinstance(step, Heartbeat) for step in steps) or len(written) > len(set(written)):
        return False
    return len(every) <= _KEYS_A_WRITE and sum(len(repr(step)) for step in steps) <= _BYTES_A_WRITE
