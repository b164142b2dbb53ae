"""What the protocol asks of a store: steps, which a store makes of torch's operations or in a better way."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple, Self

from ..exception import StoreError
from .seal import Seal, forged

_SOMEBODY_ELSES = "surrogateescape"  # keeps bytes that are not UTF-8

#: What `ReadHeartbeat` gives for an expired heartbeat. No count is negative.
LAPSED = -1


class Read(NamedTuple):
    """Reads a key that is not waited for. Gives its value, None if it is absent."""

    key: str


class ReadLog(NamedTuple):
    """Reads a log. Gives its entries, one per line."""

    key: str


class ReadHeartbeat(NamedTuple):
    """Reads a heartbeat.

    Gives a number that moves as long as heartbeats come; `LAPSED` once the last one has expired.
    """

    key: str


class Heartbeat(NamedTuple):
    """Beats under a key: counts it up, or renews a lease of some seconds. Gives None."""

    key: str
    lasts: float


class Write(NamedTuple):
    """Writes keys. Gives None."""

    values: Mapping[str, str]


class Notify(NamedTuple):
    """Writes a notification key, which wakes its waiters; a present one may stay as it is. Gives None."""

    key: str
    value: str


class Append(NamedTuple):
    """Appends an entry to a log: a line, or several that readers see together. Gives None."""

    key: str
    entry: str


class Count(NamedTuple):
    """Increments a counter. Gives the count: a hint, since a lost answer may be counted twice."""

    key: str


class SetIfAbsent(NamedTuple):
    """Writes a register if it is absent. Gives what it holds then."""

    key: str
    desired: str


class CompareAndSet(NamedTuple):
    """Writes a register if it holds the expected value (``""``: is absent). Gives what it holds then."""

    key: str
    expected: str
    desired: str


class Delete(NamedTuple):
    """Deletes any number of keys that are no longer written. Gives None."""

    keys: tuple[str, ...]


Reading = Read | ReadLog | ReadHeartbeat
Step = Reading | Heartbeat | Write | Notify | Append | Count | SetIfAbsent | CompareAndSet | Delete


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
            return step._replace(key=prefix + step.key)


def sealed(step: Step, seal: Seal) -> Step:
    """The same step with what it writes sealed."""
    match step:
        case Append(key, text) | SetIfAbsent(key, text):
            return type(step)(key, seal.close(key, text))
        case CompareAndSet(key, expected, desired):
            return CompareAndSet(key, expected and seal.close(key, expected), seal.close(key, desired))
        case Notify(key, value):
            return Notify(name := seal.name(key), seal.close(name, value))
        case Write(values):
            return Write({key: seal.close(key, value) for key, value in values.items()})
        case _:
            return step


class Operations:
    """What the protocol asks of a store, and of the process that it is a client of: clocks, names, a log.

    `StoreMixin` makes it of torch's operations.
    """

    patience: float
    """Seconds for which an operation is tried again when the store cannot be reached; 0: it is not."""
    nonces: Iterator[str]
    """Names that no other proposal has."""
    seal: Seal | None = None
    """Seals what steps write, and opens what they read; torch's operations go as they are. None: nothing."""

    emit: Callable[..., None]
    """Writes an event, by its name and with fields; see `ft_wrapper.events`."""
    warn: Callable[[str], None]
    """Logs a line for people."""

    def execute(self, steps: Sequence[Step]) -> list[str | None]:
        """Carries out several operations: one after the other, or all at once where a store can.

        If an answer is lost they are carried out again, and the first try may come late. So they are for
        logs, counts and registers, and for keys that all who write them write the same.

        Returns:
            What each of them gives.

        Raises:
            StoreError: what a key holds is no text; names the key.
        """
        raise NotImplementedError

    def wait_for(self, key: str, seconds: float) -> str | None:
        """Waits until a notification key is written.

        Returns:
            Its value if the store knows it without another request, else ``""``; None after the timeout.
        """
        raise NotImplementedError

    def wake_name(self, key: str) -> str:
        """The name of a notification key in the store; with a seal nobody else can guess it."""
        return key if self.seal is None else self.seal.name(key)

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns its new value."""
        raise NotImplementedError

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys exist; raises ``DistStoreError`` after the timeout."""
        raise NotImplementedError

    def check(self, keys: list[str]) -> bool:
        """Tells whether all keys exist."""
        raise NotImplementedError

    def set(self, key: str, value: str | bytes) -> None:
        """Writes a key and wakes those who wait for it."""
        raise NotImplementedError

    def delete_key(self, key: str) -> bool:
        """Deletes a key; tells whether it existed."""
        raise NotImplementedError

    def list_keys(self) -> list[str]:
        """Names of all keys, for cleaning up; none where a store cannot tell."""
        raise NotImplementedError

    def now(self) -> float:
        """The observer's own clock, in seconds."""
        raise NotImplementedError

    def wall_clock(self) -> float:
        """Seconds since the epoch, which the clocks of several hosts agree on, more or less."""
        raise NotImplementedError

    def host_and_pid(self) -> tuple[str, int]:
        """Where this process runs, and which one it is."""
        raise NotImplementedError

    def is_over(self) -> bool:
        """Whether waiting on this store has lost its point: its iteration has ended. Never, by default."""
        return False

    def clone(self) -> Self:
        """Another client of the same store: one a thread, since a client serves one call at a time."""
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of the connection. The default has none."""


def read(store: Operations, key: str) -> str | None:
    """Reads a key; None if it is absent."""
    return store.execute([Read(key)])[0]


def read_log(store: Operations, key: str) -> list[str]:
    """Reads a log as it stands; an absent one is empty."""
    return (store.execute([ReadLog(key)])[0] or "").splitlines()


def read_heartbeat(store: Operations, key: str) -> int:
    """A number that moves as long as heartbeats come; `LAPSED` once the last one has expired."""
    return int(store.execute([ReadHeartbeat(key)])[0] or 0)


def append_counted(store: Operations, key: str, entry: str, count_key: str) -> int:
    """Adds an entry to a log, then counts it; returns the count."""
    return int(store.execute([Append(key, entry), Count(count_key)])[1] or 0)


def write_text(store: Operations, key: str, text: str) -> None:
    """Writes a key that no one waits for."""
    store.execute([Write({key: text})])


def set_if_absent(store: Operations, key: str, value: str) -> str:
    """Writes a register if it is absent; returns what it holds."""
    (held,) = store.execute([SetIfAbsent(key, value)])
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
