"""What is written into the store, as data, and how it is read: JSON and short strings, never pickles.

What cannot be read is a `StoreError` that names the key.
"""

import dataclasses
import enum
import functools
import json
import os
import socket
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Self

from .._text import IN_LINE, IN_STORE, cut
from ..attribution import Interruption, InterruptionRecord
from ..exception import StoreError
from .standing import UNKNOWN, Stood

FAULT = "fault"
DONE = "done"
#: Marks a death for which a replacement was announced.
RETURNS = "returns"
#: Marks one that waits no more, and lives.
GAVE_UP = "gave_up"
#: Begins the mark of a death by an exception that is counted.
LEFT_BY = "left by "
FOR_GOOD = "for good: "  # begins what is said of a fault that ends the job
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
    def parse(cls, text: str, key: str) -> "Member":
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
    def parse(cls, text: str, key: str) -> "Head":
        """Reads ``call:n:nonce``; an error names the key it came from."""
        parts = text.split(":")
        if len(parts) != 3 or not (parts[0].isdecimal() and parts[1].isdecimal()):
            raise StoreError(f"store key {key!r} holds {text!r}, which is no head (call:n:nonce)")
        return cls(int(parts[0]), int(parts[1]), parts[2])


class Record:
    """A dataclass that is one line of JSON in the store, without the fields that have their defaults.

    A member is written as ``slot:incarnation``, an enum by its name, a record inside as a list. Text is cut:
    a store takes no more than 8 MiB at a time.
    """

    def to_json(self) -> str:
        """One line of JSON."""
        said = {name: value for name, value in vars(self).items() if value != _defaults(type(self))[name]}
        texts = [name for name, value in said.items() if isinstance(value, str) and len(value) > IN_LINE]
        return _to_json(said | {name: cut(said[name], IN_STORE) for name in texts})

    @classmethod
    def from_json(cls, text: str, key: str) -> Self:
        """Reads `to_json`; an error names the key it came from."""
        try:
            values = _typed(dict, json.loads(text), key)
            known = {name: kind for name, kind in _types(cls).items() if name in values}
            return cls(**{name: _typed(kind, values[name], key) for name, kind in known.items()})
        except (KeyError, TypeError, ValueError) as error:
            what = cls.__name__.lower()
            raise StoreError(f"store key {key!r} holds {text!r}, which is no {what}: {error!r}") from None


_types: Any = functools.cache(typing.get_type_hints)
_defaults: Any = functools.cache(lambda of: {field.name: field.default for field in dataclasses.fields(of)})


def _plain(value: object) -> object:
    match value:
        case Member():
            return str(value)
        case enum.Enum():
            return value.name
        case _:
            return [*vars(value).values()]


_to_json = json.JSONEncoder(default=_plain).encode


def _typed(kind: Any, value: Any, key: str) -> Any:
    """What an annotation says, from what JSON has in its place."""
    if type(value) is kind:
        return value
    if kind is Member:
        return Member.parse(value, key)
    if kind is Interruption:
        return Interruption[value]
    if typing.get_origin(kind) is tuple:
        return tuple(_typed(typing.get_args(kind)[0], one, key) for one in value)
    if hasattr(kind, "__dataclass_fields__"):
        parts = zip(_types(kind).values(), value, strict=True)
        return kind(*(_typed(of, one, key) for of, one in parts))
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{value!r} is no {kind}")
    return value


@dataclasses.dataclass(frozen=True)
class MemberRecord(Record):
    """What is known of a member's process.

    Args:
        host: where it runs.
        pid: which process it is; None if that is not known.
        heart: the heart that beats for it as for others; None if it has one of its own.
        gave_up: whether it has left since going on is of no use.
        ended_by: what has ended the job, on all ranks, if it has.
    """

    host: str = ""
    pid: int | None = None
    heart: str | None = None
    gave_up: bool = False
    ended_by: str | None = None

    @classmethod
    def here(cls) -> "MemberRecord":
        """That of this process."""
        return cls(socket.gethostname(), os.getpid())

    def fault(
        self, member: Member, rank: int | None, interruption: Interruption, message: str, at: float = 0.0
    ) -> "Fault":
        """A fault of this process."""
        return Fault(member, rank, interruption, message, self.host, self.pid or 0, at)


@dataclasses.dataclass(frozen=True)
class Fault(Record):
    """One member's fault, for people and for the log line of the restart.

    Args:
        member: whose.
        rank: its rank in the iteration; None if it had none yet.
        interruption: what kind.
        message: what happened, one line.
        host: where.
        pid: which process.
        at: when it was noticed, in seconds since the epoch; 0 if that is not known.
        stood: where it stood, if it hung.
        counted: kind and place, if its member left the job by it and `max_same_faults` counts it.
    """

    member: Member
    rank: int | None
    interruption: Interruption
    message: str
    host: str = ""
    pid: int = 0
    at: float = 0.0
    stood: Stood = UNKNOWN
    counted: str = ""

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

    @property
    def is_for_good(self) -> bool:
        """Whether it ends the job, however often it came."""
        return self.what.startswith(FOR_GOOD)

    @property
    def in_words(self) -> str:
        """What it is, for people."""
        return self.what.removeprefix(FOR_GOOD)


def count_same_faults(
    before: Iterable[SameFault], faults: Mapping[str, Member], dead: Mapping[Member, set[str]], lost: bool
) -> tuple[SameFault, ...]:
    """Counts the faults of an iteration on; those that it did not have are forgotten.

    Args:
        before: those of the iteration before.
        faults: those of this one, and who had it first.
        dead: the members that have ended, with their marks: one says by what its member left the job.
        lost: whether a rank was lost, which may be why others failed; then only faults count that end the
            job, or by which a rank left.
    """
    counts = {fault.what: fault.count for fault in before}
    noted = {mark: member for member, marks in dead.items() for mark in marks if mark.startswith(LEFT_BY)}
    left_by = {mark.removeprefix(LEFT_BY): member for mark, member in noted.items()}
    same = [SameFault(what, counts.get(what, 0) + 1, who) for what, who in {**faults, **left_by}.items()]
    kept = [fault for fault in same if fault.is_for_good or fault.what in left_by or not lost]
    return tuple(sorted(kept, key=lambda fault: (not fault.is_for_good, -fault.count))[:_SAME_FAULTS])


@dataclasses.dataclass(frozen=True)
class Blamed:
    """A restart, and who caused it.

    Args:
        slot: whose fault it was.
        host: where that ran; empty if it is not known.
        at: when, in seconds since the epoch.
    """

    slot: int
    host: str
    at: float


@dataclasses.dataclass(frozen=True)
class Decision(Record):
    """What changed from one iteration to the next. Of the size of the change, not of the world.

    Ranks are those of the *widened world*: the world of the iteration that ended, with a place put in for
    each newcomer that takes no one's place. The rank assignment then closes the gaps.

    Args:
        call: number of the wrapped call.
        n: number of the global iteration that begins.
        first: number of the call's first global iteration.
        removed: members that are no longer in; and spares that leave their place for a lost rank's.
        ranks: the ranks of the widened world that no one has.
        joined: members that are new, and those spares; or that stay, where all get ranks by slot again.
        joined_ranks: the rank of each of them in the widened world.
        inserted: those of these ranks that did not exist before, in their order.
        world_size: size of the widened world, its gaps included.
        min_world_size: the job goes on with no fewer members; the same in all of its decisions.
        same_faults: the faults of the iteration that ended, those most often seen in a row first.
        max_faults: so many faults within ``fault_window`` exclude a slot or host; 0: none does. As
            ``min_world_size`` the same in all decisions, and so is
        fault_window: that time in seconds.
        blamed: who caused the restarts within it, the oldest first.
        excluded: who is out for that, or stays though it should be, in words.
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
    min_world_size: int
    same_faults: tuple[SameFault, ...] = ()
    max_faults: int = 0
    fault_window: float = 0.0
    blamed: tuple[Blamed, ...] = ()
    excluded: str = ""

    def __post_init__(self) -> None:
        if len(self.joined) != len(self.joined_ranks):
            raise ValueError("joined and joined_ranks differ in length")

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


@dataclasses.dataclass(frozen=True)
class View(Record):
    """What a member knows of the iteration that it is in.

    Args:
        decision: what led to it.
        nonce: name of the proposal that decided it.
        members: all members, by slot.
    """

    decision: Decision
    nonce: str
    members: tuple[Member, ...]

    @property
    def n(self) -> int:
        """Number of the global iteration."""
        return self.decision.n

    @property
    def call(self) -> int:
        """Number of the wrapped call."""
        return self.decision.call

    @property
    def is_first(self) -> bool:
        """Whether it is the first iteration of its call."""
        return self.n == self.decision.first

    @property
    def head(self) -> Head:
        """The value of the head register while this iteration is on."""
        return Head(self.decision.call, self.decision.n, self.nonce)

    def after(self, decision: Decision, nonce: str) -> "View":
        """The view once a decision has been carried out."""
        stay = set(self.members) - set(decision.removed)
        return View(decision, nonce, tuple(sorted(stay.union(decision.joined))))


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
    try:
        return tuple(
            Member(slot, _typed(int, incarnation, key))
            for first, last, incarnation in _typed(list, json.loads(text), key)
            for slot in range(first, last + 1)
        )
    except (TypeError, ValueError):
        raise StoreError(f"store key {key!r} holds {text!r}, which is no roster") from None


# Logs and registers, taken apart --------------------------------------------------------------------------
