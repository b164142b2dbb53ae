"""What is written into the store, as data: JSON and short strings, never pickles."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..attribution import Interruption, InterruptionRecord
from ..exception import StoreError
from .keys import BEFORE_FIRST

FAULT = "fault"
DONE = "done"
_SAME_FAULTS = 4  # faults that a decision counts: who is next to fail elsewhere each time, fails differently


@dataclasses.dataclass(frozen=True, order=True)
class Member:
    """A slot with the process that holds it. A slot alone, or a rank alone, names no one.

    Args:
        slot: the place in the job: the initial rank.
        incarnation: which process in a row holds it: 0, 1, 2 …
    """

    slot: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.slot}:{self.incarnation}"

    @property
    def name(self) -> str:
        """What it is called where people read."""
        again = f" (process {self.incarnation + 1})" if self.incarnation else ""
        return f"slot {self.slot}{again}"

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
        at: when it was noticed, in seconds since the epoch; 0 if that is not known.
    """

    member: Member
    rank: int | None
    interruption: Interruption
    message: str
    host: str
    pid: int
    at: float = 0.0

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
                "at": self.at,
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
                at=record["at"],
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
class SameFault:
    """A fault that ended the last iterations, one after the other.

    Args:
        what: its kind and place, in words.
        count: how many iterations in a row.
        member: who had it in the last of them: the first one that left.
    """

    what: str
    count: int
    member: Member


def count_same_faults(before: Iterable[SameFault], faults: Mapping[str, Member]) -> tuple[SameFault, ...]:
    """Counts the faults of an iteration on; those that it did not have are forgotten."""
    counts = {fault.what: fault.count for fault in before}
    same = [SameFault(what, counts.get(what, 0) + 1, member) for what, member in faults.items()]
    return tuple(sorted(same, key=lambda fault: -fault.count)[:_SAME_FAULTS])


@dataclasses.dataclass(frozen=True)
class Decision:
    """What changed from one iteration to the next. Of the size of the change, not of the world.

    Ranks are those of the *widened world*: the world of the iteration that ended, with a place put in for
    each newcomer that takes no one's place. The rank assignment then closes the gaps.

    Args:
        call: number of the wrapped call.
        n: number of the global iteration that begins.
        first: number of the call's first global iteration.
        removed: members that are no longer in.
        ranks: the ranks of the widened world that no one has.
        joined: members that are new; or that stay, where all get their ranks by slot again.
        joined_ranks: the rank of each of them in the widened world.
        inserted: those of these ranks that did not exist before, in their order.
        world_size: size of the widened world, its gaps included.
        min_world_size: the job goes on with no fewer members; the same in all of its decisions.
        same_faults: the faults of the iteration that ended, those most often seen in a row first.
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
    same_faults: tuple[SameFault, ...] = ()

    def rank_of(self, member: Member, before: int | None) -> int:
        """The rank of a member in the widened world.

        Args:
            member: who.
            before: its rank in the iteration that ended; None if it joins.

        Raises:
            ValueError: it has no rank before, and does not join in this decision.
        """
        if member in self.joined:
            return self.joined_ranks[self.joined.index(member)]
        if before is None:
            raise ValueError(f"{member} does not join in iteration {self.n}, and has no rank before it")
        for inserted in self.inserted:
            before += inserted <= before
        return before

    def to_json(self) -> str:
        """One line of JSON."""
        same = [[fault.what, fault.count, str(fault.member)] for fault in self.same_faults]
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
                **({"same_faults": same} if same else {}),
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
                same_faults=tuple(
                    SameFault(str(what), _number(count), Member.parse(name, key))
                    for what, count, name in record.get("same_faults", ())
                ),
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
        same_faults: those of the decision that led to it.
    """

    call: int
    n: int
    nonce: str
    first: int
    members: tuple[Member, ...]
    min_world_size: int = 1
    same_faults: tuple[SameFault, ...] = ()

    def after(self, decision: Decision, nonce: str) -> View:
        """The view once a decision has been carried out."""
        stay = set(self.members) - set(decision.removed)
        members = tuple(sorted(stay.union(decision.joined)))
        return View.of(decision, nonce, members)

    @classmethod
    def of(cls, decision: Decision, nonce: str, members: tuple[Member, ...]) -> View:
        """The view of a decision's iteration, where its members are known."""
        return cls(
            decision.call,
            decision.n,
            nonce,
            decision.first,
            members,
            decision.min_world_size,
            decision.same_faults,
        )

    @property
    def head(self) -> Head | None:
        """The value of the head register while this iteration is on."""
        return None if self.n == BEFORE_FIRST else Head(self.call, self.n, self.nonce)


def roster_to_json(members: tuple[Member, ...]) -> str:
    """All members, by slot, as one line of JSON: slots in a row whose incarnation is the same are one entry.

    So the roster of a job that forms has one entry, which each of its ranks reads.
    """
    runs: list[list[int]] = []  # first slot, last slot, incarnation
    for member in members:
        if runs and runs[-1][1:] == [member.slot - 1, member.incarnation]:
            runs[-1][1] = member.slot
        else:
            runs.append([member.slot, member.slot, member.incarnation])
    return json.dumps(runs, separators=(",", ":"))


def roster_from_json(text: str, key: str) -> tuple[Member, ...]:
    """Reads `roster_to_json`; an error names the key it came from."""
    runs = _parse(text, key)
    try:
        if not isinstance(runs, list):
            raise TypeError
        return tuple(
            Member(slot, _number(incarnation))
            for first, last, incarnation in runs
            for slot in range(_number(first), _number(last) + 1)
        )
    except (TypeError, ValueError):
        raise StoreError(f"store key {key!r} holds {text!r}, which is no roster") from None


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
