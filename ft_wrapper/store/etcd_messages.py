"""What etcd's JSON gateway is asked, what its answers mean, where a store's keys are. No input or output.

In the gateway's JSON bytes are in base 64, 64-bit numbers are text, and what is 0 or empty is left out.
"""

import base64
import itertools
import json
import secrets
import ssl
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..exception import StoreError
from ..protocol import operations as steps
from ..protocol.operations import Step, encoded, to_text
from .address import Endpoint

#: The most bytes that etcd takes in a request, about, by default.
LARGEST_REQUEST = 1_500_000
#: The most operations that etcd takes in a transaction, by default.
MOST_OPERATIONS = 128

NOT_FOUND, PERMISSION_DENIED, _UNAUTHENTICATED = 5, 7, 16  # gRPC's codes, as the gateway gives them
_PASSING = {1, 2, 4, 10, 14}  # canceled, unknown, deadline exceeded, aborted, unavailable
_LOGIN_AGAIN = ("invalid auth token", "revision of auth store is old", "invalid auth", "user name is empty")

_END = b"\0\0"  # of a key's name
_ENTRY = b"/"


class EtcdRefused(StoreError):
    """etcd answered that it will not. The message says what, and why.

    Attributes:
        code: gRPC's number of the reason.
        reason: etcd's words.
    """

    def __init__(self, message: str, code: int, reason: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason

    @property
    def wants_login(self) -> bool:
        """Whether the request came without a valid token."""
        return self.code == _UNAUTHENTICATED or any(words in self.reason for words in _LOGIN_AGAIN)


class EtcdCompacted(StoreError):
    """The revision asked for lies before etcd's last compaction: read again, and go on from there."""


class NoAnswer(Exception):
    """A member did not answer, or cannot right now: another try may do better."""


class Span(NamedTuple):
    """A key; or all keys from one up to, and without, ``end``."""

    key: bytes
    end: bytes | None = None

    @classmethod
    def prefix(cls, start: bytes) -> "Span":
        """All keys that begin with some bytes, not all of which are 255."""
        kept = start.rstrip(b"\xff")
        return cls(start, kept[:-1] + bytes([kept[-1] + 1]))

    @property
    def json(self) -> dict[str, str]:
        """As a request names it."""
        named = {"key": _to_base64(self.key)}
        return named if self.end is None else {**named, "range_end": _to_base64(self.end)}


class KeyValue(NamedTuple):
    """A key with its value, and the store's revisions at which it was created and last written."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int

    @classmethod
    def parse(cls, kv: dict[str, Any]) -> "KeyValue":
        """Reads one of an answer."""
        return cls(
            base64.b64decode(kv["key"]),
            base64.b64decode(kv.get("value", "")),
            *(int(kv.get(number, 0)) for number in ("create_revision", "mod_revision", "lease")),
        )


class Answer(NamedTuple):
    """The answer to one operation, or to a transaction.

    Args:
        keys: that `get` read, in the order in which they were created.
        number: how many keys `get` found, or `delete` deleted.
        succeeded: whether the comparisons of a transaction held.
        answers: to the operations that it carried out, in order.
        revision: of the store after a transaction.
    """

    keys: tuple[KeyValue, ...]
    number: int
    succeeded: bool
    answers: "list[Answer]"
    revision: int

    @classmethod
    def parse(cls, reply: dict[str, Any]) -> "Answer":
        """Reads one."""
        return cls(
            tuple(KeyValue.parse(kv) for kv in reply.get("kvs", [])),
            int(reply.get("count", reply.get("deleted", 0))),
            bool(reply.get("succeeded")),
            [cls.parse(next(iter(one.values()), {})) for one in reply.get("responses", [])],
            int(reply.get("header", {}).get("revision", 0)),
        )


#: What must hold of some keys, as JSON: made by `compare`.
Comparison = dict[str, str]
#: An operation of a transaction, as JSON: made by `get`, `put` or `delete`.
Operation = dict[str, dict[str, Any]]


def get(span: Span, *, keys_only: bool = False, count_only: bool = False) -> Operation:
    """Reads keys."""
    request = {**span.json, "sort_target": "CREATE", "sort_order": "ASCEND"}
    return {"request_range": request | {"keys_only": keys_only, "count_only": count_only}}


def put(key: bytes, value: bytes, lease: int = 0) -> Operation:
    """Writes a key, which goes with its lease if that is not 0."""
    return {"request_put": {"key": _to_base64(key), "value": _to_base64(value), "lease": str(lease)}}


def delete(span: Span) -> Operation:
    """Deletes keys."""
    return {"request_delete_range": span.json}


class Transaction(NamedTuple):
    """Operations that are done all at once if all comparisons hold, and others that are done if not.

    Args:
        what: what to call it in messages.
        success: what to do if they hold; at most `MOST_OPERATIONS`.
        compare: what must hold, made by `compare`.
        failure: what to do otherwise.
    """

    what: str
    success: Sequence[Operation]
    compare: Sequence[Comparison] = ()
    failure: Sequence[Operation] = ()

    @property
    def json(self) -> dict[str, Any]:
        """As a request, or another transaction, holds it."""
        return {"compare": [*self.compare], "success": [*self.success], "failure": [*self.failure]}


def compare(span: Span, target: str, than: bytes | int, result: str = "equal") -> Comparison:
    """What must hold of each key of a span.

    Args:
        span: the keys. An absent key has ``version``, ``create`` and ``mod`` 0 and no ``value``.
        target: ``value``, ``version``, ``create`` or ``mod``.
        than: what to compare with.
        result: ``equal``, ``less`` or ``greater``.
    """
    field = target if target in ("value", "version") else f"{target}_revision"
    text = _to_base64(than) if isinstance(than, bytes) else str(than)
    return {**span.json, "target": target.upper(), "result": result.upper(), field: text}


def read_answer(what: str, endpoint: Endpoint, status: int, data: bytes) -> dict[str, Any]:
    """Returns an answer as JSON.

    Args:
        what: the request, for messages.
        endpoint: who answers.
        status: of HTTP.
        data: the answer.

    Raises:
        NoAnswer: the member cannot answer now.
        EtcdCompacted: the revision is not kept any more.
        EtcdRefused: etcd refuses.
        StoreError: it is no etcd.
    """
    try:
        reply = json.loads(data)
    except ValueError:
        reply = None
    if isinstance(reply, dict):
        inner = reply.get("error")
        error = inner if isinstance(inner, dict) else reply  # the former is a stream's
        code = error.get("grpc_code") or error.get("code")  # here and below the first until etcd 3.4
        if code or error is inner:
            raise refusal(what, endpoint, int(code or 2), str(error.get("error") or error.get("message")))
        if status == 200:
            return reply
    if status >= 500:
        raise NoAnswer(f"{endpoint} answers HTTP {status}")
    raise StoreError(
        f"{endpoint} does not answer {what} as etcd's v3 gateway does, but HTTP {status} "
        f"{data[:100]!r}; see whether it is an etcd of version 3.4 or later, and whether it wants https"
    )


def refusal(what: str, endpoint: Endpoint, code: int, reason: str) -> Exception:
    """What a member's refusal means.

    Args:
        what: the request, for messages.
        endpoint: who refuses it.
        code: gRPC's number of the reason.
        reason: etcd's words.
    """
    if "compacted" in reason:
        return EtcdCompacted(f"{endpoint}: {what}: {reason}")
    if "too many requests" in reason or (code in _PASSING and "invalid" not in reason):
        return NoAnswer(f"{endpoint}: {reason}")
    hint = ""
    if "too large" in reason or "larger than max" in reason:  # the latter is the gateway's
        hint = f"; etcd takes no more than about {LARGEST_REQUEST} bytes a request"
    elif "space exceeded" in reason:
        hint = "; compact and defragment it, and disarm its alarm"
    elif "user name is empty" in reason:
        hint = "; it wants a user and a password"
    return EtcdRefused(f"{endpoint} refuses {what}: {reason}{hint}", code, reason)


def meaning_of(what: str, endpoint: Endpoint, error: Exception) -> Exception:
    """What an error of the HTTP library means.

    Args:
        what: the request, for messages.
        endpoint: who was asked.
        error: the library's; one that says already what it means is kept.
    """
    if isinstance(error, NoAnswer):
        return error
    cause: BaseException | None = error
    hint = ""
    while cause is not None:
        # A server hangs up on TLS that it does not speak, on plain text where it speaks TLS, and on a
        # certificate that it does not accept: its alert may be lost. So does one that is killed.
        if isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionResetError):
            wants = "speaks TLS and accepts this side's certificate" if endpoint.tls else "wants https"
            hint = f"; see whether it {wants}"
        if isinstance(cause, ssl.SSLError) and _is_final(cause):
            return StoreError(
                f"{endpoint}: {what}: no TLS connection: {cause.reason or cause}; see whether the "
                "certificates on both sides are right, and whether it speaks TLS at all"
            )
        following = cause.__cause__ or cause.__context__
        cause = following or next((a for a in cause.args if isinstance(a, BaseException)), None)
    # The HTTP library puts an object in front of its words.
    return NoAnswer(f"{endpoint}: {str(error).rpartition('>: ')[2] or repr(error)}{hint}")


def _is_final(error: ssl.SSLError) -> bool:
    """Whether another try does no better: the two sides do not accept each other's certificates."""
    reason = error.reason or ""
    return isinstance(error, ssl.SSLCertVerificationError) or "ALERT" in reason or "WRONG_VERSION" in reason


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# Where keys are ------------------------------------------------------------------------------------------


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

    def within(self, namespace: str) -> "EtcdKeys":
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
        """Carries out a step, any but `Heartbeat`; it does no harm if it is carried out twice, or late."""
        match step:
            case steps.Read(key) | steps.ReadLog(key):
                return [get(self.span(key))]
            case steps.ReadHeartbeat(key):
                return [get(self.beats(key), count_only=True)]
            case steps.Count(key):
                # Counted by entries: clients that count at once are not in each other's way.
                return [self.append(key, b""), get(self.entries(key), count_only=True)]
            case steps.Append(key, entry):
                return [self.append(key, f"{entry}\n".encode())]
            case steps.Write(values):
                return [o for key, text in values.items() for o in self.replace(key, encoded(text))]
            # Written again, a notification would wake all again.
            case steps.SetIfAbsent(key, value) | steps.Notify(key, value):
                return [self._move(key, "", value)]
            case steps.CompareAndSet(key, expected, desired):
                return [self._move(key, expected, desired)]
            case steps.Delete(keys):
                return [delete(self.span(key)) for key in keys]
            case steps.Heartbeat():
                raise AssertionError("a lease is kept alive by no transaction")

    def _move(self, key: str, expected: str, desired: str) -> Operation:
        """Writes a register if it holds what is expected (``""``: is absent), else reads it."""
        span = self.span(key)
        holds = [compare(span, "version", 0)]
        if expected:
            held = compare(Span(span.key), "value", encoded(expected))
            holds = [held, compare(self.entries(key), "version", 0)]
        move = Transaction("move", [put(span.key, desired.encode(), self._lease)], holds, [get(span)])
        return {"request_txn": move.json}

    def given(self, step: Step, answers: Sequence[Answer], is_ours: bool) -> str | None:
        """What a step gives by the answers to its operations."""
        match step:
            case steps.Read(key):
                value = value_of(answers[0].keys)
                return None if value is None else to_text(value, key, is_ours)
            case steps.ReadLog(key):
                return to_text(value_of(answers[0].keys) or b"", key, is_ours).rstrip("\n")
            case steps.SetIfAbsent(key, desired) | steps.CompareAndSet(key, _, desired):
                (moved,) = answers
                held = desired.encode() if moved.succeeded else value_of(moved.answers[0].keys)
                return to_text(held or b"", key, is_ours)
            case steps.ReadHeartbeat():
                return str(next(self._looks) if answers[0].number else steps.LAPSED)
            case steps.Count():
                return str(answers[-1].number)
            case _:
                return None


def value_of(held: Sequence[KeyValue]) -> bytes | None:
    """What a key holds whose span was read; None if it is absent."""
    return b"".join(kv.value for kv in held) if held else None
