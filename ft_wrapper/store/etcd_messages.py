"""Requests to etcd's JSON gateway, the meaning of its answers, and the layout of a store's keys. No I/O.

In the gateway's JSON, bytes are in base 64, 64-bit numbers are text, and fields that are 0 or empty are left
out.
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

#: Approximate bytes of the largest request that etcd accepts by default.
LARGEST_REQUEST = 1_500_000
#: Most operations of a transaction that etcd accepts by default.
MOST_OPERATIONS = 128

NOT_FOUND, PERMISSION_DENIED, _UNAUTHENTICATED = 5, 7, 16  # gRPC's codes, as the gateway gives them
_PASSING = {1, 2, 4, 10, 14}  # canceled, unknown, deadline exceeded, aborted, unavailable
_LOGIN_AGAIN = ("invalid auth token", "revision of auth store is old", "invalid auth", "user name is empty")

_END = b"\0\0"  # of a key's name
_ENTRY = b"/"


class EtcdRefused(StoreError):
    """etcd refused a request. The message names the request and the reason.

    Attributes:
        code: gRPC's number of the reason.
        reason: the reason in etcd's words.
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
    """The requested revision is older than etcd's last compaction: read, and go on from there."""


class NoAnswer(Exception):
    """A member did not answer, or cannot right now: another attempt may succeed."""


class Range(NamedTuple):
    """One key; or all keys from ``key`` up to ``end``, ``end`` excluded."""

    key: bytes
    end: bytes | None = None

    @classmethod
    def prefix(cls, start: bytes) -> "Range":
        """All keys that begin with ``start``, which must contain a byte other than 255."""
        kept = start.rstrip(b"\xff")
        return cls(start, kept[:-1] + bytes([kept[-1] + 1]))

    @property
    def json(self) -> dict[str, str]:
        """The span as a request names it."""
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
        """Reads a key of an answer."""
        return cls(
            base64.b64decode(kv["key"]),
            base64.b64decode(kv.get("value", "")),
            *(int(kv.get(number, 0)) for number in ("create_revision", "mod_revision", "lease")),
        )


class Answer(NamedTuple):
    """The answer to one operation, or to a transaction.

    Args:
        keys: keys that `get` read, in the order in which they were created.
        number: number of keys that `get` found or `delete` deleted.
        succeeded: whether the comparisons of a transaction were true.
        answers: answers to the operations that a transaction carried out, in order.
        revision: revision of the store after a transaction.
    """

    keys: tuple[KeyValue, ...]
    number: int
    succeeded: bool
    answers: "list[Answer]"
    revision: int

    @classmethod
    def parse(cls, reply: dict[str, Any]) -> "Answer":
        """Reads an answer."""
        return cls(
            tuple(KeyValue.parse(kv) for kv in reply.get("kvs", [])),
            int(reply.get("count", reply.get("deleted", 0))),
            bool(reply.get("succeeded")),
            [cls.parse(next(iter(one.values()), {})) for one in reply.get("responses", [])],
            int(reply.get("header", {}).get("revision", 0)),
        )


#: A condition on keys, as JSON: made by `compare`.
Comparison = dict[str, str]
#: An operation of a transaction, as JSON: made by `get`, `put` or `delete`.
Operation = dict[str, dict[str, Any]]


def get(span: Range, *, keys_only: bool = False, count_only: bool = False) -> Operation:
    """Reads keys."""
    request = {**span.json, "sort_target": "CREATE", "sort_order": "ASCEND"}
    return {"request_range": request | {"keys_only": keys_only, "count_only": count_only}}


def put(key: bytes, value: bytes, lease: int = 0) -> Operation:
    """Writes a key, with a lease unless that is 0."""
    return {"request_put": {"key": _to_base64(key), "value": _to_base64(value), "lease": str(lease)}}


def delete(span: Range) -> Operation:
    """Deletes keys."""
    return {"request_delete_range": span.json}


class Transaction(NamedTuple):
    """Operations that etcd carries out at once if all comparisons are true, and others if they are not.

    Args:
        what: name of the transaction, for messages.
        success: operations if all comparisons are true; at most `MOST_OPERATIONS`.
        compare: comparisons, made by `compare`.
        failure: operations otherwise.
    """

    what: str
    success: Sequence[Operation]
    compare: Sequence[Comparison] = ()
    failure: Sequence[Operation] = ()

    @property
    def json(self) -> dict[str, Any]:
        """The transaction as part of a request, or of another transaction."""
        return {"compare": [*self.compare], "success": [*self.success], "failure": [*self.failure]}


def compare(span: Range, target: str, than: bytes | int, result: str = "equal") -> Comparison:
    """A comparison that has to be true for each key of a span.

    Args:
        span: the keys. An absent key has ``version``, ``create`` and ``mod`` 0 and no ``value``.
        target: what to compare: ``value``, ``version``, ``create`` or ``mod``.
        than: value to compare it with.
        result: required result: ``equal``, ``less`` or ``greater``.
    """
    field = target if target in ("value", "version") else f"{target}_revision"
    text = _to_base64(than) if isinstance(than, bytes) else str(than)
    return {**span.json, "target": target.upper(), "result": result.upper(), field: text}


def read_answer(what: str, endpoint: Endpoint, status: int, data: bytes) -> dict[str, Any]:
    """Reads an answer as JSON.

    Args:
        what: name of the request, for messages.
        endpoint: the member that answers.
        status: HTTP status.
        data: body of the answer.

    Raises:
        NoAnswer: the member cannot answer now.
        EtcdCompacted: etcd no longer has the revision.
        EtcdRefused: etcd refuses the request.
        StoreError: the server is not etcd.
    """
    try:
        reply = json.loads(data)
    except ValueError:
        reply = None
    if isinstance(reply, dict):
        inner = reply.get("error")
        error = inner if isinstance(inner, dict) else reply  # a dict inside in the answers of a stream
        code = error.get("grpc_code") or error.get("code")  # the first name until etcd 3.4, as below
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
    """The error for a member's refusal.

    Args:
        what: name of the request, for messages.
        endpoint: the member that refuses.
        code: gRPC's number of the reason.
        reason: the reason in etcd's words.
    """
    if "compacted" in reason:
        return EtcdCompacted(f"{endpoint}: {what}: {reason}")
    if "too many requests" in reason or (code in _PASSING and "invalid" not in reason):
        return NoAnswer(f"{endpoint}: {reason}")
    hint = ""
    if "too large" in reason or "larger than max" in reason:  # the second text is the gateway's
        hint = f"; etcd takes no more than about {LARGEST_REQUEST} bytes a request"
    elif "space exceeded" in reason:
        hint = "; compact and defragment it, and disarm its alarm"
    elif "user name is empty" in reason:
        hint = "; it wants a user and a password"
    return EtcdRefused(f"{endpoint} refuses {what}: {reason}{hint}", code, reason)


def meaning_of(what: str, endpoint: Endpoint, error: Exception) -> Exception:
    """The error of this package for an error of the HTTP library.

    Args:
        what: name of the request, for messages.
        endpoint: the member that got the request.
        error: the library's error, or a `NoAnswer`, which is returned unchanged.
    """
    if isinstance(error, NoAnswer):
        return error
    cause: BaseException | None = error
    hint = ""
    while cause is not None:
        # A server hangs up if only one side speaks TLS, if it does not accept a certificate (its alert may be
        # lost), and if it is killed.
        if isinstance(cause, ssl.SSLError | ConnectionResetError):
            wants = "speaks TLS, and whether the certificates are right" if endpoint.tls else "wants https"
            hint = f"; see whether it {wants}"
        if isinstance(cause, ssl.SSLError) and _is_final(cause):
            return StoreError(f"{endpoint}: {what}: no TLS connection: {cause.reason or cause}{hint}")
        following = cause.__cause__ or cause.__context__
        cause = following or next((a for a in cause.args if isinstance(a, BaseException)), None)
    # The HTTP library puts an object's repr in front of its message.
    return NoAnswer(f"{endpoint}: {str(error).rpartition('>: ')[2] or repr(error)}{hint}")


def _is_final(error: ssl.SSLError) -> bool:
    """Whether retries are useless, since the two sides do not accept each other's certificates."""
    reason = error.reason or ""
    return isinstance(error, ssl.SSLCertVerificationError) or "ALERT" in reason or "WRONG_VERSION" in reason


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# Where keys are ------------------------------------------------------------------------------------------


class EtcdKeys:
    """The layout of a store's keys: a set value is at the key's name, appended entries are at names below it.

    Args:
        prefix: prefix of all keys.
        lease: lease of all keys.
        nonce: nonce of the job, so that heartbeats of an earlier job with the same prefix do not count.
    """

    def __init__(self, prefix: bytes, lease: int, nonce: bytes) -> None:
        self._prefix = prefix
        self._lease = lease
        self._nonce = nonce
        self._looks = itertools.count(1)

    def within(self, namespace: str) -> "EtcdKeys":
        """The keys of a namespace below this one."""
        return EtcdKeys(self.all(namespace).key, self._lease, self._nonce)

    # Where they are -------------------------------------------------------------------------------------

    def all(self, start: str = "") -> Range:
        """All keys whose names begin with ``start``."""
        return Range.prefix(self._prefix + start.encode().replace(b"\0", b"\0\xff"))

    def span(self, key: str) -> Range:
        """The set value of a key and all entries since then, in the order of their creation."""
        return Range.prefix(self.all(key).key + _END)  # with _END no name is a prefix of another

    def entries(self, key: str) -> Range:
        """The appended entries of a key."""
        return Range.prefix(self.span(key).key + _ENTRY)

    def beats(self, key: str) -> Range:
        """The heartbeats of a key: entries with their own leases."""
        return Range.prefix(self.entries(key).key + self._nonce)

    def name(self, place: bytes) -> str:
        """The name of the key to which a key of etcd belongs."""
        name = place.removeprefix(self._prefix)
        return name[: name.index(_END)].replace(b"\0\xff", b"\0").decode()

    # Operations on them ---------------------------------------------------------------------------------

    def replace(self, key: str, value: bytes) -> list[Operation]:
        """Sets a key."""
        return [put(self.span(key).key, value, self._lease), delete(self.entries(key))]

    def append(self, key: str, value: bytes) -> Operation:
        """Appends an entry under a unique name, so that a repeated write makes no second entry."""
        return put(self.entries(key).key + secrets.token_hex(12).encode(), value, self._lease)

    def unchanged(self, key: str, held: Sequence[KeyValue]) -> list[Comparison]:
        """The comparisons that are true as long as nothing was written to a key, and it was not deleted.

        Entries are deleted only together with the oldest one, so it is enough to look at the oldest one.
        """
        span = self.span(key)
        if not held:
            return [compare(span, "version", 0)]
        newest = max(kv.mod_revision for kv in held)
        return [
            compare(Range(held[0].key), "create", held[0].create_revision),
            compare(span, "mod", newest + 1, "less"),
        ]

    def operations(self, step: Step) -> list[Operation]:
        """The operations of a step other than `Heartbeat`; harmless if carried out twice, or late."""
        match step:
            case steps.Read(key) | steps.ReadLog(key):
                return [get(self.span(key))]
            case steps.ReadHeartbeat(key):
                return [get(self.beats(key), count_only=True)]
            case steps.Count(key):
                # Each count is an entry, so clients that count at once do not conflict.
                return [self.append(key, b""), get(self.entries(key), count_only=True)]
            case steps.Append(key, entry):
                return [self.append(key, f"{entry}\n".encode())]
            case steps.Write(values):
                return [o for key, text in values.items() for o in self.replace(key, encoded(text))]
            # A second write of a notification would wake all waiters again.
            case steps.SetIfAbsent(key, value) | steps.Notify(key, value):
                return [self._move(key, "", value)]
            case steps.CompareAndSet(key, expected, desired):
                return [self._move(key, expected, desired)]
            case steps.Delete(keys):
                return [delete(self.span(key)) for key in keys]
            case steps.Heartbeat():
                raise AssertionError("a lease is kept alive by no transaction")

    def _move(self, key: str, expected: str, desired: str) -> Operation:
        """Writes a register if it has the expected value (``""``: is absent); otherwise reads it."""
        span = self.span(key)
        holds = [compare(span, "version", 0)]
        if expected:
            held = compare(Range(span.key), "value", encoded(expected))
            holds = [held, compare(self.entries(key), "version", 0)]
        move = Transaction("move", [put(span.key, desired.encode(), self._lease)], holds, [get(span)])
        return {"request_txn": move.json}

    def given(self, step: Step, answers: Sequence[Answer], is_ours: bool) -> str | None:
        """The result of a step, from the answers to its operations."""
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
    """The value of a key, from the parts read from its span; None if the key is absent."""
    return b"".join(kv.value for kv in held) if held else None
