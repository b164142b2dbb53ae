"""Keys in etcd: the job survives the loss of any machine."""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from ..exception import StoreError
from . import etcd_address
from . import keys as names
from .etcd_answers import LARGEST_REQUEST, EtcdRefused
from .etcd_beats import EtcdBeats
from .etcd_gateway import MOST_OPERATIONS, EtcdGateway
from .etcd_job import Changed, EtcdJob, EtcdWriter
from .etcd_messages import Answer, Branch, Compare, Delete, KeyValue, Operation, Put, Range, Span
from .mixin import StoreMixin
from .operations import to_text
from .steps import Append, Beats, Claim, Count, Move, Read, ReadLog, Step, Wake, Write

T = TypeVar("T")

DEFAULT_TIMEOUT = timedelta(seconds=30)
DEFAULT_TTL = timedelta(seconds=etcd_address.DEFAULT_TTL)

_PLAIN, _ENTRIES = b"k/", b"l/"
_END = b"\0\0"

_LOOK_AGAIN = 10.0  # seconds; bounds how late a write is noticed whose wake was missed
_KEYS_A_WRITE = (MOST_OPERATIONS - 1) // 2  # a write and a deletion each, beside the client's register
_BYTES_A_WRITE = LARGEST_REQUEST * 2 // 3
_READING = (Read, ReadLog, Beats)


class EtcdTimeout(DistStoreError, LookupError):
    """No one wrote a key in time. The message names the keys."""


class _Spans(NamedTuple):
    """Where a key is: what was set, and what was appended since, an entry each."""

    plain: Span
    entries: Span

    @property
    def ranges(self) -> list[Range]:
        return [Range(self.plain), Range(self.entries, by_creation=True)]


@dataclasses.dataclass(frozen=True)
class _Held:
    """What a key holds."""

    plain: KeyValue | None = None
    entries: tuple[KeyValue, ...] = ()

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> _Held:
        plain, entries = answers
        return cls(plain.keys[0] if plain.keys else None, entries.keys)

    @property
    def value(self) -> bytes | None:
        if self.plain is None and not self.entries:
            return None
        return b"".join(kv.value for kv in ([] if self.plain is None else [self.plain]) + [*self.entries])

    def unchanged(self, spans: _Spans) -> list[Compare]:
        """What holds as long as the key holds the same."""
        plain = Compare(spans.plain, "mod", 0 if self.plain is None else self.plain.mod_revision)
        if not self.entries:
            return [plain, Compare(spans.entries, "version", 0)]
        # Entries are only ever deleted all together.
        first, last = self.entries[0], self.entries[-1]
        return [
            plain,
            Compare(Span(first.key), "create", first.create_revision),
            Compare(spans.entries, "create", last.create_revision + 1, "less"),
        ]


class EtcdStore(Store, StoreMixin):
    """Keys in an etcd cluster (version 3.4 or later), under one prefix.

    All keys of a job but signs of life go with one lease, which each process that has made a store keeps
    alive until it closes that store; its clones live on it. When no process has done so for ``ttl`` the keys
    are gone, and a client that comes back gets `StoreError`, never a number that was used before. An answer
    that was lost is asked for again, from another member, and nothing is carried out twice.

    Args:
        endpoints: the members: ``"host:port,host:port"`` or a list of these.
        prefix: in front of all keys of the job: no other job may have the same.
        user: who to log in as; no one when None.
        password: the user's.
        ca: path of the certificates of those who may sign the members', PEM; makes it TLS.
        cert: path of a certificate to show, PEM.
        key: path of its key, PEM.
        timeout: how long to try to reach etcd, and to wait in operations that wait.
        ttl: how long the keys stay when no process keeps them alive; the client that begins the job says.
        namespace: in front of the keys of this store, behind the prefix: one job may have several.
        begins: whether to begin the job if there is none. One that died must not begin again unnoticed.

    Raises:
        StoreError: etcd cannot be reached within the timeout, or refuses; the message says why.
        ValueError: an argument cannot be right.
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
        ttl: timedelta = DEFAULT_TTL,
        namespace: str = "",
        begins: bool = True,
    ) -> None:
        if not prefix.strip("/"):
            raise ValueError(f"prefix={prefix!r} of the job's keys in etcd is no name; take the job's own")
        if ttl < timedelta(seconds=1):
            raise ValueError(f"ttl={ttl!r} of the job's keys in etcd must be at least a second")
        super().__init__()
        self._patience = timeout.total_seconds()
        gateway = EtcdGateway(
            endpoints, user=user, password=password, ca=ca, cert=cert, key=key, timeout=self._patience
        )
        self.set_timeout(timeout)
        lease_lasts = int(ttl.total_seconds()) if begins else None
        self._etcd = EtcdJob(gateway, prefix.rstrip("/") + "/", lease_lasts, self._patience)
        self._namespace = namespace.encode()
        self._writer = EtcdWriter(self._etcd)
        self._beats = EtcdBeats(self._etcd)
        self._origin: EtcdStore | None = None
        self._stop_keeping = self._etcd.keep_alive(self)

    def __repr__(self) -> str:
        return f"EtcdStore({self._etcd!r})"

    def clone(self) -> EtcdStore:
        other = EtcdStore.__new__(EtcdStore)
        Store.__init__(other)
        other.set_timeout(self.timeout)
        other._patience, other._etcd, other._place = self._patience, self._etcd, self._place
        other._namespace = self._namespace
        other._writer = EtcdWriter(self._etcd)
        other._beats = EtcdBeats(self._etcd)
        other._origin = self._origin or self  # which keeps the lease alive
        return other

    def close(self) -> None:
        """Ends what this process does to keep the job's keys alive, if this is no clone."""
        if self._origin is None:
            self._stop_keeping()

    def remove(self) -> bool:
        """Deletes all keys of the job, for all its processes; tells whether they were there still."""
        return self._etcd.remove([_PLAIN, _ENTRIES], self._patience)

    def within(self, namespace: str) -> EtcdStore:
        """A clone with other keys: they have this in front of them, behind the namespace of this store."""
        other = self.clone()
        other._namespace += namespace.encode()
        return other

    def clear(self) -> None:
        """Deletes all keys of the namespace."""
        spans = [Span.prefix(self._etcd.prefix + kind + self._namespace) for kind in (_PLAIN, _ENTRIES)]
        self._change("clear", {}, [], [Delete(span) for span in spans], [])

    def set_patience(self, seconds: float) -> None:
        self._patience = seconds

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        # torch's own PrefixStore sets it where only torch's half of this store sees it.
        return super().timeout

    # Operations that write -----------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self._write(f"set {key!r}", {key: _encode(value)})

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        """Writes several keys; all at once up to some 60 keys and a megabyte."""
        part: dict[str, bytes] = {}
        for key, value in zip(keys, map(_encode, values), strict=True):
            size = sum(len(name) + len(other) for name, other in part.items()) + len(key) + len(value)
            if part and (len(part) == _KEYS_A_WRITE or size > _BYTES_A_WRITE):
                self._write("multi_set", part)
                part = {}
            part[key] = value
        if part:
            self._write("multi_set", part)

    def append(self, key: str, value: str | bytes) -> None:
        put = self._entry(key, _encode(value))
        self._change(f"append to {key!r}", {key: put.value}, [], [put], [])

    def count(self, key: str) -> int:
        return self._count(f"count in {key!r}", key, [])

    def log_append_counted(self, key: str, entry: str, count_key: str) -> int:
        return self._count(f"append to {key!r}", count_key, [self._entry(key, f"{entry}\n".encode())])

    def _count(self, what: str, key: str, before: list[Put]) -> int:
        """Counts by entries, of which no one is in another one's way; with other writes, all at once."""
        # Each entry has a name of its own: written twice it is one.
        operations: list[Operation] = [*before, self._entry(key, b""), self._every(key)]
        return self._etcd.write(what, operations, self._patience)[-1].number

    def _every(self, key: str) -> Range:
        return Range(self._spans(key).entries, count_only=True)

    def _entry(self, key: str, value: bytes) -> Put:
        return Put(self._spans(key).entries.key + self._writer.new_name(), value, self._etcd.lease)

    def beat(self, key: str, lasts: float) -> None:
        self._beats.beat(f"beat of {key!r}", self._spans(key).entries.key, lasts, self._patience)

    def beats(self, key: str) -> int:
        (given,) = self.carry_out([Beats(key)])
        assert given is not None
        return int(given)

    def add(self, key: str, amount: int) -> int:
        def decide(value: bytes | None) -> tuple[bytes | None, int]:
            try:
                after = int(value or b"0") + amount
            except ValueError:
                raise DistStoreError(f"add: key {key!r} holds {value!r}, which is no number") from None
            return (None if value is not None and not amount else str(after).encode()), after

        return self._modify(f"add to {key!r}", key, decide, self._held(key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        wanted, new = _encode(expected), _encode(desired)

        def decide(value: bytes | None) -> tuple[bytes | None, bytes]:
            if value == wanted or (value is None and not wanted):
                return new, new
            return None, wanted if value is None else value

        # Who expects nothing may be right; then reading first would be for nothing.
        held = self._held(key) if wanted else _Held()
        return self._modify(f"compare_set {key!r}", key, decide, held)

    def delete_key(self, key: str) -> bool:
        spans, held, what = self._spans(key), self._held(key), f"delete_key {key!r}"
        while held.value is not None:
            operations = [Delete(spans.plain), Delete(spans.entries)]
            changed = self._change(what, {}, held.unchanged(spans), operations, spans.ranges)
            if changed.carried_out:
                return True
            held = _Held.of(changed.answers)
        return False

    def delete_keys(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), _KEYS_A_WRITE):
            part = keys[start : start + _KEYS_A_WRITE]
            deletions = [Delete(span) for key in part for span in self._spans(key)]
            self._etcd.write(f"deletion of {len(part)} keys", deletions, self._patience)

    # Operations that read ------------------------------------------------------------------------------

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        deadline = time.monotonic() + self.timeout.total_seconds()
        while True:
            present = self._read_present(f"get {keys}", dict.fromkeys(keys))
            if len(present) == len(set(keys)):
                return [present[key] for key in keys]
            self._await("get", keys, deadline)

    def check(self, keys: list[str]) -> bool:
        return len(self._existing(f"check {keys}", keys)[1]) == len(set(keys))

    def try_get(self, key: str) -> str | None:
        value = self._held(key).value
        return None if value is None else to_text(value, key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        self._await("wait", keys, time.monotonic() + seconds)

    def num_keys(self) -> int:
        return len(self.list_keys())

    def hear(self, key: str, seconds: float) -> str | None:
        if not key.startswith(names.WAKE):
            return super().hear(key, seconds)
        try:
            said = self._await_wakes("hear", [key], time.monotonic() + max(0.0, seconds))
        except EtcdTimeout:
            return None
        return to_text(said.get(key, b""), key)

    def list_keys(self) -> list[str]:
        kinds = [Span.prefix(self._etcd.prefix + kind + self._namespace) for kind in (_PLAIN, _ENTRIES)]
        _, (plain, entries) = self._etcd.read(
            "list_keys", [Range(kind, keys_only=True) for kind in kinds], self._patience
        )
        names = {kv.key.removeprefix(kinds[0].key) for kv in plain.keys}
        names |= {_name_of(kv.key.removeprefix(kinds[1].key)) for kv in entries.keys}
        return sorted(name.decode() for name in names)

    def has_extended_api(self) -> bool:
        """Tells torch that append, multi_get and multi_set exist."""
        return True

    # torch's C++ PrefixStore knows these two under its own names.
    deleteKey = delete_key
    getNumKeys = num_keys

    # Several at once -----------------------------------------------------------------------------------

    def carry_out(self, steps: Sequence[Step]) -> list[str | None]:
        if not _fit_together(steps):
            return super().carry_out(steps)
        what = ", ".join(map(_described, steps))
        operations = [self._operations(step) for step in steps]
        every = [operation for some in operations for operation in some]
        if all(isinstance(step, _READING) for step in steps):
            ranges = [operation for operation in every if isinstance(operation, Range)]
            found: Sequence[Answer] = self._etcd.read(what, ranges, self._patience)[1]
        else:
            found = self._etcd.write(what, every, self._patience)
        given, start = list[str | None](), 0
        for step, some in zip(steps, operations, strict=True):
            given.append(self._given(step, found[start : start + len(some)]))
            start += len(some)
        return given

    def _operations(self, step: Step) -> list[Operation]:
        match step:
            case Read(key) | ReadLog(key):
                return [*self._spans(key).ranges]
            case Beats(key):
                return [self._beats.counts(self._spans(key).entries.key)]
            case Count(key):
                return [self._entry(key, b""), self._every(key)]
            case Append(key, entry):
                return [self._entry(key, f"{entry}\n".encode())]
            case Write(values):
                return [
                    o for key, text in values.items() for o in self._replace(self._spans(key), text.encode())
                ]
            case Claim(key, value) | Wake(key, value):  # written again it would wake all again
                return [self._branch(key, "", value)]
            case Move(key, expected, desired):
                return [self._branch(key, expected, desired)]

    def _branch(self, key: str, expected: str, desired: str) -> Branch:
        """Writes a register if it holds what is expected (``""``: is absent), else reads it."""
        spans = self._spans(key)
        holds = (
            Compare(spans.plain, "value", expected.encode())
            if expected
            else Compare(spans.plain, "version", 0)
        )
        put = Put(spans.plain.key, desired.encode(), self._etcd.lease)
        return Branch((holds, Compare(spans.entries, "version", 0)), (put,), tuple(spans.ranges))

    def _given(self, step: Step, answers: Sequence[Answer]) -> str | None:
        match step:
            case Read(key):
                value = _Held.of(answers).value
                return None if value is None else to_text(value, key)
            case ReadLog(key):
                return to_text(_Held.of(answers).value or b"", key).rstrip("\n")
            case Claim(key, desired) | Move(key, _, desired):
                (branch,) = answers
                value = desired.encode() if branch.succeeded else _Held.of(branch.answers).value
                return to_text(value or b"", key)
            case Beats():
                return str(self._beats.seen(answers[0].number))
            case Count():
                return str(answers[-1].number)
            case _:
                return None

    # Steps ---------------------------------------------------------------------------------------------

    def _spans(self, key: str) -> _Spans:
        name, prefix = self._namespace + key.encode(), self._etcd.prefix
        # No name with its end is the beginning of another one.
        ended = name.replace(b"\0", b"\0\xff") + _END
        return _Spans(Span(prefix + _PLAIN + name), Span.prefix(prefix + _ENTRIES + ended))

    def _held(self, key: str) -> _Held:
        return _Held.of(self._etcd.read(f"get {key!r}", self._spans(key).ranges, self._patience)[1])

    def _modify(
        self,
        what: str,
        key: str,
        decide: Callable[[bytes | None], tuple[bytes | None, T]],
        held: _Held,
    ) -> T:
        """Writes what follows from what a key holds.

        Args:
            what: what to call it in messages.
            key: the key.
            decide: from what the key holds to what it shall hold, None if that need not be written; and to
                the result.
            held: what it holds, as far as is known.
        """
        spans = self._spans(key)
        while True:
            new, result = decide(held.value)
            if new is None:
                return result
            changed = self._change(
                what, {key: new}, held.unchanged(spans), self._replace(spans, new), spans.ranges
            )
            if changed.carried_out:
                return result
            held = _Held.of(changed.answers)

    def _write(self, what: str, values: dict[str, bytes]) -> None:
        operations = [o for key, value in values.items() for o in self._replace(self._spans(key), value)]
        self._change(what, values, [], operations, [])

    def _replace(self, spans: _Spans, value: bytes) -> list[Operation]:
        return [Put(spans.plain.key, value, self._etcd.lease), Delete(spans.entries)]

    def _change(
        self,
        what: str,
        values: dict[str, bytes],
        conditions: Sequence[Compare],
        operations: Sequence[Operation],
        otherwise: Sequence[Range],
    ) -> Changed:
        try:
            return self._writer.change(what, conditions, operations, otherwise, self._patience)
        except EtcdRefused as error:
            if values and error.is_too_large:
                key = max(values, key=lambda key: len(values[key]))
                raise StoreError(
                    f"{self!r}: the value of key {key!r} is too large: {len(values[key])} bytes, of at most "
                    f"about {LARGEST_REQUEST}"
                ) from error
            raise

    def _existing(self, what: str, keys: Iterable[str]) -> tuple[int, frozenset[str]]:
        """Which of some keys exist, and as of which revision."""
        names = list(dict.fromkeys(keys))
        ranges = [Range(span, keys_only=True) for name in names for span in self._spans(name)]
        revision, answers = self._etcd.read(what, ranges, self._patience)
        existing = (n for i, n in enumerate(names) if answers[2 * i].keys or answers[2 * i + 1].keys)
        return revision, frozenset(existing)

    def _read_present(self, what: str, keys: Iterable[str]) -> dict[str, bytes]:
        """What those of some keys hold that are there."""
        names = list(keys)
        ranges = [r for name in names for r in self._spans(name).ranges]
        _, answers = self._etcd.read(what, ranges, self._patience)
        held = ((name, _Held.of(answers[2 * i : 2 * i + 2]).value) for i, name in enumerate(names))
        return {name: value for name, value in held if value is not None}

    def _await(self, what: str, keys: Sequence[str], deadline: float) -> None:
        if all(key.startswith(names.WAKE) for key in keys):
            self._await_wakes(what, keys, deadline)
        else:
            self._await_any(what, keys, deadline)

    def _await_wakes(self, what: str, keys: Sequence[str], deadline: float) -> dict[str, bytes]:
        """Waits for keys that are written to wake somebody: one watch of this process follows them all.

        Returns:
            What those say that were seen.
        """
        places = {self._spans(key).plain.key: key for key in keys}
        said = dict[str, bytes]()
        while True:
            every = self._spans(names.WAKE).plain
            standing = self._etcd.standing_watch(Span.prefix(every.key), self._patience)
            if standing is None:
                self._await_any(what, keys, deadline)
                return said
            with standing.listening(places) as listener:
                while missing := set(keys) - said.keys():
                    remaining = deadline - time.monotonic()
                    try:
                        woken = listener.get(timeout=max(0.0, min(remaining, _LOOK_AGAIN)))
                    except queue.Empty:
                        # What was written just now may not have been told yet.
                        said |= self._read_present(f"{what} {list(keys)}", missing)
                        missing -= said.keys()
                        if missing and remaining <= _LOOK_AGAIN:
                            raise self._timed_out(what, missing) from None
                        continue
                    if woken is None:
                        break
                    if isinstance(woken, Exception):
                        raise woken
                    said[places[woken.key]] = woken.value or b""
            if not missing:
                return said

    def _await_any(self, what: str, keys: Sequence[str], deadline: float) -> None:
        missing, since = set(keys), None
        while True:
            revision, existing = self._existing(f"{what} {list(keys)}", missing)
            missing.difference_update(existing)
            if not missing:
                return
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise self._timed_out(what, missing)
            places = {span: name for name in missing for span in self._spans(name)}
            # From the first look on: a key that is there and gone again by the next one has been there.
            since = revision if since is None else since
            written = self._etcd.wait(list(places), since, min(remaining, _LOOK_AGAIN))
            if written is None:
                since = None
            elif written in places:
                missing.discard(places[written])
                if not missing:
                    return

    def _timed_out(self, what: str, missing: Iterable[str]) -> EtcdTimeout:
        return EtcdTimeout(f"{self!r}: {what} timed out: no one wrote the keys {sorted(missing)}")


def _fit_together(steps: Sequence[Step]) -> bool:
    """Whether one transaction can hold them: it must not be too large, nor write a key twice.

    Entries of a log that are written at once have no order.
    """
    keys = [key for step in steps for key in _keys_of(step)]
    written = [key for step in steps for key in _keys_of(step) if not isinstance(step, _READING)]
    size = sum(len(repr(step)) for step in steps)
    return size <= _BYTES_A_WRITE and len(keys) <= _KEYS_A_WRITE and len(written) == len(set(written))


def _keys_of(step: Step) -> list[str]:
    return [*step.values] if isinstance(step, Write) else [step.key]


def _described(step: Step) -> str:
    return f"{type(step).__name__.lower()} {', '.join(map(repr, _keys_of(step)))}"


def _encode(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _name_of(entry: bytes) -> bytes:
    """The name of the key that an entry belongs to."""
    return entry[: entry.index(_END)].replace(b"\0\xff", b"\0")
