"""What the protocol needs from a store: steps, which a store maps to torch's operations or to its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Self

from ..exception import StoreError
from .seal import Seal, forged

_LENIENT = "surrogateescape"  # an error handler that keeps bytes that are not UTF-8

#: The value that `ReadHeartbeat` gives for an expired heartbeat. No count is negative.
LAPSED = -1


class Read(NamedTuple):
    """Reads a key that has no waiters. Gives its value; None if it is absent."""

    key: str


class ReadLog(NamedTuple):
    """Reads a log. Gives its entries, one per line."""

    key: str


class ReadHeartbeat(NamedTuple):
    """Reads a heartbeat.

    Gives a number that changes while heartbeats come; `LAPSED` once the last one has expired.
    """

    key: str


class Heartbeat(NamedTuple):
    """Sends a heartbeat: increments a counter, or renews a lease of ``lasts`` seconds. Gives None."""

    key: str
    lasts: float


class Write(NamedTuple):
    """Writes keys. Gives None."""

    values: Mapping[str, str]


class Notify(NamedTuple):
    """Writes a notification key, which wakes its waiters; an old value may stay. Gives None."""

    key: str
    value: str


class Append(NamedTuple):
    """Appends an entry to a log: one line, or several that readers see all at once. Gives None."""

    key: str
    entry: str


class Count(NamedTuple):
    """Increments a counter. Gives the count: a hint, since after a lost answer it may count twice."""

    key: str


class SetIfAbsent(NamedTuple):
    """Writes a register if it is absent. Gives its value afterwards."""

    key: str
    desired: str


class CompareAndSet(NamedTuple):
    """Writes a register if it has the expected value (``""``: is absent). Gives its value afterwards."""

    key: str
    expected: str
    desired: str


class Delete(NamedTuple):
    """Deletes keys that are no longer written. Gives None."""

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
    """The same step on keys with a prefix."""
    match step:
        case Write(values):
            return Write({prefix + key: value for key, value in values.items()})
        case Delete(keys):
            return Delete(tuple(prefix + key for key in keys))
        case _:
            return step._replace(key=prefix + step.key)


def sealed(step: Step, seal: Seal) -> Step:
    """The same step with sealed values."""
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
    """What the protocol needs from a store, and from the client's process: clocks, unique names, a log.

    `StoreMixin` implements it with torch's operations.
    """

    patience: float
    """Seconds for which an operation is retried while the store cannot be reached; 0 for no retry."""
    nonces: Iterator[str]
    """Unique names for proposals."""
    seal: Seal | None = None
    """Seals and checks the values of steps, but not those of torch's operations; None for no seals."""

    emit: Callable[..., None]
    """Writes an event, by name and with fields; see `ft_wrapper.events`."""
    warn: Callable[[str], None]
    """Logs a line for people."""

    def execute(self, steps: Sequence[Step]) -> list[str | None]:
        """Carries out steps: one after another, or all at once on a store that can do so.

        If an answer is lost, the steps are carried out again, and the first attempt may take effect late. So
        steps are for logs, counts and registers, and for keys to which all writers write the same value.

        Returns:
            The result of each step.

        Raises:
            StoreError: the value of a key is not text; names the key.
        """
        raise NotImplementedError

    def wait_for(self, key: str, seconds: float) -> str | None:
        """Waits until a notification key is written.

        Returns:
            The key's value if the store knows it without another request, else ``""``; None on timeout.
        """
        raise NotImplementedError

    def wake_name(self, key: str) -> str:
        """The name of a notification key in the store; with a seal, a name that outsiders cannot guess."""
        return key if self.seal is None else self.seal.name(key)

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns its new value."""
        raise NotImplementedError

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""
        raise NotImplementedError

    def list_keys(self) -> list[str]:
        """Names of all keys, for cleaning up; none if the store cannot list them."""
        raise NotImplementedError

    def now(self) -> float:
        """The observer's own clock, in seconds."""
        raise NotImplementedError

    def wall_clock(self) -> float:
        """Seconds since the epoch; the clocks of several hosts agree on it only roughly."""
        raise NotImplementedError

    def host_and_pid(self) -> tuple[str, int]:
        """The host and pid of this process."""
        raise NotImplementedError

    def is_over(self) -> bool:
        """Whether the store's iteration has ended, so that waiting on it is pointless. False by default."""
        return False

    def clone(self) -> Self:
        """Another client of the same store. Each thread needs one: a client serves one call at a time."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the connection. By default there is none."""


def read(store: Operations, key: str) -> str | None:
    """Reads a key; None if it is absent."""
    return store.execute([Read(key)])[0]


def read_log(store: Operations, key: str) -> list[str]:
    """The entries of a log; none if the key is absent."""
    return (store.execute([ReadLog(key)])[0] or "").splitlines()


def read_heartbeat(store: Operations, key: str) -> int:
    """A number that changes while heartbeats come; `LAPSED` once the last one has expired."""
    return int(store.execute([ReadHeartbeat(key)])[0] or 0)


def append_counted(store: Operations, key: str, entry: str, count_key: str) -> int:
    """Appends an entry to a log, then counts it; returns the count."""
    return int(store.execute([Append(key, entry), Count(count_key)])[1] or 0)


def write_text(store: Operations, key: str, text: str) -> None:
    """Writes a key that has no waiters."""
    store.execute([Write({key: text})])


def set_if_absent(store: Operations, key: str, value: str) -> str:
    """Writes a register if it is absent; returns its value afterwards."""
    (held,) = store.execute([SetIfAbsent(key, value)])
    if held is None:
        raise forged(key)  # overwritten twice
    return held


def to_text(value: bytes, key: str, is_ours: bool = True) -> str:
    """Decodes the value of a key; an error names the key.

    Args:
        value: the bytes in the store.
        key: the key.
        is_ours: False for bytes that may be another program's: they are always decoded, and `encoded` turns
            the text back into the same bytes, so that a compare-and-set can replace them.
    """
    try:
        return value.decode(errors="strict" if is_ours else _LENIENT)
    except UnicodeDecodeError:
        raise StoreError(f"store key {key!r} holds {value!r}, which is not text") from None


def encoded(value: str | bytes) -> bytes:
    """Encodes a value to write, or the expected value of a compare-and-set."""
    return value.encode(errors=_LENIENT) if isinstance(value, str) else bytes(value)
