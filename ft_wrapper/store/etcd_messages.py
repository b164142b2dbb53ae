"""What is asked of etcd's v3 JSON gateway and what it answers, and how that is written.

In its JSON bytes are in base 64, numbers of 64 bits are text, and what is 0 or empty is left out.
"""

from __future__ import annotations

import base64
import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class KeyValue:
    """A key with what it holds, and the revisions at which it was created and written last."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int


@dataclasses.dataclass(frozen=True)
class Span:
    """A key, or all keys from one up to another one.

    Args:
        key: the key, or the first one.
        end: the first key that is not in it; only ``key`` is when None.
    """

    key: bytes
    end: bytes | None = None

    @classmethod
    def prefix(cls, start: bytes) -> Span:
        """All keys that begin so.

        Args:
            start: what they begin with; not empty, and not only bytes 255.
        """
        kept = start.rstrip(b"\xff")
        return cls(start, kept[:-1] + bytes([kept[-1] + 1]))


@dataclasses.dataclass(frozen=True)
class Range:
    """Reads a span.

    Args:
        span: which keys.
        keys_only: without what they hold.
        by_creation: in the order in which they were created rather than by name.
        revision: as it was at that revision; 0: as it is now.
        count_only: only how many keys there are.
    """

    span: Span
    keys_only: bool = False
    by_creation: bool = False
    revision: int = 0
    count_only: bool = False


@dataclasses.dataclass(frozen=True)
class Put:
    """Writes a key, which goes with its lease if that is not 0."""

    key: bytes
    value: bytes
    lease: int = 0


@dataclasses.dataclass(frozen=True)
class Delete:
    """Deletes a span."""

    span: Span


@dataclasses.dataclass(frozen=True)
class Compare:
    """What must hold of a key, or of every key of a span, for a transaction to do what it is for.

    Args:
        span: the key or keys. An absent key has ``version``, ``create`` and ``mod`` 0 and no ``value``.
        target: ``value``, ``version``, ``create`` or ``mod``.
        than: what to compare with.
        result: ``equal``, ``less``, ``greater`` or ``not_equal``.
    """

    span: Span
    target: str
    than: bytes | int
    result: str = "equal"


@dataclasses.dataclass(frozen=True)
class Branch:
    """A transaction within a transaction.

    Args:
        compare: what must hold.
        success: what to do then.
        failure: what to do otherwise.
    """

    compare: tuple[Compare, ...]
    success: tuple[Operation, ...]
    failure: tuple[Operation, ...] = ()


Operation = Range | Put | Delete | Branch


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one operation gave.

    Args:
        keys: what a range read; empty for others.
        number: how many keys a range found, or a deletion deleted.
        succeeded: whether the comparisons of a branch held.
        answers: of the operations that a branch carried out.
    """

    keys: tuple[KeyValue, ...] = ()
    number: int = 0
    succeeded: bool = False
    answers: tuple[Answer, ...] = ()


@dataclasses.dataclass(frozen=True)
class Transaction:
    """What a transaction gave.

    Args:
        succeeded: whether all comparisons held.
        revision: of the store after it.
        answers: of the operations that were carried out, in order.
        repeated: whether it was sent more than once: an earlier one may still be on its way.
    """

    succeeded: bool
    revision: int
    answers: tuple[Answer, ...]
    repeated: bool


@dataclasses.dataclass(frozen=True)
class Event:
    """A write that a watch saw, or a deletion.

    Args:
        key: the key.
        value: what it holds; None if it was deleted.
        revision: of the store by this write.
    """

    key: bytes
    value: bytes | None
    revision: int


@dataclasses.dataclass(frozen=True)
class Watched:
    """A span to watch.

    Args:
        span: which keys.
        start: the first revision of interest.
        puts: whether writes are of interest.
        deletes: whether deletions are.
    """

    span: Span
    start: int
    puts: bool = True
    deletes: bool = True


def to_base64(data: bytes) -> str:
    """Bytes."""
    return base64.b64encode(data).decode()


def span_json(span: Span) -> dict[str, Any]:
    """A key or keys."""
    named = {"key": to_base64(span.key)}
    if span.end is not None:
        named["range_end"] = to_base64(span.end)
    return named


def operation_json(operation: Operation) -> dict[str, dict[str, Any]]:
    """An operation of a transaction: its kind, and its request."""
    if isinstance(operation, Put):
        put = {
            "key": to_base64(operation.key),
            "value": to_base64(operation.value),
            "lease": str(operation.lease),
        }
        return {"request_put": put}
    if isinstance(operation, Delete):
        return {"request_delete_range": span_json(operation.span)}
    if isinstance(operation, Branch):
        return {"request_txn": transaction_json(operation)}
    request: dict[str, Any] = span_json(operation.span)
    if operation.keys_only:
        request["keys_only"] = True
    if operation.by_creation:
        request |= {"sort_target": "CREATE", "sort_order": "ASCEND"}
    if operation.count_only:
        request["count_only"] = True
    if operation.revision:
        request["revision"] = str(operation.revision)
    return {"request_range": request}


def transaction_json(branch: Branch) -> dict[str, Any]:
    """A transaction."""
    return {
        "compare": [comparison_json(one) for one in branch.compare],
        "success": [operation_json(one) for one in branch.success],
        "failure": [operation_json(one) for one in branch.failure],
    }


def comparison_json(compare: Compare) -> dict[str, Any]:
    """A comparison of a transaction."""
    field = compare.target if compare.target in ("value", "version") else f"{compare.target}_revision"
    than = to_base64(compare.than) if isinstance(compare.than, bytes) else str(compare.than)
    return {
        **span_json(compare.span),
        "target": compare.target.upper(),
        "result": compare.result.upper(),
        field: than,
    }


def watch_json(watched: Watched) -> dict[str, Any]:
    """The request that begins a watch."""
    request = {**span_json(watched.span), "start_revision": str(watched.start)}
    without = [*([] if watched.puts else ["NOPUT"]), *([] if watched.deletes else ["NODELETE"])]
    return {"create_request": {**request, "filters": without} if without else request}


def parse_key_value(kv: dict[str, Any]) -> KeyValue:
    """A key and what it holds."""
    return KeyValue(
        key=base64.b64decode(kv["key"]),
        value=base64.b64decode(kv.get("value", "")),
        create_revision=int(kv.get("create_revision", 0)),
        mod_revision=int(kv.get("mod_revision", 0)),
        version=int(kv.get("version", 0)),
        lease=int(kv.get("lease", 0)),
    )


def parse_answer(reply: dict[str, Any]) -> Answer:
    """What an operation gave."""
    number = reply.get("count", reply.get("deleted", 0))
    return Answer(
        keys=tuple(parse_key_value(kv) for kv in reply.get("kvs", [])),
        number=int(number),
        succeeded=bool(reply.get("succeeded")),
        answers=parse_answers(reply),
    )


def parse_answers(reply: dict[str, Any]) -> tuple[Answer, ...]:
    """What the operations of a transaction gave."""
    return tuple(parse_answer(next(iter(one.values()), {})) for one in reply.get("responses", []))


def parse_revision(reply: dict[str, Any]) -> int:
    """The store's revision, from the answer's header."""
    return int(reply.get("header", {}).get("revision", 0))
