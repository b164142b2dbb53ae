"""What a store must be able to do: torch's operations, and steps that are made of them or better done."""

import dataclasses
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Self

from torch.distributed import DistStoreError

from ..exception import StoreError
from .seal import Seal, forged

_SOMEBODY_ELSES = "surrogateescape"  # keeps bytes that are not UTF-8

#: What `Beats` gives where a sign of life does not hold any more. No count is negative.
LAPSED = -1


@dataclasses.dataclass(frozen=True)
class Read:
    """Reads a key that no one waits for. Gives what it holds, None if it is absent."""

    key: str


@dataclasses.dataclass(frozen=True)
class ReadLog:
    """Reads a log. Gives its entries, a line each."""

    key: str


@dataclasses.dataclass(frozen=True)
class Beats:
    """Looks for signs of life.

    Gives a number that moves as long as they come; `LAPSED` once the last one does not hold any more.
    """

    key: str


@dataclasses.dataclass(frozen=True)
class Beat:
    """Gives a sign of life under a key: a count, or a lease that holds for some seconds. Gives None."""

    key: str
    lasts: float


@dataclasses.dataclass(frozen=True)
class Write:
    """Writes keys. Gives None."""

    values: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Wake:
    """Writes a key that wakes those who wait for it; one that is there may be left as it is. Gives None."""

    key: str
    value: str


@dataclasses.dataclass(frozen=True)
class Append:
    """Adds an entry to a log: a line, or several that readers see together. Gives None."""

    key: str
    entry: str


@dataclasses.dataclass(frozen=True)
class Count:
    """Counts one more. Gives the count: a hint, since a lost answer may be counted twice."""

    key: str


@dataclasses.dataclass(frozen=True)
class Claim:
    """Writes a register unless it is written. Gives what it holds then."""

    key: str
    desired: str


@dataclasses.dataclass(frozen=True)
class Move:
    """Writes a register if it holds what is expected (``""``: is absent). Gives what it holds then."""

    key: str
    expected: str
    desired: str


@dataclasses.dataclass(frozen=True)
class Delete:
    """Deletes keys that are not written any more, however many. Gives None."""

    keys: tuple[str, ...]


Step = Read | ReadLog | Beats | Beat | Write | Wake | Append | Count | Claim | Move | Delete
_TEXTS = Read, ReadLog, Claim, Move  # these return the text of a key


def keys_of(step: Step) -> list[str]:
    """The keys that a step reads or writes."""
    match step:
        case Write(values):
            return [*values]
        case Delete(keys):
            return [*keys]
        case _:
            return [step.key]


def under(prefix: str, step: Step) -> Step:
    """The same step on keys that have a prefix in front."""
    match step:
        case Write(values):
            return Write({prefix + key: value for key, value in values.items()})
        case Delete(keys):
            return Delete(tuple(prefix + key for key in keys))
        case _:
            return dataclasses.replace(step, key=prefix + step.key)


def sealed(step: Step, seal: Seal) -> Step:
    """The same step with what it writes sealed."""
    match step:
        case Append(key, text) | Claim(key, text):
            return type(step)(key, seal.close(key, text))
        case Move(key, expected, desired):
            return Move(key, expected and seal.close(key, expected), seal.close(key, desired))
        case Wake(key, value):
            return Wake(name := seal.name(key), seal.close(name, value))
        case Write(values):
            return Write({key: seal.close(key, value) for key, value in values.items()})
        case _:
            return step


class Operations:
    """The operations of ``torch.distributed.Store`` that the protocol uses, and steps made of them.

    A store implements torch's operations. It overrides ``execute`` where it can carry out several steps at
    once, or one of them in a better way, and ``hear`` where it can tell what a key says that woke a waiter.
    """

    patience = 0.0
    """Seconds for which an operation is tried again when the store cannot be reached; 0: it is not."""
    nonces: Iterator[str] = iter(lambda: secrets.token_hex(6), "")
    """Names that no other proposal has."""
    seal: Seal | None = None
    """Seals what steps write, and opens what they read; torch's operations go as they are. None: nothing."""
    is_private = False
    """Whether others than the job's own are kept out of the store."""

    def set(self, key: str, value: str | bytes) -> None:
        """Writes a key and wakes those who wait for it."""
        raise NotImplementedError

    def get(self, key: str) -> bytes:
        """Reads a key; waits for it up to the store's timeout, then raises ``DistStoreError``."""
        raise NotImplementedError

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns its new value."""
        raise NotImplementedError

    def append(self, key: str, value: str | bytes) -> None:
        """Appends to a key, atomically."""
        raise NotImplementedError

    def compare_set(self, key: str, expected: str | bytes, desired: str) -> bytes:
        """Writes a key if it holds what is expected (``""``: is absent). Read the key to see who won."""
        raise NotImplementedError

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys exist; raises ``DistStoreError`` after the timeout."""
        raise NotImplementedError

    def check(self, keys: list[str]) -> bool:
        """Tells whether all keys exist."""
        raise NotImplementedError

    def delete_key(self, key: str) -> bool:
        """Deletes a key; tells whether it existed."""
        raise NotImplementedError

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Reads several keys at once; waits like ``get``."""
        raise NotImplementedError

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Writes several keys at once."""
        raise NotImplementedError

    def num_keys(self) -> int:
        """Number of keys in the store."""
        raise NotImplementedError

    def list_keys(self) -> list[str]:
        """Names of all keys, for cleaning up; none where a store cannot tell."""
        raise NotImplementedError

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of operations that wait."""
        raise NotImplementedError

    @property
    def timeout(self) -> timedelta:
        """The timeout of operations that wait."""
        raise NotImplementedError

    def clone(self) -> Self:
        """Another client of the same store: one a thread, since a client serves one call at a time."""
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of the connection. The default has none."""

    def is_over(self) -> bool:
        """Whether waiting on this store has lost its point: its iteration has ended. Never, by default."""
        return False

    def now(self) -> float:
        """The observer's own clock, in seconds."""
        return time.monotonic()

    def wall_clock(self) -> float:
        """Seconds since the epoch, which the clocks of several hosts agree on, more or less."""
        return time.time()

    def hear(self, key: str, seconds: float) -> str | None:
        """Waits for a key that wakes somebody.

        Returns:
            What it says, as far as the store tells so without being asked again, else ``""``; None if it did
            not come in time.
        """
        if self.seal is not None:
            key = self.wake_name(key)
        if seconds <= 0:
            return "" if self.check([key]) else None
        try:
            self.wait([key], timedelta(seconds=max(seconds, 0.001)))
        except DistStoreError:
            return None
        return ""

    def wake_name(self, key: str) -> str:
        """What a key that wakes somebody is called in the store; with a seal no one else can guess it."""
        return key if self.seal is None else self.seal.name(key)

    def execute(self, steps: Sequence[Step]) -> list[str | None]:
        """Carries out several operations: one after the other, or all at once where a store can.

        If an answer is lost they are carried out again, and the first try may come late. So they are for
        logs, counts and registers, and for keys that all who write them write the same.

        Returns:
            What each of them gives.

        Raises:
            StoreError: what a key holds is no text; names the key.
        """
        if self.seal is None:
            return [self._execute_one(step) for step in steps]
        closed = [sealed(step, self.seal) for step in steps]
        if self.is_private:
            given = self._perform(closed)
            return [self._own(step, held, self.seal) for step, held in zip(closed, given, strict=True)]
        # In order: a wake must not overtake its cause.
        return [self._own(step, self._perform([step])[0], self.seal) for step in closed]

    def _own(self, step: Step, held: str | None, seal: Seal) -> str | None:
        """A step's result without what strangers wrote; overwrites a register that a stranger wrote."""
        if held is None or not isinstance(step, _TEXTS) or (not held and isinstance(step, ReadLog | Move)):
            return held
        text = seal.check(step.key, held)
        if text is None and isinstance(step, Claim | Move) and not self.is_private:
            if isinstance(step, Move) and not step.expected:
                raise forged(step.key)  # an absent head begins a job: that of one that is on is none
            written = self.compare_set(step.key, held, step.desired)
            text = seal.check(step.key, to_text(written, step.key, is_ours=False))
        return seal.latest(step.key, text)

    def _perform(self, steps: Sequence[Step]) -> list[str | None]:
        """What `execute` does with steps that are sealed."""
        return [self._execute_one(step) for step in steps]

    def _execute_one(self, step: Step) -> str | None:
        """Carries out a step by torch's operations."""
        match step:
            case Read(key):
                return self._read(key)
            case ReadLog(key):
                return "\n".join((self._read(key) or "").splitlines())
            case Beats(key):
                return str(self.add(key, 0))
            case Beat(key):
                self.add(key, 1)
            case Claim(key, desired):
                # On an absent key some stores answer with what was expected, which says nothing.
                held = to_text(self.compare_set(key, "", desired), key, self.seal is None) or self._read(key)
                if held is None:
                    raise StoreError(f"store key {key!r} is gone, though it was written just now")
                return held
            case Move(key, expected, desired):
                return to_text(self.compare_set(key, expected, desired), key, self.seal is None)
            case Count(key):
                return str(self.add(key, 1))
            case Append(key, entry):
                self.append(key, entry + "\n")
            case Wake(key, value):
                self.set(key, value)
            case Write(values) if len(values) > 1:
                self.multi_set([*values], [*values.values()])
            case Write(values):
                for key, value in values.items():
                    self.set(key, value)
            case Delete(keys):
                for key in keys:
                    self.delete_key(key)
        return None

    def _read(self, key: str) -> str | None:
        """Reads a key without waiting for it; None if it is absent."""
        if not self.check([key]):
            return None
        try:
            return to_text(self.get(key), key, self.seal is None)
        except DistStoreError:
            return None  # it was deleted just now


def read(store: Operations, key: str) -> str | None:
    """Reads a key without waiting for it; None if it is absent."""
    return store.execute([Read(key)])[0]


def read_log(store: Operations, key: str) -> list[str]:
    """Reads a log as it stands; an absent one is empty."""
    return (store.execute([ReadLog(key)])[0] or "").splitlines()


def beats(store: Operations, key: str) -> int:
    """A number that moves as long as signs of life come; `LAPSED` where the last one holds no longer."""
    return int(store.execute([Beats(key)])[0] or 0)


def append_counted(store: Operations, key: str, entry: str, count_key: str) -> int:
    """Adds an entry to a log, then counts it; returns the count."""
    return int(store.execute([Append(key, entry), Count(count_key)])[1] or 0)


def write_text(store: Operations, key: str, text: str) -> None:
    """Writes a key that no one waits for."""
    store.execute([Write({key: text})])


def claim(store: Operations, key: str, value: str) -> str:
    """Writes a register unless it is written; returns what it holds."""
    (held,) = store.execute([Claim(key, value)])
    if held is None:
        raise forged(key)  # overwritten twice
    return held


def to_text(value: bytes, key: str, is_ours: bool = True) -> str:
    """Decodes what a key holds; an error names the key. What may be somebody else's is decoded anyhow.

    `encoded` makes of it what it was, so that it can be written over.
    """
    try:
        return value.decode(errors="strict" if is_ours else _SOMEBODY_ELSES)
    except UnicodeDecodeError:
        raise StoreError(f"store key {key!r} holds {value!r}, which is no text") from None


def encoded(value: str | bytes) -> bytes:
    """Encodes what goes into a key, or what it is expected to hold."""
    return value.encode(errors=_SOMEBODY_ELSES) if isinstance(value, str) else bytes(value)
