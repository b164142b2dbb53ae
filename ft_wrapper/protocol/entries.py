"""How registers and the lines of logs in the store are read.

What cannot be read is a `StoreError` that names the key.
"""

from collections.abc import Iterable

from ..exception import StoreError
from . import keys
from .records import DONE, FAULT, GAVE_UP, LEFT_BY, RETURNS, Decision, Head, Member


def present(key: str, text: str | None) -> str:
    """What a key holds that has been written before this one is told of it."""
    if text is None:
        raise StoreError(f"store key {key!r} is gone, though what leads to it is there")
    return text


def split_entry(line: str, count: int, key: str, *, rest: bool = False) -> list[str]:
    """The words of a log's entry; an error names the key it came from.

    Args:
        line: the entry.
        count: how many words it has.
        key: where it stands.
        rest: whether text may follow them; then it comes last, as it is.
    """
    words = line.split(maxsplit=count) if rest else line.split()
    if len(words) != count and not (rest and len(words) == count + 1):
        raise StoreError(f"store key {key!r} holds the entry {line!r}, which has not {count} words")
    return words


def to_number(text: str, key: str) -> int:
    """Reads a number that is not negative; an error names the key it came from."""
    if not text.isdecimal():
        raise StoreError(f"store key {key!r} holds {text!r}, where a number belongs")
    return int(text)


def decision_in(head: Head, text: str) -> Decision:
    """The decision behind a head."""
    key = keys.decision(head.n, head.nonce)
    decision = Decision.from_json(text, key)
    if (decision.call, decision.n) != (head.call, head.n):
        raise StoreError(
            f"store key {key!r} holds a decision on iteration {decision.n} of call {decision.call}, "
            f"where one on iteration {head.n} of call {head.call} belongs"
        )
    return decision


def arrivals_in(n: int, log: Iterable[str]) -> dict[Member, tuple[int, int]]:
    """Members that have left the function of n, each with its rank and the size of that world."""
    key = keys.arrived(n)
    arrivals = {}
    for line in log:
        name, rank, world_size, *_ = split_entry(line, 3, key, rest=True)
        arrivals[Member.parse(name, key)] = (to_number(rank, key), to_number(world_size, key))
    return arrivals


def faults_in(n: int, log: Iterable[str]) -> dict[str, Member]:
    """The faults with which members have left n, each with the first one that had it."""
    key = keys.arrived(n)
    faults: dict[str, Member] = {}
    for line in log:
        name, _, _, *fault = split_entry(line, 3, key, rest=True)
        if fault:
            faults.setdefault(fault[0], Member.parse(name, key))
    return faults


def joins_in(n: int, log: Iterable[str], call: int | None) -> set[Member]:
    """The members that want into the iteration after n; only those that come for a call, if that is given."""
    key = keys.join(n)
    joins = set()
    for line in log:
        name, comes_for = split_entry(line, 2, key)
        if call is None or to_number(comes_for, key) == call:
            joins.add(Member.parse(name, key))
    return joins


def outcome_in(n: int, register: str | None) -> str | None:
    """How iteration n ended, by what its register holds; None while it is on."""
    if register not in (None, DONE, FAULT):
        raise StoreError(f"store key {keys.end(n)!r} holds {register!r}, which is no outcome")
    return register


def deaths_in(n: int, log: Iterable[str]) -> dict[Member, set[str]]:
    """The members of n that have ended, by its log, with what was noted.

    That is `RETURNS`, `GAVE_UP`, `LEFT_BY` with kind and place, or nothing.
    """
    key = keys.dead(n)
    deaths: dict[Member, set[str]] = {}
    for line in log:
        name, _, mark = line.partition(" ")
        if mark not in ("", RETURNS, GAVE_UP) and not mark.startswith(LEFT_BY):
            raise StoreError(f"store key {key!r} holds the entry {line!r}, which is no member's death")
        deaths.setdefault(Member.parse(name, key), set()).add(mark)
    return deaths
