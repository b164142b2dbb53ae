"""The data written into the store: members, faults, decisions, and the entries of its logs.

The terms: *n* numbers the global iterations. The *head* register names the current one. A *decision* says
what changes from n - 1 to n. A member has *arrived* once it has left the function of n and waits for n + 1.
A *call* is one call of the wrapped function; it has one iteration or more.

Dataclasses are stored as lines of JSON, never as pickles. Unreadable text raises a `StoreError` that names
the key.
"""

import dataclasses
import enum
import functools
import json
import typing
from collections.abc import Iterable
from typing import Any, Self

from .._text import IN_LINE, IN_STORE, cut
from ..attribution import Interruption, InterruptionRecord
from ..exception import StoreError
from . import keys
from .operations import Operations, read

FAULT = "fault"
DONE = "done"
#: Marks a death for which a replacement was announced.
RETURNS = "returns"
#: Marks a member that stopped waiting for the job to form; its process may be alive.
STOPPED_WAITING = "gave_up"
#: Begins the mark of a death by an exception that `max_same_faults` counts.
LEFT_BY = "left by "
#: Marks a joiner that has waited ``join_window`` for others, in case no member is left.
GATHERED = "gathered"
FOR_GOOD = "for good: "  # begins the signature of a fault that ends the job at once
# These wait for one peer, not for all.
_POINT_TO_POINT = {"send", "recv", "isend", "irecv", "send_object_list", "recv_object_list"}


class Record:
    """A dataclass that is written as one line of JSON, without fields that have their default value.

    An object whose class has a `parse` method is written as text, an enum as its name (a `StrEnum` as its
    value), a nested dataclass as a list. Long text is cut, since a store takes at most 8 MiB at a time.
    """

    def to_json(self) -> str:
        """One line of JSON."""
        given = {name: value for name, value in vars(self).items() if value != _defaults(type(self))[name]}
        texts = [name for name, value in given.items() if isinstance(value, str) and len(value) > IN_LINE]
        return _to_json(given | {name: cut(given[name], IN_STORE) for name in texts})

    @classmethod
    def from_json(cls, text: str, key: str) -> Self:
        """Reads `to_json`; an error names the key."""
        try:
            values = _reader(dict)(json.loads(text), key)
            known = {name: kind for name, kind in _types(cls).items() if name in values}
            return cls(**{name: _reader(kind)(values[name], key) for name, kind in known.items()})
        except (KeyError, TypeError, ValueError) as error:
            what, held = cls.__name__.lower(), cut(text, IN_LINE)
            raise StoreError(f"store key {key!r} holds {held!r}, which is not a {what}: {error!r}") from None


_types: Any = functools.cache(typing.get_type_hints)
_defaults: Any = functools.cache(lambda of: {field.name: field.default for field in dataclasses.fields(of)})


def _plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.name
    return str(value) if hasattr(value, "parse") else [*vars(value).values()]


_to_json = json.JSONEncoder(default=_plain, separators=(",", ":")).encode


@functools.cache
def _reader(kind: Any) -> Any:
    """A function that converts a JSON value to an annotated type; it also takes the key, for errors."""
    parts, of = typing.get_args(kind), typing.get_origin(kind) or kind
    inner: Any = _reader(parts[0]) if parts else None
    if type(None) in parts:
        return lambda value, key: None if value is None else inner(value, key)
    if hasattr(kind, "parse"):
        return kind.parse
    if of is tuple:
        return lambda value, key: tuple([inner(one, key) for one in _reader(list)(value, key)])
    if isinstance(of, enum.EnumMeta):
        return lambda value, key: kind(value) if issubclass(kind, enum.StrEnum) else kind[value]
    if hasattr(kind, "__dataclass_fields__"):
        fields = [_reader(field) for field in _types(kind).values()]
        return lambda value, key: kind(*[read(one, key) for read, one in zip(fields, value, strict=True)])

    def checked(value: Any, key: str) -> Any:
        if type(value) is not of and (of, type(value)) != (float, int):
            raise TypeError(f"{value!r} is not a {kind}")
        return value

    return checked


@dataclasses.dataclass(frozen=True, order=True)
class Member:
    """A slot and the process that holds it. A slot or a rank alone does not identify a process.

    Args:
        slot: the initial rank.
        incarnation: number of the process among those that have held the slot, from 0.
    """

    slot: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.slot}:{self.incarnation}"

    @property
    def name(self) -> str:
        """The member's name, for people."""
        again = f" (process {self.incarnation + 1})" if self.incarnation else ""
        return f"slot {self.slot}{again}"

    @classmethod
    def parse(cls, text: str, key: str) -> "Member":
        """Reads ``slot:incarnation``; an error names the key."""
        slot, separator, incarnation = str(text).partition(":")
        if not (separator and slot.isdecimal() and incarnation.isdecimal()):
            raise StoreError(f"store key {key!r} holds {text!r}, which is not a member (slot:incarnation)")
        return cls(int(slot), int(incarnation))


@dataclasses.dataclass(frozen=True)
class Head:
    """The current iteration, and the proposal that decided it.

    Args:
        call: number of the wrapped call, from 0.
        n: number of the global iteration.
        nonce: name of the proposal.
    """

    call: int
    n: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.call}:{self.n}:{self.nonce}"

    @classmethod
    def parse(cls, text: str, key: str) -> "Head":
        """Reads ``call:n:nonce``; an error names the key."""
        parts = text.split(":")
        if len(parts) != 3 or not (parts[0].isdecimal() and parts[1].isdecimal()):
            raise StoreError(f"store key {key!r} holds {text!r}, which is not a head (call:n:nonce)")
        return cls(int(parts[0]), int(parts[1]), parts[2])


@dataclasses.dataclass(frozen=True)
class MemberRecord(Record):
    """What is known of a member's process.

    Args:
        host: the host's name.
        pid: the process; None if unknown.
        heart: name of the heartbeat that it shares with its node's ranks; None if it has its own.
        gave_up: whether it has left on purpose, so that no process should replace it.
        ended_by: the fault that has ended the job on all ranks, if one has.
    """

    host: str = ""
    pid: int | None = None
    heart: str | None = None
    gave_up: bool = False
    ended_by: str | None = None

    def fault(
        self, member: Member, rank: int | None, interruption: Interruption, message: str, at: float = 0.0
    ) -> "Fault":
        """A fault of this process."""
        return Fault(member, rank, interruption, message, self.host, self.pid or 0, at)


@dataclasses.dataclass(frozen=True)
class GroupSequence:
    """How far a rank was in a process group.

    Args:
        group: the group's name, the same on all of its ranks.
        size: how many ranks it has.
        number: how many operations the rank had begun.
        is_exact: whether only collectives are counted, so that ranks at the same operation have the same
            number. Gloo also counts ``send`` and ``recv``.
    """

    group: str
    size: int
    number: int
    is_exact: bool


@dataclasses.dataclass(frozen=True)
class CollectivePosition:
    """Where a rank was in ``torch.distributed`` when it hung. By default nothing is known.

    Args:
        operation: the function that it was in; empty if in none.
        group: the process group of the operation; empty if unknown.
        counts: how far it was in each of its groups, in the first eight.
    """

    operation: str = ""
    group: str = ""
    counts: tuple[GroupSequence, ...] = ()

    @property
    def in_collective(self) -> bool:
        """Whether it waited for all ranks of a group."""
        return bool(self.group) and self.operation not in _POINT_TO_POINT

    def __str__(self) -> str:
        which = "".join(f" #{count.number}" for count in self.counts if count.group == self.group)
        return f"{self.operation}{which} of group {self.group}" if self.group else self.operation


@dataclasses.dataclass(frozen=True)
class Fault(Record):
    """One member's fault, for people and for the log line of the restart.

    Args:
        member: the member.
        rank: its rank in the iteration; None if it had none yet.
        interruption: the kind of fault.
        message: what happened, one line.
        host: the member's host.
        pid: its process.
        at: when it was noticed, in seconds since the epoch; 0 if unknown.
        position: where it was in ``torch.distributed``, if it hung.
        counted: signature of the fault, if the member left the job by it and `max_same_faults` counts it.
        blames: whether the member is to blame, rather than only saying what was found.
    """

    member: Member
    rank: int | None
    interruption: Interruption
    message: str
    host: str = ""
    pid: int = 0
    at: float = 0.0
    position: CollectivePosition = CollectivePosition()
    counted: str = ""
    blames: bool = True

    @property
    def record(self) -> InterruptionRecord:
        """Its public part."""
        return InterruptionRecord(-1 if self.rank is None else self.rank, self.interruption)


@dataclasses.dataclass(frozen=True)
class SameFault:
    """A fault, and how many iterations in a row it has ended.

    Args:
        what: its signature: the kind of exception and the source line, as text.
        count: how many iterations in a row.
        member: the first member that left the last of them by this fault.
    """

    what: str
    count: int
    member: Member

    @property
    def is_for_good(self) -> bool:
        """Whether it ends the job at its first occurrence."""
        return self.what.startswith(FOR_GOOD)

    @property
    def description(self) -> str:
        """The fault, for people."""
        return self.what.removeprefix(FOR_GOOD)


@dataclasses.dataclass(frozen=True)
class Blamed:
    """A restart, and the member that caused it.

    Args:
        slot: the member's slot.
        host: its host; empty if unknown.
        at: when, in seconds since the epoch.
    """

    slot: int
    host: str
    at: float


@dataclasses.dataclass(frozen=True)
class Decision(Record):
    """What changes from one iteration to the next. Its size is that of the change, not of the world.

    Ranks are those of the *widened world*: the world of the iteration that ended, with a rank inserted for
    each newcomer that replaces no member. The rank assignment then closes the gaps.

    Args:
        call: number of the wrapped call.
        n: number of the global iteration that begins.
        first: number of the call's first global iteration.
        removed: members that are no longer in the job, and spares that move to a lost rank.
        ranks: the gaps: ranks of the widened world without a member.
        joined: members that get a rank here: newcomers, spares that move, or all members if ranks are
            reassigned by slot.
        joined_ranks: the rank of each of them in the widened world.
        inserted: those of ``joined_ranks`` that did not exist before, in ascending order.
        world_size: size of the widened world, its gaps included.
        min_world_size: fewest members that the job goes on with; the same in all of its decisions.
        same_faults: faults of the iteration that ended: those that end the job first, then by their count.
        max_faults: number of faults within ``fault_window`` that excludes a slot or host; 0 for no limit. The
            same in all decisions.
        fault_window: time in seconds; the same in all decisions.
        blamed: the restarts within ``fault_window`` and the members that caused them, oldest first.
        excluded: describes which slots and hosts are excluded, or stay though they should be excluded.
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

    def rank_of(self, member: Member, before: int | None) -> int:
        """The rank of a member in the widened world.

        Args:
            member: the member.
            before: its rank in the iteration that ended; None if it joins.
        """
        if member in self.joined:
            return self.joined_ranks[self.joined.index(member)]
        assert before is not None, f"{member} does not join in iteration {self.n}"
        for inserted in self.inserted:
            before += inserted <= before
        return before


@dataclasses.dataclass(frozen=True)
class View(Record):
    """A member's view of its iteration.

    Args:
        decision: the decision that led to it.
        nonce: name of the proposal that made the decision.
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
        return self.decision.n == self.decision.first

    @property
    def head(self) -> Head:
        """The value of the head register while this iteration is the current one."""
        return Head(self.decision.call, self.decision.n, self.nonce)

    def after(self, decision: Decision, nonce: str) -> "View":
        """The view once a decision has been carried out."""
        stay = set(self.members) - set(decision.removed)
        return View(decision, nonce, tuple(sorted(stay.union(decision.joined))))


def roster_to_json(members: tuple[Member, ...]) -> str:
    """All members, by slot, as one line of JSON. Consecutive slots of the same incarnation are one entry.

    So the roster of a newly formed job, which every rank reads, is one entry.
    """
    runs: list[list[int]] = []  # first slot, last slot, incarnation
    for member in members:
        if runs and runs[-1][1:] == [member.slot - 1, member.incarnation]:
            runs[-1][1] = member.slot
        else:
            runs.append([member.slot, member.slot, member.incarnation])
    return json.dumps(runs, separators=(",", ":"))


def roster_from_json(text: str, key: str) -> tuple[Member, ...]:
    """Reads `roster_to_json`; an error names the key."""
    try:
        runs = _reader(tuple[tuple[int, ...], ...])(json.loads(text), key)
        return tuple(Member(slot, again) for first, last, again in runs for slot in range(first, last + 1))
    except (TypeError, ValueError):
        raise StoreError(f"store key {key!r} holds {text!r}, which is not a roster") from None


def record_of(store: Operations, member: Member) -> MemberRecord:
    """The record of a member's process; an empty one if the key is absent.

    Raises:
        StoreError: the record cannot be read; names the key.
    """
    key = keys.member(str(member))
    text = read(store, key)
    return MemberRecord() if text is None else MemberRecord.from_json(text, key)


# Logs and registers, taken apart --------------------------------------------------------------------------


def present(key: str, text: str | None) -> str:
    """The value of a key that must exist, since another key refers to it."""
    if text is None:
        raise StoreError(f"store key {key!r} is missing, though another key refers to it")
    return text


def split_entry(line: str, count: int, key: str, *, rest: bool = False) -> list[str]:
    """Splits an entry of a log into words; an error names the key.

    Args:
        line: the entry.
        count: number of words.
        key: the log's key.
        rest: whether text may follow the words; it is then the last item, unchanged.
    """
    words = line.split(maxsplit=count) if rest else line.split()
    if len(words) != count and not (rest and len(words) == count + 1):
        raise StoreError(f"store key {key!r} holds the entry {line!r}, which does not have {count} words")
    return words


def to_number(text: str, key: str) -> int:
    """Reads a number that is not negative; an error names the key."""
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
            f"not one on iteration {head.n} of call {head.call}"
        )
    return decision


@dataclasses.dataclass(frozen=True)
class ArrivalEntry:
    """A member's entry in the log of arrivals: it has left the function of an iteration.

    Args:
        rank: its rank in that iteration.
        world_size: size of the world that this rank belongs to.
        fault: signature of its fault, if `max_same_faults` counts it.
    """

    rank: int
    world_size: int
    fault: str = ""

    def __str__(self) -> str:
        return f"{self.rank} {self.world_size} {self.fault}".rstrip()


def arrivals_in(n: int, log: Iterable[str]) -> dict[Member, ArrivalEntry]:
    """The members that have arrived, in order of arrival."""
    key = keys.arrived(n)
    arrivals = {}
    for line in log:
        name, rank, world_size, *fault = split_entry(line, 3, key, rest=True)
        arrival = ArrivalEntry(to_number(rank, key), to_number(world_size, key), *fault)
        arrivals[Member.parse(name, key)] = arrival
    return arrivals


def joins_in(n: int, log: Iterable[str], call: int | None = None) -> dict[Member, bool]:
    """The members that ask to join the iteration after n, and whether each is marked `GATHERED`.

    Args:
        n: the iteration.
        log: its log of joins.
        call: only joiners for this call; all when None.
    """
    key = keys.join(n)
    joins: dict[Member, bool] = {}
    for line in log:
        asked = line.removesuffix(f" {GATHERED}")
        name, comes_for = split_entry(asked, 2, key)
        if call is None or to_number(comes_for, key) == call:
            member = Member.parse(name, key)
            joins[member] = joins.get(member, False) or asked != line
    return joins


def outcome_in(n: int, register: str | None) -> str | None:
    """How iteration n ended, from the value of its register; None while it runs."""
    if register not in (None, DONE, FAULT):
        raise StoreError(f"store key {keys.end(n)!r} holds {register!r}, which is not an outcome")
    return register


def deaths_in(n: int, log: Iterable[str]) -> dict[Member, set[str]]:
    """The dead of n, from its log, each with its marks.

    A mark is `RETURNS`, `STOPPED_WAITING`, `LEFT_BY` with a signature, or empty.
    """
    key = keys.dead(n)
    deaths: dict[Member, set[str]] = {}
    for line in log:
        name, _, mark = line.partition(" ")
        if mark not in ("", RETURNS, STOPPED_WAITING) and not mark.startswith(LEFT_BY):
            raise StoreError(f"store key {key!r} holds the entry {line!r}, which is not a member's death")
        deaths.setdefault(Member.parse(name, key), set()).add(mark)
    return deaths
