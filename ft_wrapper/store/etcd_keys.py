"""Where the keys of a store are in etcd, and what steps mean there. No input or output."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence

from ..protocol.operations import (
    LAPSED,
    Append,
    Beat,
    Beats,
    Claim,
    Count,
    Delete,
    Move,
    Read,
    ReadLog,
    Step,
    Wake,
    Write,
    to_text,
)
from .etcd_messages import Answer, Comparison, KeyValue, Operation, Span, branch, compare, delete, get, put

_END = b"\0\0"
_ENTRY = b"/"


class EtcdKeys:
    """The keys of a store: what was set is at a key's name, what was appended since is behind it, as entries.

    Args:
        prefix: in front of all of them.
        lease: that they go with.
        nonce: of the job; signs of life of another one with the same prefix are none.
    """

    def __init__(self, prefix: bytes, lease: int, nonce: bytes) -> None:
        self._prefix = prefix
        self._lease = lease
        self._nonce = nonce
        self._looks = itertools.count(1)

    def within(self, namespace: str) -> EtcdKeys:
        """Those with a namespace in front of their names, behind the prefix."""
        return EtcdKeys(self.all(namespace).key, self._lease, self._nonce)

    # Where they are -------------------------------------------------------------------------------------

    def all(self, start: str = "") -> Span:
        """All keys whose names begin so."""
        return Span.prefix(self._prefix + start.encode().replace(b"\0", b"\0\xff"))

    def span(self, key: str) -> Span:
        """What was set and, in the order in which they were created, all entries since."""
        return Span.prefix(self.all(key).key + _END)  # no name with its end is the beginning of another one

    def entries(self, key: str) -> Span:
        """What was appended."""
        return Span.prefix(self.span(key).key + _ENTRY)

    def beats(self, key: str) -> Span:
        """Signs of life: entries that go with leases of their own."""
        return Span.prefix(self.entries(key).key + self._nonce)

    def name(self, place: bytes) -> str:
        """The name of the key that has something at a place."""
        name = place.removeprefix(self._prefix)
        return name[: name.index(_END)].replace(b"\0\xff", b"\0").decode()

    # What is done with them -----------------------------------------------------------------------------

    def replace(self, key: str, value: bytes) -> list[Operation]:
        """Sets a key."""
        return [put(self.span(key).key, value, self._lease), delete(self.entries(key))]

    def append(self, key: str, value: bytes) -> Operation:
        """Appends, under a name of its own: however often it is written, it is one entry."""
        return put(self.entries(key).key + secrets.token_hex(12).encode(), value, self._lease)

    def unchanged(self, key: str, held: Sequence[KeyValue]) -> list[Comparison]:
        """What holds as long as a key holds the same: nothing was written since, and it is there still.

        No entry is deleted without the first one, or what was set.
        """
        span = self.span(key)
        if not held:
            return [compare(span, "version", 0)]
        newest = max(kv.mod_revision for kv in held)
        return [
            compare(Span(held[0].key), "create", held[0].create_revision),
            compare(span, "mod", newest + 1, "less"),
        ]

    def operations(self, step: Step) -> list[Operation]:
        """Carries out a step, any but `Beat`; it does no harm if it is carried out twice, or late."""
        match step:
            case Read(key) | ReadLog(key):
                return [get(self.span(key))]
            case Beats(key):
                return [get(self.beats(key), count_only=True)]
            case Count(key):
                # Counted by entries: clients that count at once are not in each other's way.
                return [self.append(key, b""), get(self.entries(key), count_only=True)]
            case Append(key, entry):
                return [self.append(key, f"{entry}\n".encode())]
            case Write(values):
                return [o for key, text in values.items() for o in self.replace(key, text.encode())]
            case Claim(key, value) | Wake(key, value):  # written again it would wake all again
                return [self._move(key, "", value)]
            case Move(key, expected, desired):
                return [self._move(key, expected, desired)]
            case Delete(keys):
                return [delete(self.span(key)) for key in keys]
            case Beat():
                raise AssertionError("a lease is kept alive by no transaction")

    def _move(self, key: str, expected: str, desired: str) -> Operation:
        """Writes a register if it holds what is expected (``""``: is absent), else reads it."""
        span = self.span(key)
        holds = [compare(span, "version", 0)]
        if expected:
            held = compare(Span(span.key), "value", expected.encode())
            holds = [held, compare(self.entries(key), "version", 0)]
        return branch(holds, [put(span.key, desired.encode(), self._lease)], [get(span)])

    def given(self, step: Step, answers: Sequence[Answer]) -> str | None:
        """What a step gives by the answers to its operations."""
        match step:
            case Read(key):
                value = value_of(answers[0].keys)
                return None if value is None else to_text(value, key)
            case ReadLog(key):
                return to_text(value_of(answers[0].keys) or b"", key).rstrip("\n")
            case Claim(key, desired) | Move(key, _, desired):
                (moved,) = answers
                held = desired.encode() if moved.succeeded else value_of(moved.answers[0].keys)
                return to_text(held or b"", key)
            case Beats():
                return str(next(self._looks) if answers[0].number else LAPSED)
            case Count():
                return str(answers[-1].number)
            case _:
                return None


def value_of(held: Sequence[KeyValue]) -> bytes | None:
    """What a key holds whose span was read; None if it is absent."""
    return b"".join(kv.value for kv in held) if held else None
