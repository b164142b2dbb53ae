"""What is written into the store, as data: JSON and short strings, never pickles."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from ..attribution import Interruption, InterruptionRecord
from ..exception import StoreError
from .keys import BEFORE_FIRST

FAULT = "fault"
DONE = "done"


@dataclasses.dataclass(frozen=True, order=True)
class Member:
    """A slot with the process that holds it. A slot alone, or a rank alone, names nobody.

    Args:
        slot: the place in the job: the initial rank.
        incarnation: which process in a row holds it: 0, 1, 2 …
    """

    slot: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.slot}:{self.incarnation}"

    @classmethod
    def parse(cls, text: str, key: str) -> Member:
        """Reads ``slot:incarnation``; an error names the key it came from."""
        slot, separator, incarnation = str(text).partition(":")
        if not (separator and slot.isdecimal() and incarnation.isdecimal()):
            raise StoreError(f"store key {key!r} holds {text!r}, which is no member (slot:incarnation)")
        return cls(int(slot), int(incarnation))


@dataclasses.dataclass(frozen=True)
class Head:
    """Which iteration is on, and which proposal it was.

    Args:
        call: number of the wrapped call, from 0.
        n: number of the global iteration.
        nonce: name of the proposal that won.
    """

    call: int
    n: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.call}:{self.n}:{self.nonce}"

    @classmethod
    def parse(cls, text: str, key: str) -> Head:
        """Reads ``call:n:nonce``; an error names the key it came from."""
        parts = text.split(":")
        if len(parts) != 3 or not (parts[0].isdecimal() and parts[1].isdecimal()):
            raise StoreError(f"store key {key!r} holds {text!r}, which is no head (call:n:nonce)")
        return cls(int(parts[0]), int(parts[1]), parts[2])


@dataclasses.dataclass(frozen=True)
class Fault:
    """One member's fault, for people and for the log line of the restart.

    Args:
        member: whose.
        rank: its rank in the iteration; None if it had none yet.
        interruption: what kind.
        message: what happened, one line.
        host: where.
        pid: which process.
    """

    member: Member
    rank: int | None
    interruption: Interruption
    message: str
    host: str
    pid: int

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(
            {
                "member": str(self.member),
                "rank": self.rank,
                "interruption": self.interruption.name,
                "message": self.message,
                "host": self.host,
                "pid": self.pid,
            }
        )

    @classmethod
    def from_json(cls, text: str, key: str) -> Fault:
        """Reads `to_json`; an error names the key it came from."""
        record = _json(text, key)
        try:
            return cls(
                member=Member.parse(record["member"], key),
                rank=record["rank"],
                interruption=Interruption[record["interruption"]],
                message=record["message"],
                host=record["host"],
                pid=record["pid"],
            )
        except (KeyError, TypeError) as error:
            raise StoreError(
                f"store key {key!r} holds {text!r}, which is no fault record: {error!r}"
            ) from None

    @property
    def record(self) -> InterruptionRecord:
        """What is public of it."""
        return InterruptionRecord(-1 if self.rank is None else self.rank, self.interruption)


@dataclasses.dataclass(frozen=True)
class Decision:
    """What changed from one iteration to the next. Of the size of the change, not of the world.

    Ranks are those of the *widened world*: the world of the iteration that ended, with a place put in for
    each newcomer that takes nobody's place. The rank assignment then closes the gaps.

    Args:
        call: number of the wrapped call.
        n: number of the global iteration that begins.
        first: number of the call's first global iteration.
        removed: members that are no longer in.
        ranks: the ranks of the widened world that nobody has.
        joined: members that are new.
        joined_ranks: the rank of each of them in the widened world.
        inserted: those of these ranks that did not exist before, in their order.
        world_size: size of the widened world, its gaps included.
        min_world_size: the job goes on with no fewer members; the same in all of its decisions.
    """

    call: int
    n: int
    first: int
    removed: tuple[Member, ...]
    ranks: tuple[int, ...]
    joined: tuple[Member, ...]
    joined_ranks: tuple[int, ...]
    inserted: tuple[int, ...]
    world_size: int
    min_world_size: int = 1

    def rank_after(self, rank: int) -> int:
        """The rank in the widened world of a member that stays.

        Args:
            rank: its rank in the iteration that ended.
        """
        for inserted in self.inserted:
            rank += inserted <= rank
        return rank

    def rank_of(self, member: Member) -> int:
        """The rank in the widened world of a member that joined.

        Raises:
            ValueError: it did not join in this decision.
        """
        return self.joined_ranks[self.joined.index(member)]

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(
            {
                "call": self.call,
                "n": self.n,
                "first": self.first,
                "removed": [str(member) for member in self.removed],
                "ranks": self.ranks,
                "joined": [str(member) for member in self.joined],
                "joined_ranks": self.joined_ranks,
                "inserted": self.inserted,
                "world_size": self.world_size,
                "min_world_size": self.min_world_size,
            }
        )

    @classmethod
    def from_json(cls, text: str, key: str) -> Decision:
        """Reads `to_json`; an error names the key it came from."""
        record = _json(text, key)
        try:
            decision = cls(
                call=_number(record["call"]),
                n=_number(record["n"]),
                first=_number(record["first"]),
                removed=tuple(Member.parse(name, key) for name in record["removed"]),
                ranks=tuple(map(_number, record["ranks"])),
                joined=tuple(Member.parse(name, key) for name in record["joined"]),
                joined_ranks=tuple(map(_number, record["joined_ranks"])),
                inserted=tuple(map(_number, record["inserted"])),
                world_size=_number(record["world_size"]),
                min_world_size=_number(record["min_world_size"]),
            )
            if len(decision.joined) != len(decision.joined_ranks):
                raise ValueError("joined and joined_ranks differ in length")
            return decision
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"store key {key!r} holds {text!r}, which is no decision: {error!r}") from None


@dataclasses.dataclass(frozen=True)
class View:
    """What a member knows of the iteration that it is in.

    Args:
        call: number of the wrapped call.
        n: number of the global iteration.
        nonce: name of the proposal that decided it.
        first: number of the call's first global iteration.
        members: all members, by slot.
        min_world_size: the job goes on with no fewer members.
    """

    call: int
    n: int
    nonce: str
    first: int
    members: tuple[Member, ...]
    min_world_size: int = 1

    def after(self, decision: Decision, nonce: str) -> View:
        """The view once a decision has been carried out."""
        stay = set(self.members) - set(decision.removed)
        members = tuple(sorted(stay.union(decision.joined)))
        return View(decision.call, decision.n, nonce, decision.first, members, decision.min_world_size)

    @property
    def head(self) -> Head | None:
        """The value of the head register while this iteration is on."""
        return None if self.n == BEFORE_FIRST else Head(self.call, self.n, self.nonce)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job stands, seen from outside.

    Args:
        completed: the last iteration that was decided ended well.
        slots: the slots of its members that have not died.
    """

    completed: bool
    slots: frozenset[int]


def roster_to_json(members: tuple[Member, ...]) -> str:
    """All members as one line of JSON."""
    return json.dumps([str(member) for member in members])


def roster_from_json(text: str, key: str) -> tuple[Member, ...]:
    """Reads `roster_to_json`; an error names the key it came from."""
    names = _parse(text, key)
    if not isinstance(names, list):
        raise StoreError(f"store key {key!r} holds {text!r}, which is no roster")
    return tuple(Member.parse(str(name), key) for name in names)


def split_entry(line: str, count: int, key: str) -> list[str]:
    """The words of a log's entry; an error names the key it came from."""
    words = line.split()
    if len(words) != count:
        raise StoreError(f"store key {key!r} holds the entry {line!r}, which has not {count} words")
    return words


def to_number(text: str, key: str) -> int:
    """Reads a number that is not negative; an error names the key it came from."""
    if not text.isdecimal():
        raise StoreError(f"store key {key!r} holds {text!r}, where a number belongs")
    return int(text)


def _parse(text: str, key: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise StoreError(f"store key {key!r} holds {text!r}, which is not JSON: {error}") from None


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no number")
    return value


def _json(text: str, key: str) -> dict[str, Any]:
    record = _parse(text, key)
    if not isinstance(record, dict):
        raise StoreError(f"store key {key!r} holds {text!r}, which is no JSON object")
    return record
